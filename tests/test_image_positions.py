"""Windows whose first tokens stay in place, and models that give images positions on a grid (M-RoPE)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from test_storage import IDS, MASK, llama, turn
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

from hf_kvcache import HeavyHitterCache, KVCache, SlidingWindowCache, SnapKVCache, load
from hf_kvcache.policies import SlidingWindow
from video_frames import FrameWindow, Stream, TinyScene, Watcher

WINDOW, SINKS, LENGTH = 10, 3, 44
TOKENS = torch.arange(2 * LENGTH).view(2, LENGTH) * 5 % 60 + 1
REAL = torch.ones(2, LENGTH, dtype=torch.bool)
REAL[1, :7] = False
# Two prompts, the second on a full window, then single tokens.
PIECES = [18, 8, *[1] * 12, 4, 1, 1]


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3)
    return GPT2LMHeadModel(GPT2Config(**sizes)).eval()


@torch.no_grad()
def through(model: Any, cache: Any, keep: Any = None) -> torch.Tensor:
    """Last logits `[pieces, 2, vocabulary]`; `keep(seen)` says which of the tokens so far a stock cache shall see."""
    seen, logits = 0, []
    for size in PIECES:
        stop = seen + size
        mask = REAL[:, :stop].clone()
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, seen:]
        if keep is not None:
            mask[:, :seen] &= keep(seen)
        piece = TOKENS[:, seen:stop]
        output = model(piece, attention_mask=mask.long(), position_ids=positions, past_key_values=cache)
        logits.append(output.logits[:, -1])
        seen = stop
    assert seen == LENGTH
    return torch.stack(logits)


def sinks_and_window(seen: int) -> torch.Tensor:
    first = REAL[:, :seen].cumsum(-1) <= SINKS
    return first | (torch.arange(seen) >= seen - WINDOW)


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_sinks_that_stay_equal_the_full_cache_with_the_rest_masked(make, attention) -> None:
    """Padded rows, two prompts, single tokens. Also where positions cannot be moved."""
    model = make()
    model.set_attn_implementation(attention)
    expected = through(model, DynamicCache(config=model.config), sinks_and_window)
    cache = SlidingWindowCache(model, WINDOW, num_sink_tokens=SINKS, move_sinks=False)
    torch.testing.assert_close(through(model, cache), expected, rtol=1e-4, atol=1e-4)
    assert cache.kept_length() == WINDOW + SINKS
    everything = through(model, DynamicCache(config=model.config))
    assert (everything - expected).abs().max() > 0.01
    if make is llama:  # with sinks that move it is something else
        moved = through(model, SlidingWindowCache(model, WINDOW, num_sink_tokens=SINKS))
        assert (moved - expected).abs().max() > 0.01


def test_bytes_and_what_the_cache_says() -> None:
    model = llama()
    moved, still = (SlidingWindowCache(model, WINDOW, SINKS, move_sinks=move) for move in (True, False))
    for cache in (moved, still):
        with torch.no_grad():
            model(TOKENS, past_key_values=cache)
        assert cache.nbytes == cache.expected_bytes(model.config, 2, LENGTH)
    assert moved.nbytes == still.nbytes
    assert "move_sinks=False" in repr(still) and "move_sinks" not in repr(moved)
    with pytest.raises(ValueError, match="`move_sinks` must be True or False, got 1"):
        SlidingWindow(8, 2, move_sinks=1)  # type: ignore[arg-type]


def test_operations_and_files(tmp_path) -> None:
    model = llama()
    path = str(tmp_path / "cache.safetensors")
    cache = SlidingWindowCache(model, WINDOW, SINKS, move_sinks=False)
    first = turn(model, cache, IDS, MASK)
    cache.save(path)
    history = torch.cat([first, IDS[:, :5]], dim=1)
    mask = torch.cat([MASK, torch.ones(3, history.shape[1] - 20, dtype=torch.long)], dim=1)
    copies = [copy.deepcopy(cache), load(path, model)]
    expected = turn(model, cache, history, mask)
    for other in copies:
        assert other.policy.move_sinks is False
        assert torch.equal(turn(model, other, history, mask), expected)
    with pytest.raises(ValueError, match="move_sinks"):
        SlidingWindowCache(model, WINDOW, SINKS).load(path)


@pytest.fixture(scope="module")
def scene() -> TinyScene:
    return TinyScene("qwen2_vl", 6, "cpu")


def test_positions_over_images_are_refused_where_sinks_would_move(scene) -> None:
    with pytest.raises(NotImplementedError, match="M-RoPE.*Pass move_sinks=False"):
        SlidingWindowCache(scene.model, WINDOW)
    SlidingWindowCache(TinyScene("smolvlm", 1, "cpu").model, WINDOW)  # its positions count tokens


def test_moved_sinks_would_be_wrong_there(scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why they are refused: sinks would move past the window, because a frame of 14 tokens has 6 positions."""
    monkeypatch.setattr("hf_kvcache.rope._refuse_positions_over_images", lambda model: None)
    furthest = {}
    for move in (True, False):
        cache = SlidingWindowCache(scene.model, 28, num_sink_tokens=6, move_sinks=move)
        watcher = Watcher(scene.model, cache, None, compare=True)
        watcher.feed(scene.opening())
        for ids, frame in scene.frames():
            _, far = watcher.feed(ids, **frame)
        furthest[move] = far["masked"]
    assert furthest[False] < 1e-4 and furthest[True] > 0.1


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_positions_fed_piece_by_piece_are_those_of_one_pass(scene, attention) -> None:
    """All frames in one call, with the positions the model finds by itself, against one call for each."""
    model = scene.model
    model.set_attn_implementation(attention)
    frames = list(scene.frames())
    question = scene.question("what is there?")
    ids = torch.cat([scene.opening(), *(ids for ids, _ in frames), question], dim=1)
    whole = model(
        input_ids=ids,
        pixel_values=torch.cat([frame["pixel_values"] for _, frame in frames]),
        image_grid_thw=torch.cat([frame["image_grid_thw"] for _, frame in frames]),
        mm_token_type_ids=(ids == 60).int(),
    ).logits[:, -1]
    for cache in (
        DynamicCache(config=model.config),
        KVCache(model),
        KVCache(model, policy=FrameWindow(6)),
        SlidingWindowCache(model, 200, move_sinks=False),
        SnapKVCache(model, max_capacity_prompt=200),
        HeavyHitterCache(model, heavy_size=100, recent_size=100),
    ):
        policy = getattr(cache, "policy", None)
        stream = Stream(model, cache, policy if isinstance(policy, FrameWindow) else None)
        stream.feed(scene.opening())
        for part, frame in frames:
            stream.feed(part, **frame)
        torch.testing.assert_close(stream.feed(question), whole.float(), rtol=1e-4, atol=1e-4)
    model.set_attn_implementation("sdpa")


def test_whole_frames_are_dropped_and_text_stays(scene) -> None:
    policy = FrameWindow(2)
    cache = KVCache(scene.model, policy=policy)
    watcher = Watcher(scene.model, cache, policy, compare=False)
    watcher.feed(scene.opening())
    text = list(range(6))
    for number, (ids, frame) in enumerate(scene.frames(), start=1):
        watcher.feed(ids, **frame)
        start = cache.get_seq_length()
        watcher.answer(scene.question("and?"), 2)
        text += range(start, cache.get_seq_length())
        newest = [n for span in policy.spans[-2:] for n in range(*span)]
        expected = sorted(text + newest)
        assert cache.kept_positions(0)[0, 0].tolist() == expected, number
        assert cache.kept_positions(1)[0, 1].tolist() == expected
