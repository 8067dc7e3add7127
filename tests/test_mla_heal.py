"""Healing: adapters over 4-bit weights, the trap of evaluated 4-bit layers, merging, and runs that are resumed."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import warnings
from functools import cache as once
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hf_kvcache import (
    KVCache,
    convert_to_mla,
    disable_absorb,
    enable_absorb,
    merge_healed,
    prepare_for_healing,
)
from hf_kvcache.mla import heal as heal_module
from hf_kvcache.mla import keep_trainable

pytest.importorskip("peft")
pytest.importorskip("accelerate")
bnb = pytest.importorskip("bitsandbytes")

import heal_mla_qlora  # noqa: E402
import healing  # noqa: E402

PACKS = bool(bnb.functional.has_avx512bf16())
needs_packing = pytest.mark.skipif(not PACKS, reason="this CPU has no AVX512-BF16, so bitsandbytes packs nothing")
SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def ids_of(seed, batch=2, length=32):
    return torch.randint(3, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


CALIBRATION = [ids_of(seed, 2, 64) for seed in range(3)]
PROMPT = ids_of(40, 2, 24)
MASK = torch.ones_like(PROMPT)
MASK[1, :7] = 0
HOSTS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 2}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"num_key_value_heads": 2}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"num_key_value_heads": 2, "head_dim": 16}),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8}),
}


def original(host="llama", **kwargs):
    return copy.deepcopy(_original(host, **kwargs))


def converted(host="llama", **kwargs):
    return copy.deepcopy(_converted(host, **kwargs or {"kv_keep": 0.5}))


def packable():
    """A converted model each of whose layers bitsandbytes can pack: 32 m rows of 64 n columns."""
    return copy.deepcopy(_packable())


@once
def _original(host, **kwargs):
    model, config, own = HOSTS[host]
    torch.manual_seed(0)
    made = model(config(**SIZES | own | kwargs)).eval()
    for name, parameter in made.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter, std=0.5)
        elif "q_proj" in name or "k_proj" in name:
            parameter.data *= 6
    return made


@once
def _converted(host, **kwargs):
    return convert_to_mla(original(host), calibration=CALIBRATION, **kwargs)[0]


@once
def _packable():
    model = original(num_key_value_heads=4)
    return convert_to_mla(model, kv_lora_rank=64, qk_rope_head_dim=32, calibration=CALIBRATION)[0]


def prepared(model, seed=3, **kwargs):
    """With adapters that change something."""
    made = prepare_for_healing(model, **{"rank": 4} | kwargs)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in made.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    return made


def four_bit(model):
    return [m for m in model.modules() if isinstance(m, bnb.nn.Linear4bit)]


def packed_layers(model):
    return [m for m in four_bit(model) if getattr(m.weight.quant_state, "packing_format_for_cpu", False)]


def in_four_bits(model):
    """As `from_pretrained` leaves it: 4-bit layers, evaluation mode, nothing guarded."""
    for name, old in list(model.named_modules()):
        if type(old) is nn.Linear and old is not model.lm_head:
            new = bnb.nn.Linear4bit(
                old.in_features, old.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4"
            )
            new.weight = bnb.nn.Params4bit(old.weight.data, requires_grad=False, quant_type="nf4", module=new)
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, new.to("cpu"))
    model.is_loaded_in_4bit = True
    return model.eval()


def logits(model, ids=PROMPT, mask=None, cache=None):
    was_training = model.training
    model.eval()
    with torch.no_grad():
        out = model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=cache is not None).logits
    model.train(was_training)
    return out


def gradients(model):
    model.train()
    model.zero_grad()
    model(input_ids=PROMPT, labels=PROMPT, use_cache=False).loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])


def cosine(a, b):
    return float(torch.cosine_similarity(a, b, dim=0))


# ---------------------------------------------------------------------- the trap


@needs_packing
def test_the_trap_is_there() -> None:
    """What the guard is for. When this fails with a newer bitsandbytes, see whether the guard can go."""
    import peft

    trained = []
    for evaluated in (False, True):
        model = in_four_bits(packable())
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "kv_b_proj", "o_proj", "kv_a_proj_with_mqa"])
        model = peft.get_peft_model(model, config)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) * 0.1
        if evaluated:
            logits(model)
            assert packed_layers(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trained.append(gradients(model))
    assert cosine(*trained) < 0.9


@pytest.mark.parametrize("absorbed", [False, True])
def test_gradients_after_an_evaluation_are_those_of_a_model_that_never_saw_one(absorbed) -> None:
    wanted = gradients(prepared(packable()))
    model = prepared(packable())
    if absorbed:
        enable_absorb(model)
    before = logits(model)
    model.eval()
    model.generate(PROMPT, attention_mask=MASK, max_new_tokens=4, do_sample=False, past_key_values=KVCache(model))
    assert not packed_layers(model)
    got = gradients(model)
    assert cosine(got, wanted) >= 0.99
    assert torch.equal(got, wanted)
    assert torch.equal(logits(model), before)


def test_gradients_are_the_true_ones() -> None:
    """Those of plain layers which hold the decoded weights."""
    model = prepared(converted())
    plain = copy.deepcopy(model)
    for name, layer in list(plain.named_modules()):
        if isinstance(layer, bnb.nn.Linear4bit):
            new = nn.Linear(layer.in_features, layer.out_features, bias=False)
            weight = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
            new.weight = nn.Parameter(weight, requires_grad=False)
            parent, _, last = name.rpartition(".")
            setattr(plain.get_submodule(parent), last, new)
    assert cosine(gradients(model), gradients(plain)) > 0.9999


def test_a_model_that_was_evaluated_before_is_unpacked() -> None:
    wanted = gradients(prepared(in_four_bits(packable())))
    model = in_four_bits(packable())
    if PACKS:
        logits(model)
    else:  # the packing itself is plain torch
        for layer in four_bit(model):
            layer.weight.data, _ = bnb.functional._convert_weight_packed_for_cpu(
                layer.weight.data, layer.weight.quant_state
            )
    count = len(four_bit(model))
    assert len(packed_layers(model)) == count > 0
    with (
        pytest.warns(UserWarning, match="kv_b_proj"),
        pytest.warns(UserWarning, match=f"{count} 4-bit layers had been"),
    ):
        model = prepared(model)
    assert not packed_layers(model)
    assert cosine(gradients(model), wanted) >= 0.99


def test_models_that_are_prepared_say_nothing() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "4-bit layers")
        keep_trainable(prepare_for_healing(packable()))


def test_packing_that_cannot_be_prevented_is_refused(monkeypatch) -> None:
    forward = bnb.nn.Linear4bit.forward

    def packs(self, x):
        out = forward(self, x)
        if not self.training:
            self.weight.data, _ = bnb.functional._convert_weight_packed_for_cpu(
                self.weight.data, self.weight.quant_state
            )
        return out

    model = packable()
    monkeypatch.setattr(bnb.nn.Linear4bit, "forward", packs)
    with pytest.raises(NotImplementedError, match="cannot be prevented.*0.50.2"):
        prepare_for_healing(model)


def test_sizes_that_cannot_be_packed_are_evaluated_too() -> None:
    """Unguarded, bitsandbytes fails on these where it packs: ranks that are no multiples of 64, rows of 32."""
    model = prepared(converted(kv_lora_rank=24, qk_rope_head_dim=8))
    assert bool(logits(model).isfinite().all())


# ---------------------------------------------------------------------- adapters


@pytest.mark.parametrize(
    ("host", "names"),
    [
        ("llama", {"q_proj", "kv_b_proj", "o_proj", "kv_a_proj_with_mqa"}),
        ("qwen3", {"q_proj", "kv_b_proj", "o_proj", "kv_a_proj_with_mqa"}),
        (None, {"q_proj", "k_proj", "v_proj", "o_proj"}),
    ],
)
def test_default_targets(host, names) -> None:
    model = prepare_for_healing(original() if host is None else converted(host))
    adapted = {name.rpartition(".")[2] for name, m in model.named_modules() if hasattr(m, "lora_A")}
    assert adapted == names
    assert {name.split(".")[-3] for name, p in model.named_parameters() if p.requires_grad} == {"lora_A", "lora_B"}
    assert model.training
    assert not isinstance(model.get_base_model().lm_head, bnb.nn.Linear4bit)
    states = [layer.weight.quant_state for layer in four_bit(model)]
    assert len(states) == 2 * (7 if host is None else 8 if host == "qwen3" else 6)
    assert not [layer for name, layer in model.named_modules() if "kv_b_proj" in name and layer in four_bit(model)]
    assert all(state.quant_type == "nf4" and state.nested for state in states)


def deepseek(q_lora_rank=None, **kwargs):
    torch.manual_seed(0)
    sizes = SIZES | {
        "num_key_value_heads": 4,
        "q_lora_rank": q_lora_rank,
        "kv_lora_rank": 32,
        "first_k_dense_replace": 2,
    }
    sizes |= {"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "n_group": 1, "topk_group": 1}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**sizes | kwargs)).eval()


@pytest.mark.parametrize("q_lora_rank", [None, 32])
def test_native_models_keep_what_comes_before_their_norm(q_lora_rank) -> None:
    model = prepare_for_healing(deepseek(q_lora_rank))
    adapted = {name.rpartition(".")[2] for name, m in model.named_modules() if hasattr(m, "lora_A")}
    assert adapted == {"q_proj" if q_lora_rank is None else "q_b_proj", "kv_b_proj", "o_proj"}


@pytest.mark.parametrize("host", list(HOSTS))
@pytest.mark.parametrize("quantize", [True, False])
def test_training_lowers_the_loss_and_the_merged_model_is_the_trained_one(host, quantize, tmp_path) -> None:
    model = prepare_for_healing(converted(host), rank=8, quantize=quantize)
    assert bool(four_bit(model)) == quantize
    losses = healing.heal(model, ids_of(1, 1), healing.Plan(steps=25, rate=1e-2))
    assert sum(losses[-5:]) < 0.96 * sum(losses[:5])
    expected = logits(model, mask=MASK)
    merged = merge_healed(model)
    assert not four_bit(merged) and not any("lora" in name for name, _ in merged.named_parameters())
    assert not merged.training
    assert torch.allclose(logits(merged, mask=MASK), expected, atol=1e-4)
    merged.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(merged)
    assert torch.equal(logits(loaded), logits(merged))
    prepare_for_healing(loaded)  # and again


def test_merged_into_the_weights_before_quantization() -> None:
    base = converted()
    before = {name: p.clone() for name, p in base.named_parameters()}
    model = prepared(copy.deepcopy(base))
    expected = {
        name: layer.get_delta_weight("default")
        for name, layer in model.get_base_model().named_modules()
        if hasattr(layer, "lora_A")
    }
    merged = merge_healed(model, base)
    assert merged is base and len(expected) == 8
    for name, parameter in merged.named_parameters():
        change = expected.get(name.removesuffix(".weight"), 0)
        assert torch.allclose(parameter, before[name] + change, atol=1e-6)
    assert four_bit(model)
    with pytest.raises(ValueError, match=r"no plain linear layer model.layers.0.self_attn.q_proj of size \(96, 64\)"):
        merge_healed(model, original())


def test_loaded_in_four_bits(tmp_path) -> None:
    converted().save_pretrained(tmp_path / "half")
    bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
        llm_int8_skip_modules=["kv_b_proj", "lm_head"],
    )
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "half", quantization_config=bits, device_map="cpu", dtype=torch.float32
    )
    model = prepared(loaded)
    assert torch.allclose(logits(model), logits(prepared(converted())), atol=1e-5)
    assert bool(gradients(model).any())
    expected = logits(model)
    merged = merge_healed(model)
    assert torch.allclose(logits(merged), expected, atol=1e-4)
    merged.save_pretrained(tmp_path / "healed")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "healed")
    assert torch.equal(logits(again), logits(merged))


@pytest.mark.parametrize("host", list(HOSTS))
@pytest.mark.parametrize("first", [True, False], ids=["enabled first", "prepared first"])
def test_absorbed_attention_sees_the_adapters_as_they_are_trained(host, first) -> None:
    model = converted(host)
    model = prepared(enable_absorb(model)) if first else enable_absorb(prepared(model))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    seen = []
    for _ in range(2):
        model.eval()
        results = []
        for cache in (DynamicCache(config=model.config), KVCache(model)):
            logits(model, PROMPT[:, :20], MASK[:, :20], cache)
            results.append(logits(model, PROMPT[:, 20:22], MASK[:, :22], cache))
        disable_absorb(model)
        cache = DynamicCache(config=model.config)
        logits(model, PROMPT[:, :20], MASK[:, :20], cache)
        exact = logits(model, PROMPT[:, 20:22], MASK[:, :22], cache)
        enable_absorb(model)
        for result in results:
            assert torch.allclose(result, exact, atol=1e-4)
        seen.append(exact)
        gradients(model)
        optimizer.step()
    assert not torch.allclose(*seen, atol=1e-2)
    merged = merge_healed(model)
    cache = KVCache(merged)
    logits(merged, PROMPT[:, :20], MASK[:, :20], cache)
    mine = logits(merged, PROMPT[:, 20:22], MASK[:, :22], cache)
    disable_absorb(merged)
    cache = DynamicCache(config=merged.config)
    logits(merged, PROMPT[:, :20], MASK[:, :20], cache)
    assert torch.allclose(mine, logits(merged, PROMPT[:, 20:22], MASK[:, :22], cache), atol=1e-4)


def test_checkpointing_changes_no_gradient() -> None:
    ours = prepared(converted())
    calls = []
    for layer in ours.get_base_model().model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    with_it = gradients(ours)
    assert len(calls) == 4  # each of two layers runs again in the backward pass
    assert torch.allclose(with_it, gradients(prepared(converted(), gradient_checkpointing=False)), atol=1e-7)


def test_layers_spread_by_accelerate_keep_their_hooks() -> None:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    model = converted()
    hooked = [m for m in model.modules() if type(m) is nn.Linear and m is not model.lm_head]
    for layer in hooked:
        add_hook_to_module(layer, AlignDevicesHook(execution_device="cpu", io_same_device=True))
    model = prepared(model)
    assert all(hasattr(layer, "_hf_hook") for layer in four_bit(model)) and len(four_bit(model)) == len(hooked) - 2
    assert torch.equal(logits(model), logits(prepared(converted())))
    merged = merge_healed(model)
    assert sum(hasattr(m, "_hf_hook") for m in merged.modules() if type(m) is nn.Linear) == len(hooked)


# ---------------------------------------------------------------------- runs


PLAN = healing.Plan(steps=8, rate=1e-2, batch=2)
WINDOWS = ids_of(5, 7)


def run(folder=None, stop=None, plan=PLAN, windows=WINDOWS, dropout=0.1, teacher=None, **kwargs):
    """Losses and adapters of a run, stopped before step `stop`."""
    torch.manual_seed(1)
    model = prepare_for_healing(converted(), rank=4, dropout=dropout)

    def track(items, description):
        for step in items:
            if step == stop:
                raise KeyboardInterrupt
            yield step

    losses = healing.heal(model, windows, plan, folder=folder, track=track, teacher=teacher, **kwargs)
    return losses, {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("taught", [False, True])
def test_a_resumed_run_is_the_uninterrupted_one(taught, tmp_path) -> None:
    teacher = original() if taught else None
    losses, adapters = run(teacher=teacher)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, stop=5, every=3, teacher=teacher)
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000003"]
    torch.manual_seed(99)
    resumed, after = run(tmp_path, every=3, teacher=teacher)
    assert resumed == losses and len(losses) == 8
    assert all(torch.equal(after[name], adapters[name]) for name in adapters)
    names = {path.name for path in (tmp_path / "step-0000008").iterdir()}
    assert names >= {"adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors", "state.json"}
    assert not [name for name in names if Path(name).suffix not in (".safetensors", ".json", ".md")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0000006", "step-0000008"]
    assert run(tmp_path, stop=0, teacher=teacher)[0] == losses  # nothing is left to do


def test_checkpoints_of_other_runs_and_altered_ones_are_refused(tmp_path) -> None:
    run(tmp_path, every=4)
    for kwargs, match in (
        ({"plan": healing.Plan(steps=8, rate=2e-2, batch=2)}, "other rate"),
        ({"windows": ids_of(6, 7)}, "other windows"),
        ({"teacher": original()}, "other loss"),
    ):
        with pytest.raises(ValueError, match=match):
            run(tmp_path, **kwargs)
    path = tmp_path / "step-0000008" / "optimizer.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="optimizer.safetensors was altered"):
        run(tmp_path)


def test_a_checkpoint_is_whole_or_not_there(tmp_path, monkeypatch) -> None:
    def full(*args, **kwargs):
        raise OSError("no space left")

    monkeypatch.setattr(healing, "save_file", full)
    with pytest.raises(OSError, match="no space"):
        run(tmp_path, every=4)
    assert list(tmp_path.iterdir()) == []


def test_a_loss_that_is_no_number_stops_the_run() -> None:
    with pytest.raises(FloatingPointError, match="lower the learning rate"):
        run(plan=healing.Plan(steps=30, rate=1e30, clip=1e30, warmup=0))


def test_text_is_packed_and_the_held_out_one_is_no_part_of_it() -> None:
    class Tokenizer:
        eos_token_id = 2

        def __call__(self, text, **_):
            return {"input_ids": [3 + ord(c) % 90 for c in text]}

    ids = healing.packed(Tokenizer(), ["ab", "cdefg", "hi"], 4)
    assert ids.shape == (3, 4) and ids.flatten().tolist().count(2) == 3
    with pytest.raises(ValueError, match="only 12 tokens"):
        healing.packed(Tokenizer(), ["ab", "cdefg", "hi"], 13)
    texts = healing.library_texts(["argparse", "json", "pydoc_data"])
    assert len(texts) > 2 and any("ArgumentParser" in text for text in texts)
    topic = healing.topics()[5_000:5_200]
    assert not any(topic in text for text in texts)


# ---------------------------------------------------------------------- refused


@pytest.mark.parametrize("how", ["config", "weight"])
def test_an_export_with_a_folded_norm_is_refused(how) -> None:
    model = deepseek()
    if how == "config":
        model.config.hf_kvcache_norm_folded = True
    else:
        for layer in model.model.layers:
            layer.self_attn.kv_a_layernorm.weight.data.fill_(700.0)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="norm is folded.*Heal the converted model"):
        prepare_for_healing(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"rank": 0}, "`rank`"),
        ({"alpha": -1.0}, "`alpha`"),
        ({"dropout": 1.0}, "`dropout`"),
        ({"target_modules": ["q_proj", "k_proj"]}, "no linear layer 'k_proj'"),
        ({"target_modules": []}, "empty list"),
    ],
)
def test_bad_arguments(arguments, match) -> None:
    model = converted()
    with pytest.raises(ValueError, match=match):
        prepare_for_healing(model, **arguments)
    assert not four_bit(model)


def test_what_cannot_be_healed(monkeypatch) -> None:
    with pytest.raises(ValueError, match="expected a transformers model, got Linear"):
        prepare_for_healing(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="merge them"):
        prepare_for_healing(prepare_for_healing(original()))
    with pytest.raises(ValueError, match="adapters already"):
        prepare_for_healing(prepare_for_healing(original()).get_base_model())
    with torch.device("meta"):
        absent = LlamaForCausalLM(LlamaConfig(**SIZES))
    with pytest.raises(NotImplementedError, match="not in memory"):
        prepare_for_healing(absent)
    other = original()
    other.quantization_method = "gptq"
    with pytest.raises(NotImplementedError, match="quantized by gptq"):
        prepare_for_healing(other)
    with pytest.raises(ValueError, match="expected the PEFT model"):
        merge_healed(converted())
    model = prepared(converted())
    next(m for m in model.modules() if hasattr(m, "lora_A")).merge()
    with pytest.raises(NotImplementedError, match="cannot be merged"):
        merge_healed(model)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ImportError, match=r"hf-kvcache\[train\]"):
        prepare_for_healing(converted())


# ---------------------------------------------------------------------- the example


def test_plain_adapters_need_no_bitsandbytes(monkeypatch) -> None:
    real = heal_module.imported

    def imported(name):
        if name == "bitsandbytes":
            raise ImportError("bitsandbytes is not there")
        return real(name)

    monkeypatch.setattr(heal_module, "imported", imported)
    assert prepare_for_healing(converted(), quantize=False).training
    with pytest.raises(ImportError, match="not there"):
        prepare_for_healing(converted())


@pytest.fixture
def folders(tmp_path):
    """A tiny original with a tokenizer of single characters, and its conversion."""
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {chr(32 + n): 4 + n for n in range(93)}
    characters = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, eos_token="</s>", unk_token="<unk>")
    original().save_pretrained(tmp_path / "original")
    tokenizer.save_pretrained(tmp_path / "original")
    converted().save_pretrained(tmp_path / "half")
    (tmp_path / "text").write_text("Adapters learn what a conversion lost. " * 40)
    return tmp_path


def options_of(folders, *more):
    options = ["--model", folders / "original", "--steps", "3", "--tokens", "32", "--windows", "1", "--rank", "2"]
    return list(map(str, [*options, "--window-tokens", "64", "--text", folders / "text", *more]))


@pytest.mark.parametrize("into", ["decoded", "original"])
def test_the_example_runs(into, folders, capsys) -> None:
    more = ["--calibration-tokens", "64", "--json", folders / "figures.json", "--out", folders / "healed"]
    heal_mla_qlora.main(options_of(folders, *more, "--distill", "--merge-into", into))
    text = capsys.readouterr().out
    assert "converted to 50% of the bytes" in text and "ratio to the control" in text and "merged model in" in text
    figures = json.loads((folders / "figures.json").read_text())
    assert len(figures["model"]["losses"]) == len(figures["control"]["losses"]) == 3
    assert figures["merged"] == pytest.approx(figures["model"]["after"], rel=1e-4 if into == "decoded" else 0.1)
    assert AutoModelForCausalLM.from_pretrained(folders / "healed").config.model_type == "hf_kvcache_mla"


def test_an_export_needs_a_folder(folders, capsys) -> None:
    with pytest.raises(SystemExit):
        heal_mla_qlora.main(options_of(folders, "--export", "hf"))
    assert "--export needs --out" in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one_with_twice_the_passes(folders) -> None:
    """By torchrun: accelerate's own launcher starts a single process on CPUs, whatever it is asked for."""
    root = Path(__file__).resolve().parent.parent
    more = ["--converted", folders / "half", "--no-control"]
    one = heal_mla_qlora.main(options_of(folders, *more, "--accumulate", "2"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += [str(root / "examples" / "heal_mla_qlora.py")]
    more += ["--json", folders / "figures.json", "--checkpoints", folders / "run"]
    paths = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run([*command, *options_of(folders, *more)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    two = json.loads((folders / "figures.json").read_text())
    assert two["model"]["losses"] == pytest.approx(one["model"]["losses"], rel=1e-5)
    assert two["model"]["after"] == pytest.approx(one["model"]["after"], rel=1e-4)
    state = json.loads((folders / "run" / "model" / "step-0000003" / "state.json").read_text())
    assert state["run"]["processes"] == 2
