"""What users reported: each one a way to get wrong text or a bare error, and what happens instead."""

from __future__ import annotations

import pytest
import torch
from test_storage import IDS, MASK, llama, turn
from transformers import BartConfig, BartForConditionalGeneration, DynamicCache, EncoderDecoderCache

import hf_kvcache
from hf_kvcache import HeavyHitterCache, KVCache, SlidingWindowCache, SnapKVCache, load
from hf_kvcache.compat.shrink import build
from hf_kvcache.policies import LayerPolicy, Policy
from hf_kvcache.policies.base import Keep, Step


class Newest(LayerPolicy):
    drops = True

    def __init__(self, size: int) -> None:
        self.size = size

    def keep(self, step: Step) -> Keep | None:
        n = step.rows.length
        if n <= self.size:
            return None
        index = torch.arange(n - self.size, n, device=step.rows.positions.device)
        return Keep(index.expand(step.rows.positions.shape[0], 1, -1))

    def rows_after(self, tokens: int) -> int:
        return min(tokens, self.size)


class KeepNewest(Policy):
    name = "newest"
    drops = needs_model = True

    def __init__(self, size: int) -> None:
        self.size = size

    def for_layer(self, layer: int, layers: int, window: int | None) -> LayerPolicy:
        return Newest(self.size)


@pytest.fixture(scope="module")
def model():
    return llama()


def bart():
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=64, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, init_std=0.3, forced_eos_token_id=None,
    )  # fmt: skip
    model = BartForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id = None
    return model


def test_cross_attention_keeps_the_mask_of_the_encoder() -> None:
    model = bart()
    ids, mask = IDS.flip(1), MASK.flip(1)

    def run(cache):
        return model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, past_key_values=cache)

    expected = run(EncoderDecoderCache(DynamicCache(), DynamicCache()))
    assert torch.equal(run(EncoderDecoderCache(KVCache(model), KVCache(model))), expected)
    assert torch.equal(run(EncoderDecoderCache(KVCache(model), DynamicCache())), expected)
    with pytest.raises(NotImplementedError, match="EncoderDecoderCache"):
        run(EncoderDecoderCache(KVCache(model), HeavyHitterCache(model, 8, 8)))


def test_a_file_is_of_the_adapter_it_was_written_under(tmp_path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False, target_modules=["q_proj", "k_proj"])
    model = peft.get_peft_model(llama(), config, adapter_name="one")
    model.add_adapter("two", config)
    model.set_adapter("one")
    model.eval()
    path = str(tmp_path / "cache.safetensors")
    cache = KVCache(model)
    assert torch.equal(turn(model, cache, IDS, MASK), turn(model, DynamicCache(config=model.config), IDS, MASK))
    cache.save(path)
    inner = model.get_base_model()
    load(path, inner)
    model.set_adapter("two")
    with pytest.raises(ValueError, match="adapters"):
        load(path, inner)
    model.set_adapter("one")
    with model.disable_adapter(), pytest.raises(ValueError, match="adapters"):
        load(path, inner)


def test_a_policy_of_ones_own_is_saved_by_name_and_arguments(model, tmp_path) -> None:
    path = str(tmp_path / "cache.safetensors")
    cache = KVCache(model, policy=KeepNewest(12))
    first = turn(model, cache, IDS, MASK)
    assert "KeepNewest(size=12)" in repr(cache) and cache.kept_length(0) == 12
    cache.save(path)
    with pytest.raises(ValueError, match="policy of its own"):
        load(path, model)
    for other in (KVCache(model), KVCache(model, policy=KeepNewest(13))):
        with pytest.raises(ValueError, match="written by"):
            other.load(path)
    filled = KVCache(model, policy=KeepNewest(12)).load(path)
    history = torch.cat([first, IDS[:, :3]], dim=1)
    mask = torch.cat([MASK, torch.ones(3, history.shape[1] - 20, dtype=torch.long)], dim=1)
    assert torch.equal(turn(model, filled, history, mask), turn(model, cache, history, mask))


def test_a_policy_that_forgets_to_say_that_it_drops(model, monkeypatch) -> None:
    monkeypatch.setattr(Newest, "drops", False)
    with pytest.raises(ValueError, match="drops = True"):
        KVCache(model, policy=KeepNewest(12))


@pytest.mark.parametrize("make", [KVCache, lambda m: SnapKVCache(m, 12, window_size=4)], ids=["identity", "snapkv"])
def test_an_interrupted_forward_pass(make) -> None:
    model = llama()
    expected = turn(model, make(model), IDS, MASK)
    cache = make(model)

    def stop(*_):
        raise KeyboardInterrupt

    for prompt_first in (False, True):
        if prompt_first:
            turn(model, cache, IDS, MASK)
        hook = model.model.layers[0].mlp.register_forward_hook(stop)
        with pytest.raises(KeyboardInterrupt), torch.no_grad():
            model(input_ids=IDS[:, :1], past_key_values=cache)
        hook.remove()
        assert "reset" in repr(cache)
        with pytest.raises((ValueError, RuntimeError), match="reset"), torch.no_grad():
            model(input_ids=IDS[:, :1], past_key_values=cache)
        cache.reset()
        assert torch.equal(turn(model, cache, IDS, MASK), expected)
        cache.reset()


