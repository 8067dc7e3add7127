"""PrefixStore: the text of a cold run, from rows that are held once, whoever shares them."""

from __future__ import annotations

import copy
import gc
import importlib
import random
import threading

import pytest
import torch
from test_hybrid import TYPES
from test_storage import gemma3, llama
from transformers import DynamicCache

from hf_kvcache import KVCache, PrefixStore, QuantizedKIVICache, SlidingWindowCache, SnapKVCache
from hf_kvcache.codecs import KIVI, Float8, Rotated
from hf_kvcache.compat.shrink import build
from hf_kvcache.prefix.tree import tensors_of

GENERATOR = torch.Generator().manual_seed(23)
SYSTEM = torch.randint(3, 64, (1, 70), generator=GENERATOR)
QUESTIONS = torch.randint(3, 64, (8, 12), generator=GENERATOR)
ARGUMENTS = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)
ROOM = 1 << 26


def prompt(n):
    return torch.cat([SYSTEM, QUESTIONS[n : n + 1]], dim=1)


def cold(model, ids, make=None, **kwargs):
    cache = DynamicCache(config=model.config) if make is None else make(model)
    return model.generate(ids, past_key_values=cache, **(ARGUMENTS | kwargs))


def storages(*roots):
    held = [t.untyped_storage() for root in roots for t in tensors_of(root)]
    return {s.data_ptr(): s.nbytes() for s in held if s.nbytes()}


def held_by(store):
    return storages(*[[node.block.tables, node.state and node.state.layers] for node in store._tree.order])


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # a pool of threads costs more than these models compute
    yield
    torch.set_num_threads(before)


@pytest.fixture
def model():
    return llama()


# ---------------------------------------------------------------------- what comes back


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("make", [llama, gemma3], ids=["llama", "gemma3"])
def test_later_questions_reuse_the_system_prompt(make, attention) -> None:
    model = make()
    model.set_attn_implementation(attention)
    store = PrefixStore(ROOM)
    for n in range(4):
        assert torch.equal(store.generate(model, prompt(n), **ARGUMENTS), cold(model, prompt(n)))
    found = store.stats()
    # A layer with a window can begin only where an entry ends, and the second call is the first to show where.
    assert found["hits"] == (3 if make is llama else 2)
    assert found["tokens_saved"] == 70 * found["hits"]


def test_get_never_holds_all_and_put_keeps_what_is_held(model) -> None:
    store = PrefixStore(ROOM)
    cache = store.get(model, prompt(0))
    assert cache.get_seq_length() == 0
    expected = cold(model, prompt(0))
    assert torch.equal(cold(model, prompt(0), lambda m: cache), expected)
    assert store.put(model, prompt(0), cache) == 82  # it holds more: answers were not asked for
    assert store.put(model, expected, cache) == expected.shape[1] - 1 - 82  # and fewer: the last token was never fed
    assert store.get(model, prompt(0)).get_seq_length() == 81
    assert store.get(model, prompt(1)).get_seq_length() == 70
    assert store.get(model, prompt(1)[:, :50]).get_seq_length() == 49
    assert store.get(model, QUESTIONS[:1] * 0 + 1).get_seq_length() == 0
    # The cache that was put goes on by itself.
    more = torch.cat([expected, QUESTIONS[3:4]], dim=1)
    assert torch.equal(model.generate(more, past_key_values=cache, **ARGUMENTS), cold(model, more))


def test_a_conversation_continues_where_it_was(model) -> None:
    store = PrefixStore(ROOM)
    ids = prompt(0)
    for n in range(1, 5):
        expected = cold(model, ids)
        before = store.stats()["tokens_saved"]
        assert torch.equal(store.generate(model, ids, **ARGUMENTS), expected)
        if n > 1:
            assert store.stats()["tokens_saved"] - before == ids.shape[1] - 12 - 1  # all but the question and a token
        ids = torch.cat([expected, QUESTIONS[n : n + 1]], dim=1)


