"""Layer-local distillation: errors, checkpoints, captured layers, absorbed attention and files after it, refusals."""

from __future__ import annotations

import copy
import json
import math
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_mla_convert import CALIBRATION, HOSTS, MASK, attention_outputs, build, generate, ids_of, logits
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

import hf_kvcache
from hf_kvcache import (
    KVCache,
    PrefixStore,
    capture_layers,
    convert_to_mla,
    disable_absorb,
    distill_layers,
    enable_absorb,
)
from hf_kvcache.mla import MLAAttention, captured, progress
from hf_kvcache.mla import distill as distill_module
from hf_kvcache.mla.chain import Chain
from hf_kvcache.mla.student import Student
from hf_kvcache.storage import fingerprint

MANY = [ids_of(100 + seed, 1, 64) for seed in range(33)]
WINDOWS = MANY[-9:]
BIASED = ("llama_bias", "qwen2")  # biases are most of the output there, and almost nothing was lost
hosts = pytest.mark.parametrize("host", list(HOSTS))
ENOUGH = {"steps": 64, "learning_rate": 3e-3, "rows": 64}
FAST = ENOUGH | {"steps": 10}


def pair(host="llama", keep=0.4, dtype=torch.float32):
    teacher = HOSTS[host](dtype)
    if host == "gemma2":
        teacher.set_attn_implementation("eager")  # transformers has no soft caps in SDPA
    model, _ = convert_to_mla(copy.deepcopy(teacher), kv_keep=keep, calibration=CALIBRATION, progress=False)
    return model, teacher


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@hosts
@pytest.mark.parametrize("inputs", ["teacher", "student"])
def test_errors_fall_on_windows_that_were_not_trained_on(host, inputs) -> None:
    model, teacher = pair(host)
    before, theirs = weights(model), weights(teacher)
    model, report = distill_layers(model, teacher, MANY, inputs=inputs, compensate=0.0, **ENOUGH)
    if host not in BIASED:
        before_after = [sum(getattr(x, f"error_{when}") for x in report.layers) for when in ("before", "after")]
        assert before_after[1] < 0.97 * before_after[0]
    assert report.held_out_tokens == 64 and report.tokens == 32 * 64
    assert same(weights(teacher), theirs)
    assert not model.training and not teacher.training
    after = weights(model)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    trained = {name for name, _ in model.named_parameters() if ".self_attn." in name and "norm" not in name}
    assert changed <= trained and (changed or host in BIASED)


@hosts
def test_the_copy_in_float32_is_the_module(host) -> None:
    """Rows of a layer's output, computed apart from the model, are those of the module itself."""
    model, _ = pair(host, dtype=torch.float64)
    chain = Chain(model, [name for name, module in model.named_modules() if isinstance(module, MLAAttention)])
    with torch.no_grad():
        hidden = chain.start(WINDOWS[0])
        for index, module in enumerate(chain.attention):
            after, given, output = chain.watched(index, hidden)
            rows = torch.tensor([0, 3, 17, 40, 63])
            mine = Student(module).output(given, chain.tables(index)[64], rows)
            assert torch.allclose(mine, output[rows], atol=1e-5)  # eager softmax is in float32
            assert torch.equal(chain.input(index, hidden), given)
            hidden = after


@hosts
def test_layers_one_at_a_time_are_the_model(host) -> None:
    model = HOSTS[host](torch.float64)
    chain = Chain(model, [name for name, _ in chain_names(model)])
    with torch.no_grad():
        hidden = chain.start(WINDOWS[0])
        for index in range(len(chain.layers)):
            hidden = chain.run(index, hidden)
        hidden = model.model.norm(hidden)
        assert torch.equal(hidden, model.model(input_ids=WINDOWS[0], use_cache=False).last_hidden_state)
    # Gemma 2 and 3 normalize what attention gives before they add it.
    assert chain.adds == [not host.startswith("gemma")] * 2


def chain_names(model):
    return [(name, module) for name, module in model.named_modules() if hasattr(module, "o_proj")]


