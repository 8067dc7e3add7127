"""The pre-RoPE form: exact in every generation mode, half of the bytes, refused where it does not pay."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from contract.common import CACHE, batch, feed, generate
from contract.common import positions_of as by_mask
from test_mla_convert import CALIBRATION, YARN, build
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    StaticCache,
)

from hf_kvcache import (
    CPUOffloadedCache,
    HeavyHitterCache,
    KVCache,
    SnapKVCache,
    convert_to_mla,
    enable_absorb,
    export_deepseek_v3,
)
from hf_kvcache.codecs import Rotated
from hf_kvcache.mla.pre_rope import PreRopeAttention, positions_of

HOSTS = {
    "mha": (LlamaForCausalLM, LlamaConfig, {}),
    "yarn": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": YARN}),
    "bias": (Qwen2ForCausalLM, Qwen2Config, {}),
    "norm": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 32}),  # heads larger than the hidden size: a quarter
    "window": (MistralForCausalLM, MistralConfig, {"head_dim": 16, "sliding_window": 8}),
    "two tables": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}
hosts = pytest.mark.parametrize("host", list(HOSTS))
CACHES = {
    "dynamic": lambda model: DynamicCache(config=model.config),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=64),
    "kv": KVCache,
    "kv/all": lambda model: KVCache(model, scope="all"),
    "offload": lambda model: CPUOffloadedCache(model, resident_length=4, page=4, attend="fetch"),
}


def pair(host, dtype=torch.float64, attention="sdpa", **kwargs):
    """The original, and its twin in the other form."""
    model, config, sizes = HOSTS[host]
    model = build(model, config, dtype, **{"num_key_value_heads": 4} | sizes | kwargs)
    model.set_attn_implementation(attention)
    return model, convert_to_mla(copy.deepcopy(model), form="pre_rope")[0]


def equal(ours, theirs, mask=None):
    if mask is not None:
        ours, theirs = ours[mask.bool()], theirs[mask.bool()]
    assert torch.isfinite(ours).all()
    assert float((ours - theirs).abs().max()) <= 1e-12 * float(theirs.abs().max())


@torch.no_grad()
def logits(model, cache, ids, mask, blocks, dtype=torch.float64, **kwargs):
    """As `feed`, in float64."""
    out, start = [], 0
    positions = kwargs.get("positions", by_mask(mask))
    for size in blocks:
        stop = start + size
        extra = {} if positions is None else {"position_ids": positions[:, start:stop]}
        arguments = {"attention_mask": mask[:, :stop], "use_cache": True, CACHE: cache} | extra
        out.append(model(input_ids=ids[:, start:stop], **arguments).logits)
        start = stop
    return torch.cat(out, dim=1)


@hosts
@pytest.mark.parametrize("label", CACHES)
def test_exact_step_by_step(host, label) -> None:
    """A prompt, single tokens, a block of three: rows of different lengths, padded on the left."""
    if label.startswith("offload") and host == "window":
        pytest.skip("nothing to offload: every layer has a window")
    stock, model = pair(host)
    ids, mask = batch(3, more=10)
    blocks = [10, 8, 1, 1, 3, 1, 4]
    expected = logits(stock, CACHES["static" if label == "static" else "dynamic"](stock), ids, mask, blocks)
    equal(logits(model, CACHES[label](model), ids, mask, blocks), expected, mask)


@pytest.mark.parametrize("host", ["mha", "bias", "two tables"])
def test_exact_with_eager_attention(host) -> None:
    """In float32: stock eager attention gives NaN for padded rows in float64."""
    stock, model = pair(host, torch.float32, "eager")
    ids, mask = batch(3, more=4)
    expected = logits(stock, DynamicCache(config=stock.config), ids, mask, [18, 1, 3])[mask.bool()]
    for label in ("dynamic", "kv"):
        ours = logits(model, CACHES[label](model), ids, mask, [18, 1, 3])[mask.bool()]
        assert float((ours - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


MODES = {
    "greedy": {},
    "sampled": dict(do_sample=True),
    "several": dict(do_sample=True, num_return_sequences=2),
    "beams": dict(num_beams=3),
    "beams_sampled": dict(num_beams=2, do_sample=True, num_return_sequences=2),
    "chunks": dict(prefill_chunk_size=5),
}


@hosts
@pytest.mark.parametrize("mode", MODES)
def test_generation(host, mode) -> None:
    stock, model = pair(host)
    ids, mask = batch(3)
    expected = generate(stock, DynamicCache(config=stock.config), ids, mask, **MODES[mode])
    for label in ("dynamic", "kv"):
        assert torch.equal(generate(model, CACHES[label](model), ids, mask, **MODES[mode]), expected), label


@pytest.mark.parametrize("host", ["mha", "bias", "norm", "yarn"])
def test_drafts(host) -> None:
    stock, model = pair(host)
    ids, _ = batch(1)
    ids = torch.cat([ids[:, :9], ids[:, :9], ids[:, :4]], dim=1)
    expected = generate(stock, DynamicCache(config=stock.config), ids, max_new_tokens=16)
    for mode in (dict(prompt_lookup_num_tokens=4), dict(assistant_model=pair("bias")[0])):
        for label in ("dynamic", "kv"):
            assert torch.equal(generate(model, CACHES[label](model), ids, max_new_tokens=16, **mode), expected)


@hosts
def test_two_turns_with_padding_inside(host) -> None:
    """Rows whose second turns differ in length have padding in the middle: positions do not count it."""
    stock, model = pair(host)
    ids, mask = batch(3, more=12)
    mask[0, 20:22] = 0
    mask[1, 19:25] = 0
    blocks = [18, 8, 1, 1, 2]
    expected = logits(stock, DynamicCache(config=stock.config), ids, mask, blocks)
    for label in ("dynamic", "kv"):
        equal(logits(model, CACHES[label](model), ids, mask, blocks), expected, mask)


@hosts
def test_two_turns_of_generate(host) -> None:
    stock, model = pair(host)
    ids, mask = batch(2)
    results = []
    for which, cache in ((stock, DynamicCache(config=stock.config)), (model, KVCache(model))):
        first = generate(which, cache, ids, mask)
        more = torch.cat([first, ids[:, :5]], dim=1)
        wide = torch.cat([mask, torch.ones(2, more.shape[1] - mask.shape[1], dtype=torch.long)], dim=1)
        results.append(generate(which, cache, more, wide))
    assert torch.equal(*results)


@pytest.mark.parametrize("host", ["mha", "bias", "norm"])
@pytest.mark.parametrize("label", ["dynamic", "kv"])
def test_operations(host, label) -> None:
    """Reordered, cropped, repeated, selected, copied and reset caches go on as the stock ones do."""
    stock, model = pair(host)
    ids, mask = batch(3, more=8)

    def run(which, cache):
        out = [logits(which, cache, ids, mask, [18, 2])]
        order = torch.tensor([2, 0, 1])
        cache.reorder_cache(order)
        rows, seen = ids[order], mask[order]
        again = copy.deepcopy(cache)
        cache.crop(-4)
        for one in (again, cache):
            start = one.get_seq_length()
            with torch.no_grad():
                arguments = {"attention_mask": seen[:, : start + 3], CACHE: one}
                where = by_mask(seen)[:, start : start + 3]
                out.append(which(input_ids=rows[:, start : start + 3], position_ids=where, **arguments).logits)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([1, 4]))
        rows, seen = rows.repeat_interleave(2, 0)[[1, 4]], seen.repeat_interleave(2, 0)[[1, 4]]
        start = cache.get_seq_length()
        with torch.no_grad():
            arguments = {"attention_mask": seen[:, : start + 2], CACHE: cache}
            where = by_mask(seen)[:, start : start + 2]
            out.append(which(input_ids=rows[:, start : start + 2], position_ids=where, **arguments).logits)
        if label == "kv":  # transformers' own reset fills with zeros and keeps the length
            cache.reset()
        return out

    theirs, ours = run(stock, DynamicCache(config=stock.config)), run(model, CACHES[label](model))
    equal(ours[0], theirs[0], mask[:, :20])
    for a, b in zip(ours[1:], theirs[1:], strict=True):
        equal(a, b)


def test_saved_caches_go_on(tmp_path) -> None:
    import hf_kvcache

    stock, model = pair("mha")
    ids, mask = batch(1, more=4)
    cache = KVCache(model)
    logits(model, cache, ids, mask, [18, 2])
    cache.save(str(tmp_path / "cache.safetensors"))
    loaded = hf_kvcache.load(str(tmp_path / "cache.safetensors"), model)
    expected = logits(stock, DynamicCache(config=stock.config), ids, mask, [18, 2, 1])[:, -1:]
    with torch.no_grad():
        equal(model(input_ids=ids[:, 20:21], **{CACHE: loaded}).logits, expected)


def test_positions_that_count_padding() -> None:
    """Without `position_ids`, transformers' models number the tokens as they come, padding too."""
    stock, model = pair("mha")
    ids, mask = batch(3, more=4)
    expected = logits(stock, DynamicCache(config=stock.config), ids, mask, [18, 1, 3], positions=None)
    for label in ("dynamic", "kv", "static"):
        equal(logits(model, CACHES[label](model), ids, mask, [18, 1, 3], positions=None), expected, mask)


