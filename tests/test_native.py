"""The native CPU kernels against the reference, on awkward lengths, in buffers whose slack is NaN."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hf_kvcache.ops import native
from hf_kvcache.ops.decode_attention import reference
from hf_kvcache.ops.packed import Format, Packed
from hf_kvcache.ops.quantize_pack.reference import quantize_pack

needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in (os.environ.get("CXX") or "c++", "g++", "clang++")), reason="no compiler"
)
GROUP = {8: 8, 24: 8, 64: 32, 80: 16, 128: 32}  # channels of a group
# Of the norm. Queries of 32 bits are taken exactly but for codebooks, whose levels become 16-bit integers.
EXACT, CODEBOOK, ROUNDED = 1e-5, 3e-4, 2e-3


@pytest.fixture(scope="module")
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The user's own cache stays as it is; everything in this file is built once."""
    patch = pytest.MonkeyPatch()
    home = tmp_path_factory.mktemp("cache")
    patch.setenv("XDG_CACHE_HOME", str(home))
    patch.delenv("HF_KVCACHE_NATIVE", raising=False)
    was, off = native._library, native._off
    yield home
    native._library, native._off = was, off
    patch.undo()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors here are small: waking threads would take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def kernels(cache_home: Path) -> None:
    native.enable()


def make_format(bits: int, kind: str, axis: str, group: int) -> Format:
    levels = None
    if kind == "codebook":
        levels = tuple(torch.linspace(-2.0, 2.2, 2**bits).sinh().tolist())  # uneven, not symmetric
    return Format(bits, axis, group, kind, levels)


def formats(dim: int) -> Iterator[Format]:
    for axis, groups in (("channel", (32, 64)), ("token", (GROUP[dim], dim))):
        for group in dict.fromkeys(groups):
            for bits in (2, 3, 4, 8):
                for kind in ("affine", "symmetric", "codebook"):
                    yield make_format(bits, kind, axis, group)
            yield make_format(8, "float8", axis, group)