def test_compensation_brings_the_hidden_state_closer() -> None:
    """The second layer makes up for a part of what the first one lost."""
    _, teacher = pair()
    with torch.no_grad():
        exact = teacher.model(input_ids=WINDOWS[-1], use_cache=False).last_hidden_state
    off = {}
    for compensate in (0.0, 1.0):
        model, _ = pair(keep=0.3)
        distill_layers(model, teacher, MANY, inputs="student", compensate=compensate, **ENOUGH)
        with torch.no_grad():
            mine = model.model(input_ids=WINDOWS[-1], use_cache=False).last_hidden_state
        off[compensate] = float((mine - exact).square().mean())
    assert off[1.0] < off[0.0]


def test_the_reported_error_is_the_models_own() -> None:
    model, teacher = pair(dtype=torch.float64)
    exact = attention_outputs(teacher, WINDOWS[-1])
    model, report = distill_layers(model, teacher, WINDOWS, inputs="teacher", **FAST | {"rows": 64})
    modules = [module for module in model.modules() if isinstance(module, MLAAttention)]
    for (args, kwargs, output), module, entry in zip(exact, modules, report.layers, strict=True):
        with torch.no_grad():
            off = module(*args, **kwargs)[0] - output
        assert float(off.square().sum() / output.square().sum()) == pytest.approx(entry.error_after, rel=1e-4)


def test_a_model_without_loss_stays_as_it_is() -> None:
    model, teacher = pair(keep=1.0, dtype=torch.float64)
    before = weights(model)
    _, report = distill_layers(model, teacher, WINDOWS, inputs="teacher", **FAST)
    assert same(weights(model), before)
    assert not any(layer.changed for layer in report.layers)


def test_a_layer_that_does_not_get_better_keeps_its_weights() -> None:
    model, teacher = pair()
    before = weights(model)
    _, report = distill_layers(model, teacher, WINDOWS, inputs="teacher", **FAST | {"learning_rate": 30.0})
    assert same(weights(model), before)
    assert [layer.changed for layer in report.layers] == [False, False]
    assert all(layer.error_after == layer.error_before for layer in report.layers) and "kept" in str(report)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_train_in_float32_and_keep_their_dtype(dtype, monkeypatch) -> None:
    seen = set()
    trained = Student.train

    def train(self, *args):
        seen.update(parameter.dtype for parameter in self.trained.values())
        return trained(self, *args)

    monkeypatch.setattr(Student, "train", train)
    model, teacher = pair(dtype=dtype)
    model.requires_grad_(False)
    _, report = distill_layers(model, teacher, MANY, **ENOUGH)
    assert seen == {torch.float32}
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in model.parameters())
    assert all(layer.error_after < layer.error_before for layer in report.layers)


def test_training_mode_comes_back() -> None:
    model, teacher = pair()
    model.train()
    distill_layers(model, teacher, WINDOWS, **FAST)
    assert model.training and not teacher.training


@pytest.mark.parametrize("host", [host for host in HOSTS if host not in BIASED])
def test_absorbed_attention_sees_the_new_weights(host) -> None:
    """Enabled before or after: the same tokens, expanded or absorbed, in a padded batch and with beams."""
    model, teacher = pair(host)
    fresh = copy.deepcopy(model)
    enable_absorb(model)
    old = generate(model, KVCache(model))
    stale = logits(model)
    distill_layers(model, teacher, WINDOWS, **FAST)
    distill_layers(fresh, teacher, WINDOWS, **FAST)
    assert torch.allclose(logits(model), logits(fresh), atol=1e-3)
    assert not torch.equal(logits(model), stale)
    expected = generate(fresh, DynamicCache(config=fresh.config))
    beams = generate(fresh, num_beams=3)
    enable_absorb(fresh)
    for made in (model, fresh):
        assert torch.equal(generate(made, KVCache(made)), expected)
        assert torch.equal(generate(made, num_beams=3), beams)
    assert old.shape == expected.shape
    disable_absorb(model)
    assert torch.equal(generate(model, DynamicCache(config=model.config)), expected)


def test_caches_and_prefixes_of_the_old_weights_are_not_used(tmp_path) -> None:
    model, teacher = pair()
    enable_absorb(model)
    cache = KVCache(model)
    generate(model, cache, mask=torch.ones_like(MASK))
    cache.save(tmp_path / "cache.safetensors")
    store = PrefixStore(1 << 20)
    ids = ids_of(9, 1, 40)
    store.warm(model, ids)
    assert store.get(model, ids).get_seq_length() > 0
    before = fingerprint(model)
    distill_layers(model, teacher, WINDOWS, **FAST)
    assert fingerprint(model) != before
    with pytest.raises(ValueError):
        hf_kvcache.load(tmp_path / "cache.safetensors", model)
    assert store.get(model, ids).get_seq_length() == 0


