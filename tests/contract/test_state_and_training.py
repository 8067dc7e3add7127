"""Point 8: state follows the data; and training through a cache."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import weakref

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    EncoderDecoderCache,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_kvcache import HeavyHitterCache, KVCache, SnapKVCache, attach, detach
from hf_kvcache.layer import KVLayer
from hf_kvcache.policies import Policy

from .common import (
    CACHE,
    CACHES,
    LOSSLESS,
    assert_close,
    batch,
    dynamic,
    feed,
    generate,
    model_of,
    roomy,
    stock_of,
    tight,
)


@pytest.mark.parametrize("label", CACHES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_dtype_comes_from_the_first_key(label, dtype):
    model = model_of("llama", "sdpa", dtype)
    ids, _ = batch(1, more=2)
    cache = tight(label, model)
    feed(model, cache, ids, blocks=[18, 1, 1])
    expected = torch.float32 if dtype == "fp32" else torch.bfloat16
    for layer in cache.kv_layers:
        assert layer.segments.rows.keys.dtype == layer.segments.rows.values.dtype == expected


@pytest.mark.parametrize("label", LOSSLESS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_autocast(label, attention):
    model, stock = model_of("llama", attention), stock_of("llama", attention)
    ids, mask = batch(3, more=3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = feed(stock, dynamic(stock), ids, mask, [18, 1, 1, 1])
        cache = roomy(label, model)
        ours = feed(model, cache, ids, mask, [18, 1, 1, 1])
    assert_close(ours, expected, "bf16")
    # A later step outside of autocast still fits.
    feed(model, roomy(label, model), ids, mask, [18, 1])


@pytest.mark.parametrize("label", CACHES)
def test_autocast_that_ends_between_two_turns(label):
    """The returned dtype is the dtype that came in, on the second turn too."""
    model = model_of("llama")
    ids, mask = batch(1, more=3)
    cache = tight(label, model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        feed(model, cache, ids[:, :18])
    held = cache.layers[0].segments.rows.keys.dtype
    ours = feed(model, cache, ids, mask, [2, 1], start=18)
    assert torch.isfinite(ours).all()
    assert cache.layers[0].segments.rows.keys.dtype == held


def test_layers_on_two_devices():
    """Each layer takes its device from its own first key (the second device is `meta`: shapes only)."""
    first, second = (KVLayer(Policy().for_layer(i, 2, None), i) for i in range(2))
    for layer, device in ((first, "cpu"), (second, "meta")):
        for size in (5, 1, 1):
            keys = torch.zeros(2, 3, size, 4, device=device, dtype=torch.float16)
            k, v = layer.update(keys, keys)
        assert k.shape == v.shape == (2, 3, 7, 4)
        assert all(t.device.type == device for t in layer.segments.rows.tensors().values())
        layer.reorder_cache(torch.tensor([1, 1]))
        layer.batch_repeat_interleave(2)
        layer.crop(-1)
        assert layer.kept == 6 and layer.segments.rows.keys.shape[0] == 4


def test_inference_mode_then_no_grad():
    model, stock = model_of("llama"), stock_of("llama")
    ids, mask = batch(1, more=3)
    expected = feed(stock, dynamic(stock), ids, mask, [18, 1, 1, 1])
    cache = KVCache(model)
    with torch.inference_mode():
        feed(model, cache, ids[:, :19], blocks=[18, 1])
    assert_close(feed(model, cache, ids, mask, [1, 1], start=19), expected[:, 2:])


# ---------------------------------------------------------------------- training


def gradients(model, cache, ids, mask, checkpoint=False):
    model = copy.deepcopy(model).train()
    if checkpoint:
        model.gradient_checkpointing_enable()
    labels = ids.masked_fill(mask == 0, -100)
    out = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=True, **{CACHE: cache})
    out.loss.backward()
    return out.loss.item(), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("case", ["llama", "gemma3/all", "gpt_oss/all", "deepseek_v3", "deepseek_v3/absorb"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("label", CACHES)
def test_gradients_equal_dynamic_caches(label, attention, case):
    model, stock = model_of(case, attention), stock_of(case, attention)
    ids, mask = batch(3)
    expected = gradients(stock, dynamic(stock), ids, mask)
    ours = gradients(model, tight(label, model, case), ids, mask)
    assert ours[0] == pytest.approx(expected[0], rel=1e-5)
    assert len(ours[1]) == len(expected[1])
    for a, b in zip(ours[1], expected[1], strict=True):
        assert torch.allclose(a, b, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("label", LOSSLESS)
def test_gradients_through_a_cached_prefix(label):
    """A prefix, then a second block whose loss reaches back through the cached keys."""
    results = []
    for model, make in ((stock_of("llama"), lambda m: dynamic(m)), (model_of("llama"), lambda m: roomy(label, m))):
        model = copy.deepcopy(model).train()
        cache = make(model)
        ids, _ = batch(2)
        model(input_ids=ids[:, :10], use_cache=True, **{CACHE: cache})
        model(input_ids=ids[:, 10:], use_cache=True, **{CACHE: cache}).logits.pow(2).mean().backward()
        results.append([p.grad for p in model.parameters() if p.grad is not None])
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("label", CACHES)
def test_gradient_checkpointing(label):
    """transformers drops the cache there; the gradients must be those of no cache at all."""
    model, stock = model_of("llama"), stock_of("llama")
    ids, mask = batch(3)
    expected = gradients(stock, dynamic(stock), ids, mask, checkpoint=True)
    ours = gradients(model, tight(label, model), ids, mask, checkpoint=True)
    assert ours[0] == pytest.approx(expected[0], rel=1e-5)
    for a, b in zip(ours[1], expected[1], strict=True):
        assert torch.allclose(a, b, atol=1e-4, rtol=1e-3)


# ---------------------------------------------------------------------- encoder-decoder


def seq2seq(kind):
    torch.manual_seed(5)
    if kind == "t5":
        config = T5Config(
            vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0,
            initializer_factor=8.0, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        return T5ForConditionalGeneration(config).eval()
    config = BartConfig(
        vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64, init_std=0.3,
        eos_token_id=None, forced_eos_token_id=None, decoder_start_token_id=1, pad_token_id=0, bos_token_id=1,
    )  # fmt: skip
    return BartForConditionalGeneration(config).eval()


@pytest.mark.parametrize("mode", [{}, dict(num_beams=3)])
@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_encoder_decoder(kind, mode):
    model = seq2seq(kind)
    ids = torch.randint(2, 64, (2, 7))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    kwargs = dict(input_ids=ids, attention_mask=mask, max_new_tokens=10, do_sample=False) | mode
    expected = model.generate(**kwargs)
    assert len(expected.unique()) >= 3
    from transformers import DynamicCache

    ours = model.generate(**kwargs, **{CACHE: EncoderDecoderCache(KVCache(model), DynamicCache())})
    assert torch.equal(ours, expected)
    detach(model)
    assert torch.equal(model.generate(**kwargs), expected)


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_encoder_decoder_with_eviction(kind):
    """The decoder's own tokens are evicted, the encoder's are not touched; or the model is refused by name."""
    from transformers import DynamicCache

    model = seq2seq(kind)
    ids = torch.randint(2, 64, (2, 7))
    kwargs = dict(input_ids=ids, max_new_tokens=20, do_sample=False)
    expected = model.generate(**kwargs)
    roomy_tokens = model.generate(
        **kwargs, **{CACHE: EncoderDecoderCache(HeavyHitterCache(model, 20, 20), DynamicCache())}
    )
    assert torch.equal(roomy_tokens, expected)
    cache = EncoderDecoderCache(HeavyHitterCache(model, 4, 4), DynamicCache())
    model.generate(**kwargs, **{CACHE: cache})
    assert cache.self_attention_cache.kept_length() == 8
    assert cache.cross_attention_cache.get_seq_length() == 7


# ---------------------------------------------------------------------- attach and detach


@pytest.mark.parametrize("before", ["sdpa", "eager", "flash_attention_2", "flex_attention"])
def test_detach_restores_what_was_set(before):
    model = copy.deepcopy(stock_of("llama"))
    model.config._attn_implementation_internal = before
    attach(model)
    attach(model)
    assert model.config._attn_implementation != before
    detach(model)
    assert model.config._attn_implementation == before
    detach(model)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("before", ["flash_attention_2", "flex_attention"])
@pytest.mark.parametrize("rows", [1, 3])
def test_prompts_go_to_the_implementation_that_was_set(before, rows, monkeypatch):
    """A recorder in place of the kernel sees prompts, with a mask that the kernel understands, and no decoding."""
    calls = []

    def recorder(module, query, key, value, mask, dropout=0.0, scaling=None, **kwargs):
        calls.append((type(mask).__name__ if mask is not None else None, getattr(mask, "shape", None), key))
        assert module.config._attn_implementation == before or before == "flex_attention"
        b, heads, new, _ = query.shape
        key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
        visible = torch.ones(new, key.shape[2], dtype=torch.bool).tril(key.shape[2] - new).expand(b, 1, -1, -1)
        if isinstance(mask, torch.Tensor) and mask.ndim == 2:
            visible = visible & mask[:, None, None].bool()
        elif mask is not None and hasattr(mask, "mask_mod"):
            index = torch.meshgrid(torch.arange(new), torch.arange(key.shape[2]), indexing="ij")
            visible = torch.stack([mask.mask_mod(torch.tensor(i), torch.tensor(0), *index) for i in range(b)])[:, None]
        # a row that sees nothing is padding
        visible = visible | ~visible.any(-1, keepdim=True)
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scaling)
        return out.transpose(1, 2).contiguous(), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, before, recorder)
    model, stock = copy.deepcopy(stock_of("llama")), stock_of("llama")
    model.config._attn_implementation_internal = before
    ids, mask = batch(rows, more=4)
    cache = SnapKVCache(model, 10, 4)
    ours = feed(model, cache, ids, mask, [18])
    assert_close(ours, feed(stock, dynamic(stock), ids, mask, [18]))
    assert len(calls) == 2  # one for each layer
    for name, shape, _ in calls:
        assert name in ((None, "Tensor") if before == "flash_attention_2" else (None, "BlockMask"))
        assert name != "Tensor" or tuple(shape) == (rows, 18), "flash takes the 2-D padding mask only"
        assert rows == 1 or name is not None
    feed(model, cache, ids, mask, [1, 1, 2], start=18)
    assert len(calls) == 2
    detach(model)
    assert model.config._attn_implementation == before


def test_other_caches_keep_working_on_an_attached_model():
    for case in ("llama", "gemma3", "gpt_oss", "deepseek_v3", "deepseek_v3/absorb"):
        model, stock = model_of(case), stock_of(case)
        attach(model)
        ids, mask = batch(3)
        assert torch.equal(generate(model, dynamic(model), ids, mask), generate(stock, dynamic(stock), ids, mask))
        assert torch.equal(generate(model, None, ids, mask), generate(stock, None, ids, mask))


@pytest.mark.parametrize("label", CACHES)
def test_nothing_of_the_cache_stays_on_the_model(label):
    for case in ("llama", "deepseek_v3", "deepseek_v3/absorb", "gemma3"):
        model = model_of(case)
        ids, mask = batch(3)
        cache = tight(label, model, case)
        refs = [weakref.ref(cache), *(weakref.ref(layer) for layer in cache.layers)]
        generate(model, cache, ids, mask)
        refs += [weakref.ref(layer.segments.rows.keys) for layer in cache.kv_layers]
        del cache
        gc.collect()
        assert all(ref() is None for ref in refs)


def test_output_attentions_of_the_eager_implementation():
    model, stock = model_of("llama", "eager"), stock_of("llama", "eager")
    ids, mask = batch(3)
    with torch.no_grad():
        both = [
            m(input_ids=ids, attention_mask=mask, output_attentions=True, **{CACHE: c}).attentions
            for m, c in ((model, KVCache(model)), (stock, dynamic(stock)))
        ]
    for a, b in zip(*both, strict=True):
        real = mask.bool()
        assert_close(a.transpose(1, 2)[real], b.transpose(1, 2)[real])


@pytest.mark.parametrize("label", CACHES)
def test_print_says_what_is_held(label):
    model = model_of("gemma3")
    cache = tight(label, model)
    assert "empty" in repr(cache)
    feed(model, cache, batch(1)[0])
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        print(cache)
    for part in (type(cache).__name__, "seen 18", "kept", "32 bits", f"{cache.nbytes:,}", "left to transformers"):
        assert part in out.getvalue()