@pytest.mark.parametrize("codec", [None, "kivi"])
def test_many_turns_do_not_become_many_parts(codec) -> None:
    model = llama()
    store = PrefixStore(ROOM, cache=None if codec is None else lambda m: KVCache(m, codec=KIVI(4, residual_length=0)))
    ids = prompt(0)
    for n in range(1, 13):
        shared = store.get(model, ids)  # of a codec, a conversation that never left its cache is the one to equal
        expected = cold(model, ids) if codec is None else model.generate(ids, past_key_values=shared, **ARGUMENTS)
        ours = store.generate(model, ids, **ARGUMENTS)
        assert torch.equal(ours, expected)
        ids = torch.cat([ours, QUESTIONS[n % 8 : n % 8 + 1].roll(n, 1)], dim=1)
    cache = store.get(model, ids)
    assert cache.get_seq_length() == ids.shape[1] - 13
    assert max(len(layer.segments.sealed) for layer in cache.kv_layers) <= (5 if codec is None else 7)
    assert store.nbytes == sum(held_by(store).values())


@pytest.mark.parametrize(
    "kwargs",
    [
        dict(num_beams=3),
        dict(num_beams=4, num_return_sequences=2, return_dict_in_generate=True),
        dict(do_sample=True, num_return_sequences=3, top_k=20),
        dict(prompt_lookup_num_tokens=3),
        dict(prefill_chunk_size=16),
        dict(repetition_penalty=1.3, max_length=95, max_new_tokens=None),
    ],
    ids=["beams", "beams-return", "samples", "lookup", "chunks", "penalty"],
)
@pytest.mark.parametrize("make", [llama, gemma3], ids=["llama", "gemma3"])
def test_ways_to_generate(make, kwargs) -> None:
    model = make()
    store = PrefixStore(ROOM)
    for n in range(3):
        torch.manual_seed(5)
        expected = cold(model, prompt(n), **kwargs)
        torch.manual_seed(5)
        ours = store.generate(model, prompt(n), **(ARGUMENTS | kwargs))
        if kwargs.get("return_dict_in_generate"):
            ours, expected = ours.sequences, expected.sequences
        assert torch.equal(ours, expected)
    if "prompt_lookup_num_tokens" in kwargs or not store.stats()["hits"]:  # transformers would feed the prefix again
        assert store.stats()["hits"] == 0
        for _ in range(2):
            assert torch.equal(store.generate(model, prompt(0), **ARGUMENTS), cold(model, prompt(0)))
    assert store.stats()["hits"] >= 1


def padded(lengths=(82, 76, 79)):
    ids = torch.zeros(len(lengths), 82, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, 82 - length :] = prompt(row)[0, :length]
    return ids, (ids != 0).long()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kwargs", [dict(), dict(num_beams=2)], ids=["greedy", "beams"])
@pytest.mark.parametrize("lengths", [(82, 76, 79), (80, 80, 72), (82, 82, 82)], ids=["padded", "all padded", "full"])
@pytest.mark.parametrize("make", [llama, gemma3], ids=["llama", "gemma3"])
def test_rows_of_a_batch_share_the_prefix(make, lengths, kwargs, attention) -> None:
    model = make()
    model.set_attn_implementation(attention)
    ids, mask = padded(lengths)
    expected = cold(model, ids, attention_mask=mask, **kwargs)
    store = PrefixStore(ROOM)
    shares = make is llama or lengths == (82, 82, 82)
    for again in range(2):
        if shares:
            ours = store.generate(model, {"input_ids": ids, "attention_mask": mask}, **(ARGUMENTS | kwargs))
        elif not again:
            with pytest.warns(RuntimeWarning, match="counts padding"):
                ours = store.generate(model, {"input_ids": ids, "attention_mask": mask}, **(ARGUMENTS | kwargs))
        assert torch.equal(ours, expected)
    if shares:
        assert store.stats()["tokens_saved"] >= 70 * 3
        assert store.get(model, prompt(5)).get_seq_length() == 70