def test_positions_of_nothing_known_are_refused() -> None:
    _, model = pair("mha")
    ids, mask = batch(2, more=2)
    where = by_mask(mask)
    where[:, 18:] += 100
    with pytest.raises(ValueError, match="position_ids"):
        logits(model, DynamicCache(config=model.config), ids, mask, [18, 1], positions=where)
    with pytest.raises(ValueError, match="position_ids"):
        positions_of(None, None, torch.zeros(1, 4, 8), 1, True)
    with pytest.raises(ValueError, match="object"):
        positions_of(object(), torch.zeros(1, 1), torch.zeros(1, 4, 8), 1, True)


@pytest.mark.parametrize("host", ["mha", "norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_of_the_hidden_size(host, dtype) -> None:
    stock, model = pair(host, dtype)
    ids, mask = batch(2)
    held = {}
    for name, which in (("stock", stock), ("ours", model)):
        cache = DynamicCache(config=which.config)
        feed(which, cache, ids, mask)
        held[name] = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert held["ours"] == 2 * 2 * 18 * 64 * dtype.itemsize
    assert held["ours"] / held["stock"] == {"mha": 0.5, "norm": 0.25}[host]
    cache = KVCache(model)
    feed(model, cache, ids, mask)
    assert cache.nbytes == cache.expected_bytes(model.config, 2, 18, dtype)
    report = convert_to_mla(copy.deepcopy(stock), form="pre_rope")[1]
    assert report.kept == held["ours"] / held["stock"]
    assert [layer.error for layer in report.layers] == [0.0, 0.0] and "of the bytes" in str(report)


def test_codecs_pack_the_rows() -> None:
    stock, model = pair("mha", torch.float32)
    ids = torch.randint(3, 90, (1, 241))
    cache = KVCache(model, codec=Rotated(nbits=4, residual_length=32))
    feed(model, cache, ids[:, :240])
    assert cache.nbytes < 0.5 * KVCache(model).expected_bytes(model.config, 1, 240)
    close = feed(model, cache, ids, blocks=[1], start=240)
    exact = feed(stock, DynamicCache(config=stock.config), ids)
    assert float((close - exact).abs().max()) < 0.2 * float(exact.abs().max())


@pytest.mark.parametrize(
    "make",
    [
        lambda model: HeavyHitterCache(model, heavy_size=4, recent_size=4),
        lambda model: SnapKVCache(model, max_capacity_prompt=8, window_size=4),
    ],
)
def test_caches_that_drop_refuse_before_anything_is_generated(make) -> None:
    _, model = pair("mha", torch.float32)
    ids, mask = batch(1)
    with pytest.raises(NotImplementedError, match="drops tokens"):
        feed(model, make(model), ids, mask)


@hosts
def test_saved_and_loaded(host, tmp_path) -> None:
    stock, model = pair(host, torch.float32)
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert all(isinstance(layer.self_attn, PreRopeAttention) for layer in loaded.model.layers)
    ids, mask = batch(2)
    assert torch.equal(generate(loaded, None, ids, mask), generate(stock, None, ids, mask))
    copied = copy.deepcopy(loaded)
    assert copied.model.layers[0].self_attn.rotary[0] is copied.model.rotary_emb
    assert torch.equal(generate(copied, None, ids, mask), generate(stock, None, ids, mask))


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c["mla"][0].update(rotary="model.layers"),
        lambda c: c["mla"][0].update(rotary=3),
        lambda c: c["mla"][0].update(rotary_arguments=["evil"]),
        lambda c: c["mla"][0].update(rotary_arguments=None),
        lambda c: c["mla"][0].update(kv_lora_rank=7),
        lambda c: c["mla"][0].update(windowed="no"),
        lambda c: c["mla"][0].update(name="model.layers.0.mlp"),
    ],
)
def test_a_broken_config_is_refused(change, tmp_path) -> None:
    _, model = pair("mha", torch.float32)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="not understood|do not fit|has not"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@hosts