def rows(dim: int, length: int, batch: int = 2, heads: int = 2) -> torch.Tensor:
    """Rows up to the end of the last tile, channels of unlike size and offset."""
    shape = (batch, heads, -(-length // 64) * 64, dim)
    return torch.randn(shape) * (torch.rand(dim) + 0.3) + torch.randn(dim)


def poisoned(packed: Packed, fmt: Format, length: int, role: str) -> Packed:
    """In longer buffers, where what lies beyond the first `length` tokens is NaN (codes: anything)."""
    used = -(-length // fmt.group) if fmt.axis == "channel" else length

    def scales(x: torch.Tensor | None) -> torch.Tensor | None:
        if x is None:
            return None
        buffer = torch.full((*x.shape[:2], x.shape[2] + 3, x.shape[3]), float("nan"), dtype=x.dtype)
        buffer[:, :, :used] = x[:, :, :used]
        return buffer[:, :, : x.shape[2] + 1]

    dim = 2 if role == "keys" else 3
    shape = list(packed.codes.shape)
    shape[dim] += 2
    buffer = torch.randint(0, 256, shape, dtype=torch.uint8)
    buffer.narrow(dim, 0, packed.codes.shape[dim]).copy_(packed.codes)
    scale = scales(packed.scale)
    assert scale is not None
    return Packed(buffer.narrow(dim, 0, shape[dim] - 1), scale, scales(packed.zero))


def error(mine: torch.Tensor, right: torch.Tensor) -> float:
    assert mine.shape == right.shape and mine.dtype == right.dtype == torch.float32
    return ((mine - right).norm() / right.norm()).nan_to_num(1e9).item()


def tolerance(fmt: Format, dtype: torch.dtype) -> float:
    if dtype != torch.float32:
        return ROUNDED
    return CODEBOOK if fmt.kind == "codebook" else EXACT


def compare(fmt: Format, dim: int, length: int, m: int, half: int, dtype: torch.dtype) -> None:
    what = f"{fmt.bits} bits, {fmt.kind}, {fmt.axis} {fmt.group}, D {dim}, N {length}, M {m}, half {half}, {dtype}"
    x = rows(dim, length)
    query = torch.randn(2, 2, m, dim).to(dtype)
    keys = poisoned(quantize_pack(x, fmt, "keys", half), fmt, length, "keys")
    right = reference.packed_logits(query, keys, fmt, length, half)
    assert error(native.packed_logits(query, keys, fmt, length, half), right) < tolerance(fmt, dtype), f"keys: {what}"
    values = poisoned(quantize_pack(x, fmt, "values", half), fmt, length, "values")
    # A part of a wider tensor, as attention hands over: its rows do not lie next to each other.
    probs = torch.softmax(2 * torch.randn(2, 2, m, length + 5), -1)[..., 2 : length + 2]
    right = reference.packed_weighted(probs, values, fmt, dim, half)
    mine = native.packed_weighted(probs, values, fmt, dim, half, dtype)
    assert error(mine, right) < tolerance(fmt, dtype), f"values: {what}"


@needs_compiler
@pytest.mark.parametrize("length", [1, 63, 64, 111, 257, 1000])
@pytest.mark.parametrize("dim", GROUP)
def test_against_reference(kernels: None, dim: int, length: int) -> None:
    torch.manual_seed(dim + length)
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.bfloat16)
    for n, fmt in enumerate(formats(dim)):
        compare(fmt, dim, length, (1, 2, 3, 4, 7)[n % 5], 32, dtypes[(n + length) % 4])


@needs_compiler
@pytest.mark.parametrize("m", [1, 2, 3, 5, 6, 8, 15, 48])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows(kernels: None, m: int, dtype: torch.dtype) -> None:
    """Query heads of a group times new tokens."""
    torch.manual_seed(m)
    for bits in (3, 4):
        for kind, axis in (("affine", "channel"), ("affine", "token"), ("symmetric", "token"), ("codebook", "token")):
            compare(make_format(bits, kind, axis, 32), 64, 111, m, 32, dtype)


@needs_compiler
@pytest.mark.parametrize("half", [16, 8])
def test_smaller_tiles(kernels: None, half: int) -> None:
    torch.manual_seed(half)
    for dim in (24, 64):
        for fmt in formats(dim):
            compare(fmt, dim, 111, 4, half, torch.bfloat16)


@needs_compiler
@pytest.mark.parametrize("group", [4, 8, 16, 96, 128, 1024])
def test_groups_of_tokens(kernels: None, group: int) -> None:
    """A scale for each channel over few tokens, over more than a tile, over more than a page."""
    torch.manual_seed(group)
    for kind in ("affine", "symmetric"):
        fmt = make_format(4, kind, "channel", group)
        x = torch.randn(1, 2, -(-1100 // (64 * group)) * 64 * group, 64)
        query = torch.randn(1, 2, 4, 64).bfloat16()
        probs = torch.softmax(torch.randn(1, 2, 4, 1100), -1)
        keys, values = quantize_pack(x, fmt, "keys"), quantize_pack(x, fmt, "values")
        right = reference.packed_logits(query, keys, fmt, 1100, 32)
        assert error(native.packed_logits(query, keys, fmt, 1100, 32), right) < ROUNDED
        right = reference.packed_weighted(probs, values, fmt, 64, 32)
        assert error(native.packed_weighted(probs, values, fmt, 64, 32, torch.bfloat16), right) < ROUNDED


@needs_compiler
@pytest.mark.parametrize(
    "flags", [["-march=native", "-mno-avx512f"], ["-mavx2", "-mfma", "-mf16c"], ["-O2", "-mno-avx"]], ids=" ".join
)
def test_portable_builds(cache_home: Path, flags: list[str]) -> None:
    """What other processors run. (A processor other than x86 has no such flags.)"""
    try:
        native.enable(flags=flags)
    except RuntimeError as problem:
        assert "could not compile" in str(problem)
        pytest.skip("the compiler does not know these flags")
    if "-mavx2" in flags and torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("the processor has no AVX2")
    try:
        torch.manual_seed(0)
        for dim, length, m, half in ((24, 111, 3, 16), (128, 257, 5, 32)):
            for fmt in formats(dim):
                compare(fmt, dim, length, m, half, torch.float32)
    finally:
        native.enable()


@needs_compiler
def test_large_and_threads(kernels: None) -> None:
    """Long enough to be cut into parts; the same on one thread and on several."""
    torch.manual_seed(0)
    before = torch.get_num_threads()
    x = torch.randn(1, 1, 6400, 64)
    fmt = Format(4, "token", 32)
    keys, values = quantize_pack(x, fmt, "keys"), quantize_pack(x, fmt, "values")
    query, probs = torch.randn(1, 1, 8, 64).bfloat16(), torch.softmax(torch.randn(1, 1, 8, 6333), -1)
    results = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            logits = native.packed_logits(query, keys, fmt, 6333, 32)
            results.append((logits, native.packed_weighted(probs, values, fmt, 64, 32, torch.bfloat16)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1])
    right = reference.packed_weighted(probs, values, fmt, 64, 32)
    assert error(results[1][1], right) < ROUNDED


@needs_compiler
def test_extremes(kernels: None) -> None:
    """Rows that nobody sees, constant groups (scale 0), one token that takes all, channels a thousand times larger."""
    torch.manual_seed(0)
    fmt = Format(4, "channel", 32)
    x = torch.randn(1, 2, 640, 64)
    x[..., 5] *= 1000
    x[..., 7] = 3.0
    x[:, :, 64:128] = 0.0
    keys = quantize_pack(x, fmt, "keys")
    query = torch.randn(1, 2, 4, 64).bfloat16()
    query[..., 5] /= 1000
    right = reference.packed_logits(query, keys, fmt, 640, 32)
    assert error(native.packed_logits(query, keys, fmt, 640, 32), right) < ROUNDED
    fmt = Format(4, "token", 32)
    values = quantize_pack(x, fmt, "values")
    probs = torch.zeros(1, 2, 4, 640)
    probs[:, 0, :, 3], probs[:, 1, :, 600] = 1.0, 0.25
    probs[:, :, 2] = 1 / 640
    probs[:, :, 3] = 0.0
    right = reference.packed_weighted(probs, values, fmt, 64, 32)
    mine = native.packed_weighted(probs, values, fmt, 64, 32, torch.bfloat16)
    assert error(mine, right) < ROUNDED
    assert not mine[:, :, 3].any()


@needs_compiler
def test_nothing_to_do(kernels: None) -> None:
    fmt = Format(4, "token", 32)
    keys = quantize_pack(torch.randn(1, 2, 64, 64), fmt, "keys")
    assert native.packed_logits(torch.randn(1, 2, 3, 64), keys, fmt, 0, 32).shape == (1, 2, 3, 0)
    assert native.packed_logits(torch.randn(1, 2, 0, 64), keys, fmt, 64, 32).shape == (1, 2, 0, 64)
    values = quantize_pack(torch.randn(1, 2, 64, 64), fmt, "values")
    assert not native.packed_weighted(torch.zeros(1, 2, 3, 0), values, fmt, 64, 32).any()


@needs_compiler
def test_bad_shapes_are_errors(kernels: None) -> None:
    fmt = Format(4, "token", 32)
    x = torch.randn(1, 2, 128, 64)
    keys, values = quantize_pack(x, fmt, "keys"), quantize_pack(x, fmt, "values")
    query, probs = torch.randn(1, 2, 3, 64), torch.rand(1, 2, 3, 128)
    assert keys.zero is not None

    def bad(match: str, keys: Packed = keys, query: torch.Tensor = query, fmt: Format = fmt, **kwargs: int) -> None:
        sizes = {"length": 128, "half": 32} | kwargs
        with pytest.raises(ValueError, match=match):
            native.packed_logits(query, keys, fmt, **sizes)

    bad("scale have shape", length=129)
    bad("length is -1", length=-1)
    bad("codes of keys have shape", half=16)
    bad("codes of keys have shape", keys._replace(codes=keys.codes[:, :, :1]))
    bad("four dimensions", query=query[0])
    bad("scale have shape", query=query[:, :1])
    bad("no native kernel", query=query.double())
    bad("no native kernel", query=query[..., :30])
    bad("has no zeros", fmt=Format(4, "token", 32, "symmetric"))
    bad("needs zeros", keys._replace(zero=None))
    bad("zero have shape", keys._replace(zero=keys.zero[:, :, :100]))
    bad("float16 on the CPU is needed", keys._replace(scale=keys.scale.float()))
    bad("uint8 on the CPU is needed", keys._replace(codes=keys.codes.int()))
    bad("16 levels, not 2", keys._replace(zero=None), fmt=Format(4, "token", 32, "codebook", (0.0, 1.0)))
    for change in ({"dim": 128}, {"half": 16}, {"probs": probs[0]}, {"probs": torch.rand(1, 2, 3, 129)}):
        arguments = {"probs": probs, "values": values, "fmt": fmt, "dim": 64, "half": 32} | change
        with pytest.raises(ValueError):
            native.packed_weighted(**arguments)


def test_off_unless_asked_for(cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_library", None)
    monkeypatch.setattr(native, "_off", False)
    assert not native.enabled() and native.active() is None
    with pytest.raises(RuntimeError, match=r"native\.enable"):
        fmt = Format(4, "token", 32)
        native.packed_logits(
            torch.randn(1, 1, 1, 32), quantize_pack(torch.randn(1, 1, 64, 32), fmt, "keys"), fmt, 64, 32
        )
    monkeypatch.setenv("HF_KVCACHE_NATIVE", "1")
    assert native.enabled()
    native.disable()
    assert not native.enabled() and native.active() is None


@needs_compiler
def test_environment_enables_at_first_use(cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_library", None)
    monkeypatch.setattr(native, "_off", False)
    monkeypatch.setenv("HF_KVCACHE_NATIVE", "1")
    assert native.active() is native and native._library is not None


@needs_compiler
def test_build_is_cached_and_private(cache_home: Path) -> None:
    library = native.build()
    assert library.is_relative_to(cache_home) and library.stat().st_mode & 0o077 == 0
    when = library.stat().st_mtime_ns
    assert native.build() == library and library.stat().st_mtime_ns == when
    assert [path.name for path in library.parent.iterdir()] == ["kernels.so"]
    folder = library.parent
    folder.chmod(0o777)
    try:
        with pytest.raises(RuntimeError, match="can be written by somebody else"):
            native.build()
    finally:
        folder.chmod(0o700)


def test_no_compiler(cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ImportError, match="install one"):
        native.build()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ImportError, match="no-such-compiler is not found"):
        native.build()


@needs_compiler
def test_a_compiler_that_fails(cache_home: Path) -> None:
    with pytest.raises(RuntimeError, match="could not compile"):
        native.build(flags=["--no-such-flag"])