@hosts
def test_saved_and_loaded_afterwards(host, tmp_path) -> None:
    model, teacher = pair(host)
    distill_layers(model, teacher, WINDOWS, **FAST)
    model.save_pretrained(tmp_path)
    implementation = model.config._attn_implementation
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=implementation)
    assert torch.equal(logits(loaded), logits(model))
    assert torch.equal(generate(enable_absorb(loaded), KVCache(loaded)), generate(model))


# ---------------------------------------------------------------------- checkpoints


class Stop(Exception):
    pass


def interrupted(monkeypatch, after):
    """Let training stop at the beginning of layer `after`."""
    trained, count = distill_module._train, []

    def train(*args):
        count.append(1)
        if len(count) > after:
            raise Stop
        return trained(*args)

    monkeypatch.setattr(distill_module, "_train", train)
    return lambda: monkeypatch.setattr(distill_module, "_train", trained)


@pytest.mark.parametrize("inputs", ["teacher", "student"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_interrupted_run_goes_on(inputs, dtype, tmp_path, monkeypatch) -> None:
    whole, teacher = pair(dtype=dtype)
    start = weights(whole)
    _, expected = distill_layers(whole, teacher, WINDOWS, inputs=inputs, **FAST)
    model, _ = pair(dtype=dtype)
    restore = interrupted(monkeypatch, 1)
    with pytest.raises(Stop):
        distill_layers(model, teacher, WINDOWS, inputs=inputs, checkpoint=tmp_path, **FAST)
    assert not same(weights(model), start) and not model.training
    assert sorted(path.name for path in tmp_path.iterdir()) == ["distill.json", "layer-00000.safetensors"]
    restore()
    model.load_state_dict(start)
    again = []
    trained = distill_module._train
    monkeypatch.setattr(distill_module, "_train", lambda *args: again.append(args[0]) or trained(*args))
    _, report = distill_layers(model, teacher, WINDOWS, inputs=inputs, checkpoint=tmp_path, **FAST)
    assert again == ["model.layers.1.self_attn"]
    assert same(weights(model), weights(whole))
    assert report.layers == expected.layers
    model.load_state_dict(start)
    distill_layers(model, teacher, WINDOWS, inputs=inputs, checkpoint=tmp_path, **FAST)
    assert len(again) == 1 and same(weights(model), weights(whole))


def altered(tmp_path, change):
    path = tmp_path / "distill.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def flip(tmp_path):
    path = tmp_path / "layer-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def other_tensors(tmp_path):
    path = tmp_path / "layer-00000.safetensors"
    tensors = load_file(path)
    tensors["more"] = torch.zeros(2)
    save_file(tensors, path)
    digest = captured._digest(path)
    altered(tmp_path, lambda c: c["layers"]["model.layers.0.self_attn"].update(sha256=digest))


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (flip, "checksum"),
        (lambda p: (p / "layer-00000.safetensors").unlink(), "there is no"),
        (other_tensors, "other tensors"),
        (lambda p: (p / "distill.json").write_text("{"), "truncated or altered"),
        (lambda p: (p / "distill.json").write_text("[]"), "not understood"),
        (lambda p: altered(p, lambda c: c.update(format_version=9)), "format version"),
        (lambda p: altered(p, lambda c: c.update(run="x")), "another run"),
        (lambda p: altered(p, lambda c: c["layers"].update(evil={"sha256": "x"})), "not understood"),
        (lambda p: altered(p, lambda c: c["layers"]["model.layers.0.self_attn"].update(before="x")), "not understood"),
    ],
)
def test_an_altered_checkpoint_is_refused(damage, match, tmp_path) -> None:
    model, teacher = pair()
    start = weights(model)
    distill_layers(model, teacher, WINDOWS, checkpoint=tmp_path, **FAST)
    model.load_state_dict(start)
    damage(tmp_path)
    with pytest.raises(ValueError, match=match):
        distill_layers(model, teacher, WINDOWS, checkpoint=tmp_path, **FAST)
    assert same(weights(model), start)