def test_padding_in_get_is_refused(model) -> None:
    ids, mask = padded()
    store = PrefixStore(ROOM)
    with pytest.raises(ValueError, match="store.generate"):
        store.get(model, ids, mask)
    cache = KVCache(model)
    model(ids, attention_mask=mask, past_key_values=cache)
    with pytest.raises(ValueError, match="padding"):
        store.put(model, ids, cache)


# ---------------------------------------------------------------------- bytes


def test_rows_and_caches_share_one_copy(model) -> None:
    store = PrefixStore(ROOM)
    store.warm(model, SYSTEM)
    alone = store.nbytes
    ids = torch.cat([SYSTEM.expand(8, -1), QUESTIONS], dim=1)
    caches = [store.get(model, ids) for _ in range(3)]
    for cache in caches:
        cold(model, ids, lambda m, cache=cache: cache)
        prefix = [layer.segments.sealed[0].rows.keys for layer in cache.kv_layers]
        assert all(keys.shape[0] == 1 for keys in prefix), "eight rows hold it once"
        assert set(held_by(store)) <= set(storages(*(layer.segments for layer in cache.kv_layers)))
        private = sum(layer.segments.tail.nbytes for layer in cache.kv_layers)
        assert cache.nbytes == alone + private
    together = storages(*(layer.segments for cache in caches for layer in cache.kv_layers))
    assert sum(together.values()) == alone + 3 * private
    assert store.nbytes == alone == sum(held_by(store).values())
    beams = store.get(model, prompt(0))
    cold(model, prompt(0), lambda m: beams, num_beams=4)
    assert all(layer.segments.sealed[0].rows.keys.shape[0] == 1 for layer in beams.kv_layers)


def test_bytes_are_counted_once_whatever_is_split(model) -> None:
    store = PrefixStore(ROOM)
    for n in (0, 1, 2, 1, 0):
        store.generate(model, prompt(n), **ARGUMENTS)
        store.generate(model, prompt(n)[:, :40], **ARGUMENTS)
        assert store.nbytes == sum(held_by(store).values())


def test_the_leaf_used_longest_ago_goes_first(model) -> None:
    store = PrefixStore(ROOM)
    store.warm(model, SYSTEM, pin=False)
    for n in range(3):
        store.generate(model, prompt(n), **ARGUMENTS)
    gc.collect()
    store.get(model, prompt(0))
    full = store.nbytes
    gc.collect()
    store.max_bytes = full - 1
    store.get(model, QUESTIONS[:1] * 0 + 2)  # looks, and so makes room
    assert store.stats()["evictions"] == 1
    assert [store.get(model, prompt(n)).get_seq_length() for n in range(3)] == [81, 70, 81]
    store.max_bytes = 1
    store.get(model, SYSTEM)
    assert store.nbytes == 0 and store.stats()["entries"] == 0
    assert torch.equal(store.generate(model, prompt(0), **ARGUMENTS), cold(model, prompt(0)))


def test_a_part_of_a_run_is_freed(model) -> None:
    """An entry that was cut in two lies in one buffer: what is left of it moves, so that memory really goes down."""
    store = PrefixStore(ROOM)
    store.warm(model, prompt(0), pin=False)
    whole = store.nbytes
    store.pin(model, SYSTEM)
    store.max_bytes = whole - 1
    gc.collect()
    store.get(model, SYSTEM)
    assert store.get(model, prompt(0)).get_seq_length() == 70
    assert store.nbytes == sum(held_by(store).values()) < whole