def test_training_is_the_hosts(host) -> None:
    stock, model = pair(host)
    ids, mask = batch(2)
    labels = ids.masked_fill(mask == 0, -100)
    grads = []
    for which in (stock, model):
        which.train()
        which(
            input_ids=ids, attention_mask=mask, position_ids=by_mask(mask), labels=labels, use_cache=False
        ).loss.backward()
        grads.append([p.grad for p in which.parameters() if p.grad is not None])
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


def test_refusals() -> None:
    grouped = build(LlamaForCausalLM, LlamaConfig, num_key_value_heads=2)
    before = type(grouped.model.layers[0].self_attn)
    with pytest.raises(ValueError, match="pays only where the hidden size is smaller"):
        convert_to_mla(grouped, form="pre_rope")
    assert type(grouped) is LlamaForCausalLM and type(grouped.model.layers[0].self_attn) is before
    whole = build(LlamaForCausalLM, LlamaConfig, num_key_value_heads=4)
    for given in ({"kv_keep": 0.5}, {"calibration": CALIBRATION}, {"rotary": "uniform"}, {"kv_lora_rank": 8}):
        with pytest.raises(ValueError, match="always lossless"):
            convert_to_mla(whole, form="pre_rope", **given)
    with pytest.raises(ValueError, match="form"):
        convert_to_mla(whole, form="magic", calibration=CALIBRATION)
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    growing = build(LlamaForCausalLM, LlamaConfig, num_key_value_heads=4, rope_parameters=dynamic)
    with pytest.raises(NotImplementedError, match="dynamic"):
        convert_to_mla(growing, form="pre_rope")
    model, _ = convert_to_mla(whole, form="pre_rope")
    with pytest.raises(ValueError, match="converted already"):
        convert_to_mla(model, form="pre_rope")
    with pytest.raises(ValueError, match="nothing to absorb"):
        enable_absorb(model)
    with pytest.raises(ValueError, match="pre_rope"):
        export_deepseek_v3(model, "never")