@pytest.mark.parametrize("change", ["arguments", "windows", "model", "teacher"])
def test_a_checkpoint_of_another_run_is_refused(change, tmp_path) -> None:
    model, teacher = pair()
    start = weights(model)
    distill_layers(model, teacher, WINDOWS, checkpoint=tmp_path, **FAST)
    if change != "model":
        model.load_state_dict(start)
    if change == "teacher":
        with torch.no_grad():
            teacher.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    arguments = FAST | ({"seed": 1} if change == "arguments" else {})
    windows = WINDOWS[1:] if change == "windows" else WINDOWS
    with pytest.raises(ValueError, match="another run"):
        distill_layers(model, teacher, windows, checkpoint=tmp_path, **arguments)


# ---------------------------------------------------------------------- captured layers


@pytest.mark.parametrize("inputs", ["teacher", "student"])
@pytest.mark.parametrize("host", ["llama", "gemma3"])
def test_captured_layers_stand_for_the_teacher(host, inputs, tmp_path) -> None:
    model, teacher = pair(host)
    other = copy.deepcopy(model)
    capture_layers(teacher, tmp_path, WINDOWS)
    _, expected = distill_layers(model, teacher, WINDOWS, inputs=inputs, **FAST)
    _, report = distill_layers(other, tmp_path, inputs=inputs, **FAST)
    assert report.layers == expected.layers
    assert same(weights(other), weights(model))


def test_captures_that_cannot_be_used(tmp_path) -> None:
    model, teacher = pair()
    folder = tmp_path / "a"
    capture_layers(teacher, folder, WINDOWS)
    with pytest.raises(ValueError, match="holds a capture already"):
        capture_layers(teacher, folder, WINDOWS)
    with pytest.raises(ValueError, match="converted too"):
        capture_layers(model, tmp_path / "b", WINDOWS)
    with pytest.raises(ValueError, match="leave `calibration` out"):
        distill_layers(model, folder, WINDOWS)
    with pytest.raises(ValueError, match="there is no"):
        distill_layers(model, tmp_path / "nowhere")
    other, _ = pair("mqa")
    larger = build(LlamaForCausalLM, LlamaConfig, num_hidden_layers=3)
    larger, _ = convert_to_mla(larger, kv_keep=0.5, calibration=CALIBRATION)
    with pytest.raises(ValueError, match="other layers or sizes"):
        distill_layers(larger, folder)
    path = folder / "layer-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="checksum"):
        distill_layers(model, folder, **FAST)
    content = json.loads((folder / "captured.json").read_text())
    for change in ({"format_version": 7}, {"windows": [[-1]]}, {"names": [1]}, {"files": []}):
        (folder / "captured.json").write_text(json.dumps(content | change))
        with pytest.raises(ValueError, match="not understood"):
            distill_layers(model, folder)
    (folder / "captured.json").write_text(json.dumps({"format_version": 1}))
    with pytest.raises(ValueError, match="lacks"):
        distill_layers(model, folder)
    (folder / "captured.json").write_text(json.dumps(content | {"windows": [[96, 97]] * 9}))
    with pytest.raises(ValueError, match="vocabulary"):
        distill_layers(other, folder)


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"inputs": "both"}, "inputs"),
        ({"compensate": 1.5}, "compensate"),
        ({"steps": 0}, "steps"),
        ({"steps": True}, "steps"),
        ({"rows": 1.5}, "rows"),
        ({"held_out": 0}, "held_out"),
        ({"held_out": 9}, "nothing is left"),
        ({"seed": -1}, "seed"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"learning_rate": math.nan}, "learning_rate"),
        ({"calibration": None}, "needs `calibration`"),
        ({"calibration": []}, "empty"),
        ({"calibration": ["text"]}, "tokenizer"),
    ],
)
def test_bad_arguments(arguments, match) -> None:
    model, teacher = pair()
    before = weights(model)
    with pytest.raises(ValueError, match=match):
        distill_layers(model, teacher, **{"calibration": WINDOWS} | arguments)
    assert same(weights(model), before)