def test_pinned_entries_stay(model) -> None:
    store = PrefixStore(ROOM)
    store.warm(model, SYSTEM)
    for n in range(4):
        store.generate(model, prompt(n), **ARGUMENTS)
    store.max_bytes = 1
    store.get(model, SYSTEM)
    assert store.stats()["entries"] == 1 and store.stats()["pinned"] == 1
    assert store.get(model, prompt(0)).get_seq_length() == 70
    assert store.pin(model, SYSTEM, pinned=False)
    assert not store.pin(model, prompt(0))
    store.get(model, SYSTEM)
    assert store.nbytes == 0


def test_rows_in_use_live_until_their_cache_goes(model) -> None:
    store = PrefixStore(ROOM)
    expected = cold(model, prompt(1))
    store.generate(model, prompt(0), **ARGUMENTS)
    cache = store.get(model, prompt(1))
    store.max_bytes = 1
    store.get(model, SYSTEM)
    assert store.nbytes == 0
    assert torch.equal(cold(model, prompt(1), lambda m: cache), expected)


# ---------------------------------------------------------------------- codecs and states


@pytest.mark.parametrize("codec", ["rotated-4", "kivi-4", "float8"])
def test_prefix_codec_and_beams(codec) -> None:
    """The same cache that read the prefix in a call of its own, without a store, gives the same text."""
    model = llama().double()
    make = lambda m: KVCache(m, codec=copy.deepcopy(CODECS[codec]))  # noqa: E731
    store = PrefixStore(ROOM, cache=make)
    system = torch.cat([SYSTEM, SYSTEM.flip(1)], dim=1)
    store.warm(model, system)
    for n in range(3):
        ids = torch.cat([system, QUESTIONS[n : n + 1]], dim=1)
        plain = make(model)
        with torch.no_grad():
            model(system, past_key_values=plain)
        plain.batch_repeat_interleave(4)
        expected = cold(model, ids, lambda m, plain=plain: plain, num_beams=4, max_new_tokens=40)
        assert torch.equal(store.generate(model, ids, **(ARGUMENTS | dict(num_beams=4, max_new_tokens=40))), expected)
    assert store.stats()["tokens_saved"] == 3 * 4 * 140
    shared = [store.get(model, torch.cat([system, QUESTIONS[n : n + 1]], dim=1)) for n in range(2)]
    codes = [{t.data_ptr() for la in c.kv_layers for t in la.segments.shared_tensors} for c in shared]
    assert codes[0] == codes[1] and codes[0]
    assert store.nbytes == sum(held_by(store).values())


CODECS = {
    "kivi-4": KIVI(nbits=4, residual_length=16),
    "rotated-4": Rotated(nbits=4, residual_length=16),
    "float8": Float8(residual_length=16),
}


@pytest.mark.parametrize("rows", [1, 3])
def test_codec_entries_begin_where_texts_branch(rows) -> None:
    model = llama()
    store = PrefixStore(ROOM, cache=lambda m: QuantizedKIVICache(m, nbits=4, residual_length=16))
    for n in range(3):
        ids = torch.cat([prompt(n + row) for row in range(rows)])
        assert store.generate(model, ids, min_new_tokens=8, **ARGUMENTS).shape == (rows, 90)
    assert store.stats()["hits"] == (1 if rows == 1 else 2)
    assert store.stats()["tokens_saved"] == 70 * rows * store.stats()["hits"]


def test_layers_that_cannot_be_cut_say_so() -> None:
    model = gemma3()
    store = PrefixStore(ROOM)
    cache = store.get(model, prompt(0))
    answer = cold(model, prompt(0), lambda m: cache)
    with pytest.raises(ValueError, match="DynamicSlidingWindowLayer"):
        store.put(model, prompt(0), cache)
    assert store.put(model, answer, cache) == answer.shape[1] - 1
    assert store.get(model, prompt(0)).get_seq_length() == 0
    assert store.get(model, answer).get_seq_length() == answer.shape[1] - 1


