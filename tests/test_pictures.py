"""Pictures: that they are drawn from what caches hold, and what is said where they cannot be."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from example_tools import tiny
from hf_kvcache import (
    CPUOffloadedCache,
    CrossLayerSharedCache,
    HeavyHitterCache,
    KVCache,
    QuantizedKIVICache,
    SlidingWindowCache,
    SnapKVCache,
)
from hf_kvcache.evaluate import plot
from hf_kvcache.pictures import MemoryRecorder, MemoryRow, _share_of, plot_decode_time, plot_memory

pytest.importorskip("matplotlib")
TOKENS, PAD, NEW = 120, 20, 4
IDS = (torch.arange(TOKENS) * 7 % 250).expand(2, -1)
MASK = torch.ones_like(IDS).index_fill(1, torch.arange(PAD), 0)
MASK[0] = 1  # the second row is padded


@pytest.fixture(scope="module")
def model():
    return tiny()[0]


def run(model, cache, **extra):
    return model.generate(
        IDS, attention_mask=MASK, past_key_values=cache, max_new_tokens=NEW, do_sample=False, **extra
    )  # fmt: skip


def read(path: Path) -> torch.Tensor:
    """A PNG as `[height, width, 4]`."""
    from matplotlib.image import imread

    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    return torch.from_numpy(imread(path))


def has_colour(image: torch.Tensor, colour: str, least: int = 20) -> bool:
    """Whether so many pixels have this colour."""
    wanted = torch.tensor([int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)])
    return int(((image[..., :3] - wanted).abs() < 0.01).all(-1).sum()) >= least


CACHES = {
    "identity": lambda model: KVCache(model),
    "window": lambda model: SlidingWindowCache(model, 30),
    "snapkv": lambda model: SnapKVCache(model, max_capacity_prompt=40, window_size=8),
    "adaptive": lambda model: SnapKVCache(model, max_capacity_prompt=40, window_size=8, adaptive_heads=True),
    "h2o": lambda model: HeavyHitterCache(model, heavy_size=20, recent_size=20),
    "kivi": lambda model: QuantizedKIVICache(model, nbits=4, residual_length=32),
    "shared": lambda model: CrossLayerSharedCache(model, 2),
    "offloaded": lambda model: CPUOffloadedCache(model, resident_length=32),
}


@pytest.mark.parametrize("name", CACHES)
def test_kept_positions_are_drawn(model, name, tmp_path: Path) -> None:
    cache = CACHES[name](model)
    run(model, cache)
    images = []
    for row in (0, 1):
        cache.plot_kept(tmp_path / f"{row}.png", batch_row=row)
        images.append(read(tmp_path / f"{row}.png"))
        assert images[-1].shape[1] == 1300
    assert not torch.equal(*images)
    grey = "#bfbfbf"  # padding
    assert has_colour(images[1], grey, 1000) and not has_colour(images[0], grey, 1000)


def test_a_long_sequence_is_drawn_in_shares(model, tmp_path: Path) -> None:
    cache = KVCache(model)
    model(torch.arange(1300)[None] % 250, past_key_values=cache)
    cache.plot_kept(tmp_path / "kept.png")
    assert has_colour(read(tmp_path / "kept.png"), "#08306b", 1000)  # the dark end of the scale


def test_shares_are_of_the_positions_between_two_edges() -> None:
    positions = torch.tensor([[-1, 0, 1, 5], [2, 3, 4, 5]], dtype=torch.int32)
    edges = torch.tensor([0, 2, 6])
    assert _share_of(positions, edges).tolist() == [[1.0, 0.25], [0.0, 1.0]]


def test_nothing_to_draw(model, tmp_path: Path) -> None:
    cache = SnapKVCache(model, max_capacity_prompt=40, window_size=8)
    with pytest.raises(ValueError, match="the cache is empty"):
        cache.plot_kept(tmp_path / "kept.png")
    run(model, cache)
    with pytest.raises(ValueError, match="must be 0 to 1, got 2"):
        cache.plot_kept(tmp_path / "kept.png", batch_row=2)
    with pytest.raises(ValueError, match="nothing was recorded"):
        plot_memory({"snapkv": MemoryRecorder(cache)}, tmp_path / "memory.png")
    with pytest.raises(ValueError, match="nothing to draw"):
        plot_decode_time([], tmp_path / "time.png")
    assert not list(tmp_path.iterdir())


def test_without_matplotlib(model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KVCache(model)
    run(model, cache)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "matplotlib" else found(name))
    rows = [MemoryRow(1, 1, 1, 1, 1)]
    for draw in (
        lambda path: cache.plot_kept(path),
        lambda path: plot_memory({"kv": rows}, path),
        lambda path: plot_decode_time([{"cache": "kv", "tokens": 1, "ms": 1.0}], path),
    ):
        with pytest.raises(ImportError, match=r"pip install 'hf-kvcache\[eval\]'"):
            draw(tmp_path / "picture.png")


@pytest.mark.parametrize("name", ["stock", *CACHES])
def test_memory_is_recorded_at_each_step(model, name, tmp_path: Path) -> None:
    cache = DynamicCache(config=model.config) if name == "stock" else CACHES[name](model)
    recorder = MemoryRecorder(cache)
    expected = run(model, DynamicCache(config=model.config))
    output = run(model, cache, stopping_criteria=[recorder])
    assert output.shape == expected.shape  # it stops nothing
    if name in ("stock", "identity", "offloaded"):
        assert torch.equal(output, expected)
    assert [row.seen for row in recorder.rows] == [TOKENS + n for n in range(NEW)]
    config = model.config
    a_token = 2 * config.num_key_value_heads * config.head_dim * 4 * config.num_hidden_layers
    assert [row.full_bytes for row in recorder.rows] == [2 * a_token * (TOKENS + n) for n in range(NEW)]
    last = recorder.rows[-1]
    assert last.nbytes == (last.full_bytes if name == "stock" else cache.nbytes)
    if name in ("window", "snapkv", "adaptive", "h2o"):
        assert last.kept < 70 and last.nbytes < 0.6 * last.full_bytes
    assert (last.device_bytes < last.nbytes) == (name == "offloaded")
    plot_memory({name: recorder, "again": recorder.rows}, tmp_path / "memory.png")
    image = read(tmp_path / "memory.png")
    assert has_colour(image, plot.COLOURS[1]) and has_colour(image, plot.COLOURS[2])


def test_recording_with_beams_and_drafts(model) -> None:
    for extra in (dict(num_beams=2), dict(prompt_lookup_num_tokens=3)):
        cache = KVCache(model)
        recorder = MemoryRecorder(cache)
        model.generate(IDS[:1], attention_mask=MASK[:1], past_key_values=cache, max_new_tokens=NEW,
                       do_sample=False, stopping_criteria=[recorder], **extra)  # fmt: skip
        assert recorder.rows and recorder.rows[-1].seen >= TOKENS


def test_decode_times_are_drawn(tmp_path: Path) -> None:
    rows = [
        {"cache": f"cache {n}", "tokens": tokens, "ms": 10 + n * tokens / 512}
        for n in range(9)
        for tokens in (2048, 512, 1024)
    ]
    plot_decode_time(rows, tmp_path / "time.png", "a model")
    image = read(tmp_path / "time.png")
    assert all(has_colour(image, colour) for colour in plot.COLOURS)
    plot_decode_time(rows[:1], tmp_path / "one.png")
    assert has_colour(read(tmp_path / "one.png"), plot.COLOURS[0], 5)


def test_kinds_of_the_pareto_plot_differ_in_marker_and_colour(tmp_path: Path) -> None:
    caches = [
        {"spec": spec, "bits_per_element": 2.0 + n, "bytes_at_end": 0.1 + n / 10, "kl": 0.1 / (n + 1)}
        for n, spec in enumerate(["kivi:nbits=2", "rotated:nbits=2", "snapkv:max_capacity_prompt=0.5", "float8"])
    ]
    result = {
        "caches": caches,
        "arguments": dict(prompt=10, tokens=2, windows=1, texts=["topics"]),
        "model": {"name": "tiny", "dtype": "float32"},
    }
    plot.pareto(result, tmp_path / "pareto.png")
    image = read(tmp_path / "pareto.png")
    assert all(has_colour(image, colour) for colour in plot.COLOURS[:4])