def test_models_and_teachers_that_do_not_fit() -> None:
    model, teacher = pair()
    before = weights(model)
    with pytest.raises(ValueError, match="not converted"):
        distill_layers(teacher, teacher, WINDOWS)
    with pytest.raises(ValueError, match="expected a converted"):
        distill_layers(nn.Linear(2, 2), teacher, WINDOWS)
    with pytest.raises(ValueError, match="the original must be"):
        distill_layers(model, nn.Linear(2, 2), WINDOWS)
    with pytest.raises(ValueError, match="converted too"):
        distill_layers(model, model, WINDOWS)
    with pytest.raises(ValueError, match="numbers, the converted model was made"):
        distill_layers(model, HOSTS["mqa"](), WINDOWS)
    with pytest.raises(ValueError, match="no LlamaAttention at"):
        distill_layers(model, HOSTS["mistral"](), WINDOWS)
    shared = HOSTS["llama"]()
    shared.model.layers[1].self_attn.o_proj = model.model.layers[1].self_attn.o_proj
    with pytest.raises(ValueError, match=r"shares weights of model.layers.1"):
        distill_layers(model, shared, WINDOWS)
    assert same(weights(model), before)


def test_quantized_absent_and_adapted_weights_are_refused() -> None:
    class Linear8(nn.Linear):
        pass

    model, teacher = pair()
    model.model.layers[1].self_attn.kv_b_proj = Linear8(8, 8)
    with pytest.raises(NotImplementedError, match=r"layers.1.self_attn.kv_b_proj is a Linear8"):
        distill_layers(model, teacher, WINDOWS)
    model, teacher = pair()
    model.model.layers[0].self_attn.q_proj.to("meta")
    with pytest.raises(NotImplementedError, match="not in memory"):
        distill_layers(model, teacher, WINDOWS)
    peft = pytest.importorskip("peft")
    model, teacher = pair()
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["kv_b_proj"], r=2))
    with pytest.raises(ValueError, match="expected a converted"):
        distill_layers(adapted, teacher, WINDOWS)
    with pytest.raises(NotImplementedError, match="merge its adapters"):
        distill_layers(model, teacher, WINDOWS)


def test_layers_that_form_no_chain_are_refused() -> None:
    model, teacher = pair()
    layer = model.model.layers[1]
    forward = layer.forward
    layer.forward = lambda hidden_states, *args, **kwargs: forward(hidden_states, *args, **kwargs)
    distill_layers(model, teacher, WINDOWS, **FAST)
    inner = model.model.layers[0]
    own = inner.forward
    inner.forward = lambda hidden_states, *args, **kwargs: own(hidden_states, *args, **kwargs)
    handle = layer.register_forward_pre_hook(lambda m, args: (args[0] * 2, *args[1:]))
    handle.remove()
    teacher.model.layers[1].register_forward_pre_hook(
        lambda m, args, kwargs: ((args[0] * 2, *args[1:]), kwargs) if args else (args, kwargs), with_kwargs=True
    )
    before = weights(model)
    with pytest.raises(NotImplementedError, match="cannot be run one at a time"):
        distill_layers(model, teacher, WINDOWS, **FAST)
    assert same(weights(model), before)


# ---------------------------------------------------------------------- progress


@pytest.mark.parametrize("wanted", [True, False])
def test_progress_bars(wanted, monkeypatch, capsys) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(progress, "_SILENT", -1.0)
    monkeypatch.setenv("FORCE_COLOR", "1")
    teacher = HOSTS["llama"]()
    model, _ = convert_to_mla(copy.deepcopy(teacher), kv_keep=0.4, calibration=CALIBRATION, progress=wanted)
    assert ("converting" in capsys.readouterr().err) is wanted
    distill_layers(model, teacher, WINDOWS, progress=wanted, **FAST)
    assert ("distilling" in capsys.readouterr().err) is wanted


def test_quiet_without_rich_and_for_what_is_over_soon(monkeypatch, capsys) -> None:
    model, teacher = pair()
    convert_to_mla(copy.deepcopy(teacher), kv_keep=0.4, calibration=CALIBRATION)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setattr(progress, "_SILENT", -1.0)
    distill_layers(model, teacher, WINDOWS, **FAST)
    captured_output = capsys.readouterr()
    assert captured_output.err == "" and captured_output.out == ""


def test_the_report() -> None:
    model, teacher = pair()
    _, report = distill_layers(model, teacher, WINDOWS, **FAST)
    assert "model.layers.1.self_attn" in str(report) and "held-out tokens" in str(report)
    assert json.loads(json.dumps(report.to_dict()))["arguments"]["steps"] == FAST["steps"]


def test_names() -> None:
    assert {"distill_layers", "capture_layers"} <= set(hf_kvcache.__all__)