def test_a_template_of_another_model_is_refused(model) -> None:
    store = PrefixStore(ROOM, cache=KVCache(model, codec="kivi-4"))
    assert store.get(model, prompt(0)).codec is not None
    with pytest.raises(ValueError, match="another model"):
        store.get(llama(seed=1), prompt(0))


# ---------------------------------------------------------------------- refusals


def test_caches_that_drop_are_refused(model) -> None:
    with pytest.raises(ValueError, match="drops tokens"):
        PrefixStore(ROOM, cache=SnapKVCache(model, 12, window_size=4))
    store = PrefixStore(ROOM, cache=lambda m: SlidingWindowCache(m, 8))
    with pytest.raises(ValueError, match="SlidingWindowCache drops tokens"):
        store.get(model, prompt(0))
    with pytest.raises(ValueError, match="drops tokens"):
        PrefixStore(ROOM).put(model, prompt(0), SnapKVCache(model, 12, window_size=4))


@pytest.mark.parametrize("arguments", [dict(max_bytes=0), dict(max_bytes=1.5), dict(max_bytes=None)])
def test_bad_arguments(arguments) -> None:
    with pytest.raises(ValueError, match="max_bytes"):
        PrefixStore(**arguments)


def test_bad_use(model) -> None:
    store = PrefixStore(ROOM)
    with pytest.raises(ValueError, match="input_ids"):
        store.get(model, "text")
    with pytest.raises(ValueError, match="caches of this library"):
        store.put(model, prompt(0), DynamicCache())
    with pytest.raises(ValueError, match="batch rows"):
        cache = KVCache(model)
        model(prompt(0).expand(2, -1), past_key_values=cache)
        store.put(model, torch.cat([prompt(n) for n in range(3)]), cache)
    with pytest.raises(ValueError, match="position_ids"):
        store.generate(model, prompt(0), position_ids=torch.arange(82)[None])
    with pytest.raises(ValueError, match="must be empty"):
        PrefixStore(ROOM, cache=cache)
    with pytest.raises(ValueError, match="model itself"):
        store.get(model.config, prompt(0))


# ---------------------------------------------------------------------- keys


def test_other_weights_precision_and_technique_share_nothing(model) -> None:
    store = PrefixStore(ROOM)
    store.warm(model, SYSTEM)
    assert store.get(model, prompt(0)).get_seq_length() == 70
    assert store.get(llama(seed=1), prompt(0)).get_seq_length() == 0
    assert store.get(llama().to(torch.bfloat16), prompt(0)).get_seq_length() == 0
    assert store.get(llama(rope_theta=77.0), prompt(0)).get_seq_length() == 0
    assert store.get(llama(), prompt(0)).get_seq_length() == 70, "the same weights again"
    assert store.get(llama().train(), prompt(0)).get_seq_length() == 0
    other = llama()
    other.set_attn_implementation("eager")
    assert store.get(other, prompt(0)).get_seq_length() == 0
    with torch.autocast("cpu", torch.bfloat16):
        assert store.get(model, prompt(0)).get_seq_length() == 0
    store._make = lambda m: KVCache(m, codec="kivi-4")
    assert store.get(model, prompt(0)).get_seq_length() == 0


def test_rows_of_weights_that_changed_are_refused(model) -> None:
    store = PrefixStore(ROOM)
    cache = store.get(model, prompt(0))
    cold(model, prompt(0), lambda m: cache)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    with pytest.raises(ValueError, match="other weights"):
        store.put(model, prompt(0), cache)


