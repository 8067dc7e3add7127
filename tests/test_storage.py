"""Saved caches: what comes back is what was held, and a file that is not right is refused whole."""

from __future__ import annotations

import json
import pickle
import struct

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from hf_kvcache import HeavyHitterCache, KVCache, SlidingWindowCache, SnapKVCache, load


def llama(seed: int = 0, **changes):
    sizes = dict(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**(sizes | changes))).eval()


def gemma3():
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=8, initializer_range=0.3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )  # fmt: skip
    return Gemma3ForCausalLM(config).eval()


CACHES = {
    "identity": lambda m: KVCache(m),
    "window": lambda m: SlidingWindowCache(m, 8, num_sink_tokens=2),
    "snapkv": lambda m: SnapKVCache(m, 12, window_size=4, decode_budget=3),
    "h2o": lambda m: HeavyHitterCache(m, heavy_ratio=0.3, recent_ratio=0.3),
}
IDS = torch.arange(3 * 20).view(3, 20) * 7 % 61 + 3
MASK = torch.ones_like(IDS)
MASK[0, :6] = 0
MASK[2, :3] = 0


def turn(model, cache, ids, mask, tokens=6):
    arguments = dict(max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return model.generate(input_ids=ids, attention_mask=mask, past_key_values=cache, **arguments)


@pytest.fixture(scope="module")
def model():
    return llama()


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("make", [llama, gemma3], ids=["llama", "gemma3"])
def test_save_load_and_continue(name, make, tmp_path) -> None:
    model = make()
    path = str(tmp_path / "cache.safetensors")
    cache = CACHES[name](model)
    first = turn(model, cache, IDS, MASK)
    cache.save(path)
    history = torch.cat([first, IDS[:, :5]], dim=1)
    mask = torch.cat([MASK, torch.ones(3, history.shape[1] - 20, dtype=torch.long)], dim=1)
    loaded, filled = load(path, model), CACHES[name](model).load(path)
    assert type(loaded) is type(cache) and loaded.get_seq_length() == cache.get_seq_length()
    assert loaded.nbytes <= cache.nbytes * 1.6
    expected = turn(model, cache, history, mask)
    assert torch.equal(turn(model, loaded, history, mask), expected)
    assert torch.equal(turn(model, filled, history, mask), expected)


def saved(model, tmp_path):
    path = tmp_path / "cache.safetensors"
    cache = SnapKVCache(model, 12, window_size=4)
    turn(model, cache, IDS, MASK)
    cache.save(str(path))
    return path


def rewrite(path, change):
    """The same file with its description or tensors changed, and nothing else."""
    with safe_open(str(path), framework="pt") as file:
        description = json.loads(file.metadata()["hf_kvcache"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    change(description, tensors)
    save_file(tensors, str(path), metadata={"hf_kvcache": json.dumps(description)})


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def lengthen(path):
    path.write_bytes(path.read_bytes() + b"\0" * 100)


def flip(path):
    data = bytearray(path.read_bytes())
    data[-50] ^= 1
    path.write_bytes(bytes(data))


def huge_header(path):
    path.write_bytes(struct.pack("<Q", 1 << 40) + path.read_bytes()[8:])


def a_pickle(path):
    path.write_bytes(pickle.dumps({"keys": [1, 2, 3]}))


def empty(path):
    path.write_bytes(b"")


def other_tensors(path):
    save_file({"x": torch.zeros(3)}, str(path))


def version(path):
    rewrite(path, lambda d, t: d.update(format_version=99))


def unknown_technique(path):
    rewrite(path, lambda d, t: d.update(technique="os.system"))


def bad_arguments(path):
    rewrite(path, lambda d, t: d["arguments"].update(kernel_size=4))


def strange_argument(path):
    rewrite(path, lambda d, t: d["arguments"].update(surprise=1))


def extra_tensor(path):
    rewrite(path, lambda d, t: t.update(stowaway=torch.zeros(2)))


def positions_beyond(path):
    import hashlib

    def change(description, tensors):
        tensors["0.positions"] = tensors["0.positions"] + 1000
        raw = tensors["0.positions"].contiguous().view(torch.uint8).numpy().tobytes()
        description["sha256"]["0.positions"] = hashlib.sha256(raw).hexdigest()

    rewrite(path, change)


def missing_layer(path):
    rewrite(path, lambda d, t: d.update(layers=d["layers"][:1]))


def negative_length(path):
    rewrite(path, lambda d, t: d["layers"][0].update(seen=-5))


HOSTILE = [
    truncate, lengthen, flip, huge_header, a_pickle, empty, other_tensors, version, unknown_technique, bad_arguments,
    strange_argument, extra_tensor, positions_beyond, missing_layer, negative_length,
]  # fmt: skip


@pytest.mark.parametrize("harm", HOSTILE, ids=lambda f: f.__name__)
def test_a_damaged_file_is_refused_and_nothing_changes(model, tmp_path, harm) -> None:
    path = saved(model, tmp_path)
    harm(path)
    with pytest.raises(ValueError, match=str(path.name)):
        load(str(path), model)
    cache = SnapKVCache(model, 12, window_size=4)
    expected = turn(model, cache, IDS, MASK)
    held = [layer.segments.rows.keys.clone() for layer in cache.kv_layers]
    with pytest.raises(ValueError, match=str(path.name)):
        cache.load(str(path))
    assert cache.get_seq_length() == expected.shape[1] - 1
    for layer, keys in zip(cache.kv_layers, held, strict=True):
        assert torch.equal(layer.segments.rows.keys, keys)


def test_a_file_of_another_model_is_refused(model, tmp_path) -> None:
    path = saved(model, tmp_path)
    with pytest.raises(ValueError, match="weights, adapters or precision"):
        load(str(path), llama(seed=1))
    with pytest.raises(ValueError, match="weights, adapters or precision"):
        load(str(path), llama().to(torch.bfloat16))
    with pytest.raises(ValueError, match="another model"):
        load(str(path), llama(num_hidden_layers=3))


def test_a_file_of_another_technique_is_refused(model, tmp_path) -> None:
    path = saved(model, tmp_path)
    with pytest.raises(ValueError, match="written by"):
        SnapKVCache(model, 16, window_size=4).load(str(path))
    with pytest.raises(ValueError, match="written by"):
        KVCache(model).load(str(path))


def test_a_failed_save_leaves_no_file(model, tmp_path) -> None:
    cache = KVCache(model)
    turn(model, cache, IDS, MASK)
    with pytest.raises(Exception):  # noqa: B017 - the operating system's own error
        cache.save(str(tmp_path / "no" / "such" / "folder.safetensors"))
    assert list(tmp_path.iterdir()) == []


def test_a_missing_file_says_so(model, tmp_path) -> None:
    with pytest.raises(FileNotFoundError):
        load(str(tmp_path / "nothing.safetensors"), model)