def test_a_pyramid_lets_prompts_within_the_capacity_through() -> None:
    model = llama(num_hidden_layers=6)
    for length, whole in ((30, True), (80, False)):
        cache = SnapKVCache(model, 40, window_size=4, pyramid_beta=20)
        assert cache.expected_bytes(model.config, 2, length)
        ids = torch.randint(3, 60, (2, length))
        with torch.no_grad():
            model(input_ids=ids, past_key_values=cache)
        kept = [cache.kept_length(i) for i in range(6)]
        assert (kept == [30] * 6) == whole, kept
        assert cache.nbytes == cache.expected_bytes(model.config, 2, length)


BAD = [
    (SlidingWindowCache, dict(window_length=None)),
    (SlidingWindowCache, dict(window_length=8.0)),
    (SnapKVCache, dict(max_capacity_prompt=None)),
    (SnapKVCache, dict(max_capacity_prompt=64, window_size=None)),
    (SnapKVCache, dict(max_capacity_prompt=64, kernel_size=None)),
    (SnapKVCache, dict(max_capacity_prompt=64, recent_ratio="half")),
    (SnapKVCache, dict(max_capacity_prompt=64, floor_alpha=None)),
    (SnapKVCache, dict(max_capacity_prompt=64, floor_alpha=float("nan"))),
    (SnapKVCache, dict(max_capacity_prompt=64, value_norm="8")),
    (SnapKVCache, dict(max_capacity_prompt=64, adaptive_heads=1)),
    (SnapKVCache, dict(max_capacity_prompt=64, adaptive_heads=True, decode_budget=4)),
    (SnapKVCache, dict(max_capacity_prompt=64, adaptive_heads=True, pyramid_beta=4)),
    (SnapKVCache, dict(max_capacity_prompt=64, wide_window=8)),
    (SnapKVCache, dict(max_capacity_prompt=64, policy=Policy())),
    (HeavyHitterCache, dict(heavy_ratio="0.1")),
    (HeavyHitterCache, dict(heavy_size=True)),
    (HeavyHitterCache, dict(heavy_size=4, recent_size=4, score="max")),
]


@pytest.mark.parametrize(("kind", "arguments"), BAD, ids=lambda x: ",".join(x) if isinstance(x, dict) else x.__name__)
def test_a_bad_argument_is_named(model, kind, arguments) -> None:
    with pytest.raises(ValueError) as caught:
        kind(model, **arguments)
    named = [name for name in arguments if name in str(caught.value)]
    assert named, str(caught.value)


def test_numpy_integers_are_whole_numbers(model, tmp_path) -> None:
    numpy = pytest.importorskip("numpy")
    cache = SnapKVCache(model, numpy.int64(12), window_size=numpy.int32(4))
    assert turn(model, cache, IDS, MASK).shape == (3, 26)
    cache.save(str(tmp_path / "cache.safetensors"))
    assert load(str(tmp_path / "cache.safetensors"), model).get_seq_length() == 25


@pytest.mark.parametrize("thing", [None, "llama"])
def test_attach_needs_a_model(thing) -> None:
    for function in (hf_kvcache.attach, hf_kvcache.detach, KVCache):
        with pytest.raises(ValueError, match="model"):
            function(thing)


def test_a_detached_model_is_told_to_attach() -> None:
    model = llama()
    cache = SnapKVCache(model, 12, window_size=4)
    hf_kvcache.detach(model)
    with pytest.raises(NotImplementedError, match="attach"):
        turn(model, cache, IDS, MASK)


def test_a_cache_made_from_a_config_says_what_it_lacks(model, tmp_path) -> None:
    path = str(tmp_path / "cache.safetensors")
    cache = KVCache(model.config)
    turn(model, cache, IDS, MASK)
    cache.save(path)
    with pytest.raises(ValueError, match="made from a config"):
        load(path, model)
    with pytest.raises(ValueError, match="needs the model"):
        load(path, model.config)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        cache.save(str(tmp_path / "nowhere" / "cache.safetensors"))
    assert torch.equal(
        KVCache(model.config).load(path).kv_layers[0].segments.rows.keys, cache.kv_layers[0].segments.rows.keys
    )


@pytest.mark.parametrize("kind", ["falcon", "gpt_bigcode", "gpt2", "deepseek_v3", "bart"])
def test_the_formula_knows_how_families_name_their_heads(kind) -> None:
    model = build(kind)
    cache = KVCache(model)
    with torch.no_grad():
        model(input_ids=torch.randint(3, 90, (2, 12)), past_key_values=cache, use_cache=True)
    assert cache.nbytes == cache.expected_bytes(model.config, 2, 12)