def test_adapters_share_nothing() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    model = peft.get_peft_model(llama(), config).eval()
    model.add_adapter("second", config)
    store = PrefixStore(ROOM)
    expected = {}
    for name in ("default", "second"):
        model.set_adapter(name)
        expected[name] = cold(model.get_base_model(), prompt(0))
        found = store.stats()["hits"]
        assert torch.equal(store.generate(model, prompt(0), **ARGUMENTS), expected[name])
        assert store.stats()["hits"] == found
    assert not torch.equal(*expected.values())
    with model.disable_adapter():
        assert store.get(model, prompt(0)).get_seq_length() == 0
    model.set_adapter("default")
    assert store.get(model, prompt(0)).get_seq_length() == 81
    # One number of one adapter, which no sample of the weights holds.
    weight = model.get_base_model().model.layers[0].self_attn.q_proj.lora_A["default"].weight
    with torch.no_grad():
        weight[1, 5] += 0.5
    assert store.get(model, prompt(0)).get_seq_length() == 0


# ---------------------------------------------------------------------- threads


def test_eight_threads_get_put_and_evict() -> None:
    model = llama()
    expected = {n: cold(model, prompt(n)) for n in range(8)}
    room = PrefixStore(ROOM)
    for n in range(3):
        room.generate(model, prompt(n), **ARGUMENTS)
    store = PrefixStore(room.nbytes)
    store.get(model, prompt(0))  # attaches the model
    wrong: list[object] = []

    def work(seed):
        choice = random.Random(seed)
        try:
            for turn in range(25):
                n = choice.randrange(8)
                if turn % 5 == 4:
                    cache = store.get(model, prompt(n))
                    ours = model.generate(prompt(n), past_key_values=cache, **ARGUMENTS)
                    store.put(model, ours, cache)
                elif turn % 7 == 6:
                    ours = expected[n]
                    store.pin(model, SYSTEM, pinned=choice.random() < 0.5)
                else:
                    ours = store.generate(model, prompt(n), **ARGUMENTS)
                if not torch.equal(ours, expected[n]):
                    wrong.append(n)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    found = store.stats()
    assert found["hits"] > 0 and found["evictions"] > 0
    assert store.nbytes == sum(held_by(store).values())
    store.pin(model, SYSTEM, pinned=False)
    store.max_bytes = 1
    store.get(model, SYSTEM)
    assert store.nbytes == 0 and not store._tree._held


# ---------------------------------------------------------------------- other layers, images


@pytest.fixture(scope="module", params=TYPES)
def hybrid(request):
    return build(request.param)


@pytest.mark.parametrize("kwargs", [dict(), dict(num_beams=2)], ids=["greedy", "beams"])
@pytest.mark.parametrize("rows", [1, 2])
def test_recurrent_states_are_found_at_ends_of_entries(hybrid, rows, kwargs, tmp_path) -> None:
    store = PrefixStore(ROOM, path=tmp_path)
    if hybrid.config.model_type == "jamba":
        with pytest.raises(NotImplementedError, match="in two parts"):
            store.get(hybrid, SYSTEM)
        return
    for turn in range(3):
        ids = torch.cat([prompt(turn + row) for row in range(rows)])
        assert torch.equal(store.generate(hybrid, ids, **ARGUMENTS, **kwargs), cold(hybrid, ids, **kwargs))
    assert store.stats()["hits"] >= 1 and store.stats()["tokens_saved"] >= 70 * rows
    assert store.nbytes == sum(held_by(store).values())
    again = PrefixStore(ROOM, path=tmp_path)
    ids = torch.cat([prompt(5 + row) for row in range(rows)])
    assert torch.equal(again.generate(hybrid, ids, **ARGUMENTS, **kwargs), cold(hybrid, ids, **kwargs))
    assert again.stats()["tokens_saved"] >= 70 * rows


def llava():
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    torch.manual_seed(0)
    sizes = dict(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.3
    )
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(image_size=16, patch_size=8, projection_dim=32, **sizes),
        text_config=LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes),
        image_token_index=63,
    )
    model = LlavaForConditionalGeneration(config).eval()
    model.generation_config.pad_token_id = 0
    return model


def test_equal_placeholders_of_different_images_never_match() -> None:
    model = llava()
    images = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(4))
    ids = [prompt(n).clamp(max=62) for n in range(3)]
    for each in ids:
        each[:, 20:24] = 63  # four patches
    store = PrefixStore(ROOM)
    saved = []
    for image, n in ((0, 0), (0, 1), (1, 0), (1, 2), (0, 2)):
        pixels = images[image : image + 1]
        expected = cold(model, ids[n], pixel_values=pixels)
        before = store.stats()["tokens_saved"]
        ours = store.generate(model, {"input_ids": ids[n], "pixel_values": pixels}, **ARGUMENTS)
        assert torch.equal(ours, expected)
        saved.append(store.stats()["tokens_saved"] - before)
    assert saved == [0, 70, 0, 70, 70]
    # A prefix that ends among the placeholders is cut before the first of them.
    other = ids[0].clone()
    other[:, 22] = 5
    other[:, 30] = 63
    pixels = images[:1]
    before = store.stats()["tokens_saved"]
    ours = store.generate(model, {"input_ids": other, "pixel_values": pixels}, **ARGUMENTS)
    assert torch.equal(ours, cold(model, other, pixel_values=pixels))
    assert store.stats()["tokens_saved"] - before == 20
    with pytest.raises(ValueError, match="pixel_values"):
        store.get(model, torch.cat(ids), pixel_values=images)
    with pytest.warns(RuntimeWarning, match="pixel_values"):
        both = dict(input_ids=torch.cat(ids[:2]), pixel_values=images)
        assert torch.equal(store.generate(model, both, **ARGUMENTS), cold(model, both.pop("input_ids"), **both))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_that_change_with_length_are_not_mixed(kind) -> None:
    """Beyond the length they were made for, such models turn all keys of a text differently."""
    scaling = dict(rope_type=kind, rope_theta=10000.0, factor=4.0)
    if kind == "longrope":
        scaling |= dict(short_factor=[1.0] * 4, long_factor=[3.0] * 4, original_max_position_embeddings=80)
    model = llama(rope_parameters=scaling, max_position_embeddings=320 if kind == "longrope" else 80)
    store = PrefixStore(ROOM)
    for ids in (SYSTEM, prompt(0), SYSTEM, prompt(1)):
        new = dict(max_new_tokens=5)
        assert torch.equal(store.generate(model, ids, **(ARGUMENTS | new)), cold(model, ids, **new))
    assert store.stats()["tokens_saved"] == 69


def test_models_whose_prefix_depends_on_what_follows_are_refused() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    small = dict(d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=32)
    with pytest.raises(NotImplementedError, match="encoder"):
        PrefixStore(ROOM).get(T5ForConditionalGeneration(T5Config(**small)), prompt(0))


def test_inference_mode(model) -> None:
    store = PrefixStore(ROOM)
    expected = cold(model, prompt(1))
    with torch.inference_mode():
        store.generate(model, prompt(0), **ARGUMENTS)
    assert torch.equal(store.generate(model, prompt(1), **ARGUMENTS), expected)
    cache = store.get(model, prompt(2))
    logits = model(prompt(2)[:, 70:], past_key_values=cache).logits
    logits.sum().backward()
    assert store.stats()["tokens_saved"] == 140


@pytest.mark.parametrize("name", ["prefix_questions", "prefix_training"])
def test_examples(name, capsys) -> None:
    if name == "prefix_training":
        pytest.importorskip("peft")
    module = importlib.import_module(name)
    if name == "prefix_questions":
        store = module.main(["--tiny", "--context-tokens", "200", "--max-new-tokens", "3"])
        assert "another answer" not in capsys.readouterr().out
        assert store.stats()["misses"] == 0 and store.stats()["tokens_saved"] >= 4 * 200 + 4 * 200
    else:
        exact, approximate = module.main(["--tiny", "--steps", "2", "--template-tokens", "64"])
        assert exact["exact"] and not approximate["exact"]
        assert exact["largest gap of losses"] < 1e-4
