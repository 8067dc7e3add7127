"""Everything about the Triton kernels that needs a GPU, in one run of a few minutes.

    python tests/gpu/check.py [--quick] [--json out.json]   correctness, speed, graphs, end to end
    python tests/gpu/check.py --tune                         measures launch parameters and rewrites this GPU's table
    python tests/gpu/check.py --dry                          correctness alone, tiny, in Triton's interpreter

Exit code 2: there is no GPU. 1: a kernel is wrong (speed targets are printed and do not fail).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

HEADS, PER_HEAD, DIM, RESIDUAL = 8, 4, 128, 128
TARGETS = {8: 1.6, 4: 2.0, 2: 2.2}  # times the speed of bf16 from 32k tokens on


@dataclass
class Place:
    """Where and how large the correctness tests are."""

    device: str
    tiny: bool
    asm: tuple[bool, ...]

    @property
    def dtype(self) -> Any:
        import torch

        return torch.float32 if self.tiny else torch.float16


def dense(query, pairs, extras, visible):
    """Output and log-sum-exp by definition, in float64."""
    import torch

    keys, values = (torch.cat([pair[i].double() for pair in pairs], dim=2) for i in range(2))
    group = query.shape[1] // keys.shape[1]
    logits = query.double() @ keys.repeat_interleave(group, 1).transpose(-1, -2) * extras.scaling
    if extras.softcap:
        logits = extras.softcap * torch.tanh(logits / extras.softcap)
    if visible is not None:
        logits = logits.masked_fill(~visible, float("-inf"))
    if extras.sinks is not None:
        column = extras.sinks.double().view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
        logits = torch.cat([logits, column], dim=-1)
    probs = torch.softmax(logits, dim=-1)[..., : keys.shape[2]]
    return probs @ values.repeat_interleave(group, 1), torch.logsumexp(logits, dim=-1)


def formats(tiny: bool) -> Iterator[tuple[Any, Any]]:
    from hf_kvcache.ops.packed import Format

    dim = 64 if tiny else DIM
    for bits in (2, 4) if tiny else (2, 3, 4, 8):
        yield Format(bits, "channel", 32), Format(bits, "token", 32)
    grid = Format(4, "token", dim, "symmetric", None, "unbiased")
    yield grid, grid
    if tiny:
        return
    yield Format(4, "token", 32), Format(2, "token", 64)
    levels = (-2.152, -1.344, -0.756, -0.2451, 0.2451, 0.756, 1.344, 2.152)
    book = Format(3, "token", dim, "codebook", levels, "unbiased")
    yield book, book
    yield Format(8, "channel", 32, "float8"), Format(8, "token", dim, "float8")


def decode_cases(place: Place) -> Iterator[tuple[str, float]]:
    """Name and largest error of decode attention against float64."""
    import torch

    from hf_kvcache.ops.attention import Extras
    from hf_kvcache.ops.decode_attention import triton
    from hf_kvcache.ops.decode_attention.dispatch import PackedRows
    from hf_kvcache.ops.dequantize.reference import dequantize
    from hf_kvcache.ops.quantize_pack.reference import quantize_pack

    heads, per_head, dim = (1, 2, 64) if place.tiny else (HEADS, PER_HEAD, DIM)
    for keys_format, values_format in formats(place.tiny):
        for length, queries, masked in ((96, 1, False), (96, 2, True)) if place.tiny else (
            (32, 1, False), (2208, 1, False), (2208, 4, True), (9984, 1, True),
        ):  # fmt: skip
            torch.manual_seed(length)

            def rows(count: int) -> tuple[Any, Any]:
                shape = (2, heads, count, dim)
                return tuple(torch.randn(shape, device=place.device, dtype=place.dtype) for _ in range(2))  # noqa: B023

            front, tail, packed_rows = rows(4), rows(37), rows(length)
            packed = PackedRows(
                quantize_pack(packed_rows[0], keys_format, "keys"),
                quantize_pack(packed_rows[1], values_format, "values"),
                keys_format, values_format, length, 32,
            )  # fmt: skip
            query = torch.randn(2, heads * per_head, queries, dim, device=place.device, dtype=place.dtype)
            total = length + 41
            visible = None
            if masked:
                visible = torch.ones(2, 1, queries, total, dtype=torch.bool, device=place.device)
                visible[0, ..., : total // 3] = False
            sinks = torch.randn(heads * per_head, device=place.device) if masked else None
            extras = Extras(dim**-0.5, 20.0 if masked else None, sinks)
            unpacked = (
                dequantize(packed.keys, keys_format, "keys", dim, length, torch.float32),
                dequantize(packed.values, values_format, "values", dim, length, torch.float32),
            )
            expected = dense(query, (front, unpacked, tail), extras, visible)
            for asm in place.asm:
                got = triton.decode_attention(
                    query, front, packed, tail, extras, visible, need_lse=True, inline_asm=asm
                )
                error = (got.output.double() - expected[0]).abs().max().item()
                error = max(error, (got.lse.double() - expected[1]).abs().max().item())
                kind = f"{keys_format.kind}{keys_format.bits}/{values_format.bits} by {keys_format.axis}"
                yield f"decode {kind}, {length} rows, {queries} queries{', masked' * masked}, asm={asm}", error


def other_cases(place: Place) -> Iterator[tuple[str, float]]:
    """The other kernels against their references. Codes: share of rows with a difference."""
    import torch

    from hf_kvcache.ops.attention import Extras
    from hf_kvcache.ops.column_sums import reference as column_reference
    from hf_kvcache.ops.column_sums import triton as columns
    from hf_kvcache.ops.dequantize import reference as dequantize_reference
    from hf_kvcache.ops.dequantize import triton as dequantize
    from hf_kvcache.ops.gather_rows import reference as gather_reference
    from hf_kvcache.ops.gather_rows import triton as gather
    from hf_kvcache.ops.quantize_pack import reference as quantize_reference
    from hf_kvcache.ops.quantize_pack import triton as quantize

    heads, count, dim = (1, 96, 64) if place.tiny else (HEADS, 2048, DIM)
    x = torch.randn(2, heads, count, dim, device=place.device, dtype=place.dtype)
    index = torch.stack([torch.randperm(count, device=place.device)[: count - 7] for _ in range(2 * heads)])
    index = index.view(2, heads, -1)
    for role, pair in itertools.product(("keys", "values"), formats(place.tiny)):
        fmt = pair[0] if role == "keys" else pair[1]
        expected = quantize_reference.quantize_pack(x, fmt, role)
        name = f"{fmt.kind}{fmt.bits} {role}"
        if quantize.supports(fmt, 32):
            got = quantize.quantize_pack(x, fmt, role)
            wrong = (got.codes != expected.codes).float().mean().item()
            scale = ((got.scale - expected.scale).abs() / expected.scale.abs().clamp(min=1e-4)).float()
            # Scales of a kind chosen by a sum may differ in their last bit, and a few codes with them.
            yield f"quantize_pack {name}", max(wrong, (scale > 2e-3).float().mean().item())
        if dequantize.supports(fmt, 32):
            whole = dequantize_reference.dequantize(expected, fmt, role, dim, count - 3, torch.float32)
            mine = dequantize.dequantize(expected, fmt, role, dim, count - 3, torch.float32)
            yield f"dequantize {name}", (whole - mine).abs().max().item()
        if fmt.per_token:
            a = gather_reference.gather_rows(expected, fmt, role, dim, index)
            b = gather.gather_rows(expected, fmt, role, dim, index)
            same = torch.equal(a.codes, b.codes) and torch.equal(a.scale, b.scale)
            yield f"gather_rows {name}", 0.0 if same else 1.0
    queries = 40 if place.tiny else 300
    query = torch.randn(2, heads * 2, queries, dim, device=place.device, dtype=place.dtype)
    mask = torch.rand(2, 1, queries, count, device=place.device) > 0.4
    arguments = (query, x, Extras(dim**-0.5), lambda a, b: mask[:, :, a:b])
    for reduce in ("mean", "max"):
        wide = (query.double(), x.double(), *arguments[2:])
        error = columns.column_sums(*arguments, reduce=reduce) - column_reference.column_sums(*wide, reduce=reduce)
        yield f"column_sums {reduce}", error.abs().max().item()


def correctness(place: Place) -> list[dict[str, Any]]:
    limit = 4e-3
    results = []
    for name, error in itertools.chain(decode_cases(place), other_cases(place)):
        passed = math.isfinite(error) and error <= limit
        results.append({"name": name, "error": error, "passed": passed})
        print(f"{'ok   ' if passed else 'WRONG'} {error:9.2e}  {name}", flush=True)
    return results


def random_rows(bits: int, batch: int, length: int) -> Any:
    """Packed rows of random bytes: time depends on shapes only."""
    import torch

    from hf_kvcache.ops.decode_attention.dispatch import PackedRows
    from hf_kvcache.ops.packed import Format, Packed, codes_shape

    kf, vf = Format(bits, "channel", 32), Format(bits, "token", 32)
    shape = (batch, HEADS, length, DIM)

    def one(fmt: Any, role: str) -> Any:
        codes = torch.randint(0, 256, codes_shape(shape, bits, role, 32), dtype=torch.uint8, device="cuda")
        groups = (length // 32, DIM) if fmt.axis == "channel" else (length, DIM // 32)
        scale = torch.full((batch, HEADS, *groups), 1 / 2**bits, dtype=torch.float16, device="cuda")
        return Packed(codes, scale, torch.full_like(scale, -0.5))

    return PackedRows(one(kf, "keys"), one(vf, "values"), kf, vf, length, 32)


def nbytes(packed: Any) -> int:
    return sum(t.numel() * t.element_size() for part in (packed.keys, packed.values) for t in part)


def captured(function: Callable[[], Any]) -> Callable[[], None]:
    """The GPU's work of a function alone, without Python and launches: a graph's replay."""
    import torch

    for _ in range(2):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def interleaved(functions: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Median milliseconds of each, taken in turns, with the L2 cache emptied in between."""
    import torch

    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(repeats + 2):
        for name, function in functions.items():
            flush.zero_()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            stop.record()
            stop.synchronize()
            if turn >= 2:
                times[name].append(start.elapsed_time(stop))
    return {name: sorted(values)[len(values) // 2] for name, values in times.items()}


def copy_bandwidth() -> float:
    """Bytes a second, read and written."""
    import torch

    a = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    return 2 * (1 << 30) / (interleaved({"copy": lambda: b.copy_(a)}, 10)["copy"] / 1e3)


def exact_step(batch: int, length: int) -> dict[str, Callable[[], None]]:
    """Ways to attend to exact rows with what torch has; the fastest is the baseline."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    keys, values = (torch.randn(batch, HEADS, length, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    query = torch.randn(batch, HEADS * PER_HEAD, 1, DIM, device="cuda", dtype=torch.bfloat16)
    folded = query.view(batch, HEADS, PER_HEAD, DIM)
    attend = torch.nn.functional.scaled_dot_product_attention

    def run(q: Any, backend: Any, gqa: bool) -> Callable[[], Any]:
        def call() -> Any:
            with sdpa_kernel(backend):
                return attend(q, keys, values, enable_gqa=gqa)

        return call

    ways = {
        "flash, grouped": run(query, SDPBackend.FLASH_ATTENTION, True),
        "flash, folded": run(folded, SDPBackend.FLASH_ATTENTION, False),
        "efficient, folded": run(folded, SDPBackend.EFFICIENT_ATTENTION, False),
        "cudnn, folded": run(folded, SDPBackend.CUDNN_ATTENTION, False),
    }
    usable: dict[str, Callable[[], None]] = {}
    for name, way in ways.items():
        try:
            usable[name] = captured(way)
        except RuntimeError as error:
            print(f"  ({name}: {str(error).splitlines()[0]})")
    return usable


def packed_step(bits: int, batch: int, length: int, entry: Any = None) -> tuple[Callable[[], None], int]:
    """A step over `length` rows, the last RESIDUAL of them exact, and the bytes it reads."""
    import torch

    from hf_kvcache.ops.attention import Extras
    from hf_kvcache.ops.decode_attention import triton

    packed = random_rows(bits, batch, length - RESIDUAL)
    tail = tuple(torch.randn(batch, HEADS, RESIDUAL, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    query = torch.randn(batch, HEADS * PER_HEAD, 1, DIM, device="cuda", dtype=torch.bfloat16)

    def call() -> Any:
        return triton.decode_attention(query, None, packed, tail, Extras(DIM**-0.5), entry=entry)

    return captured(call), nbytes(packed) + 2 * tail[0].numel() * 2


def speed(quick: bool) -> tuple[list[dict[str, Any]], float]:
    import torch

    bandwidth = copy_bandwidth()
    print(f"copy bandwidth {bandwidth / 1e9:.0f} GB/s")
    print("   rows batch  bf16 ms (how)                int8 ms   x   share   int4 ms   x   share   int2 ms   x   share")
    results = []
    sizes = itertools.product((4096, 32768) if quick else (4096, 32768, 131072), (1, 8) if quick else (1, 8, 32))
    for length, batch in sizes:
        needed = batch * length * HEADS * DIM * 2 * 4  # exact rows, and packed ones of all widths
        if needed > 0.8 * torch.cuda.mem_get_info()[0]:
            print(f"{length:7d} {batch:5d}  skipped: needs {needed / 2**30:.0f} GiB")
            continue
        functions = exact_step(batch, length)
        baselines = list(functions)
        read: dict[str, int] = {}
        for bits in (8, 4, 2):
            functions[f"int{bits}"], read[f"int{bits}"] = packed_step(bits, batch, length)
        times = interleaved(functions, 10 if quick else 20)
        best = min(baselines, key=lambda name: times[name])
        cells = []
        for bits in (8, 4, 2):
            ms = times[f"int{bits}"]
            rate = read[f"int{bits}"] / (ms / 1e3)
            row = {
                "rows": length, "batch": batch, "bits": bits, "ms": ms, "bf16_ms": times[best], "baseline": best,
                "speedup": times[best] / ms, "gb_per_s": rate / 1e9, "share_of_copy": rate / bandwidth,
                "target": TARGETS[bits] if length >= 32768 else None,
            }  # fmt: skip
            row["reached"] = row["target"] is None or row["speedup"] >= row["target"]
            results.append(row)
            cells.append(f"{ms:9.3f} {row['speedup']:4.2f}{' ' if row['reached'] else '!'} {row['share_of_copy']:5.0%}")
        print(f"{length:7d} {batch:5d}  {times[best]:7.3f} ({best:17s}) {'  '.join(cells)}", flush=True)
        del functions
        torch.cuda.empty_cache()
    print("targets from 32k rows on: " + ", ".join(f"int{b} {x}x" for b, x in TARGETS.items()) + " ('!': missed)")
    return results, bandwidth


def graph_replay() -> dict[str, Any]:
    """A captured step, replayed after queries and lengths changed, equals the step itself."""
    import torch

    from hf_kvcache.ops.attention import Extras
    from hf_kvcache.ops.decode_attention import triton

    packed = random_rows(4, 2, 4096)
    tail = tuple(torch.randn(2, HEADS, RESIDUAL, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    query = torch.randn(2, HEADS * PER_HEAD, 1, DIM, device="cuda", dtype=torch.bfloat16)
    lengths = torch.tensor([100, 4096], dtype=torch.int32, device="cuda")
    tails = torch.tensor([1, 128], dtype=torch.int32, device="cuda")

    def step() -> Any:
        return triton.decode_attention(
            query, None, packed, tail, Extras(DIM**-0.5), need_lse=True, lengths=lengths, tail_lengths=tails
        )

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step()
    equal = True
    for change in ((3, 2000), (0, 64), (4095, 1)):
        query.normal_()
        lengths.copy_(torch.tensor(change, dtype=torch.int32))
        tails.copy_(torch.tensor(change, dtype=torch.int32).clamp(1, 128))
        graph.replay()
        torch.cuda.synchronize()
        direct = step()
        equal &= torch.equal(made.output, direct.output) and torch.equal(made.lse, direct.lse)
    print(f"{'ok   ' if equal else 'WRONG'} a captured step, replayed with other queries and lengths")
    return {"name": "graph replay", "passed": bool(equal)}


def end_to_end(quick: bool) -> list[dict[str, Any]]:
    """Tokens a second of a random model with the layers of Llama 3 8B, four of them."""
    import torch
    import transformers

    from hf_kvcache import KVCache, QuantizedKIVICache

    config = transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
        num_hidden_layers=4, vocab_size=32000, max_position_embeddings=1 << 18,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = transformers.LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    prompt, steps = (8192, 16) if quick else (65536, 32)
    kinds: dict[str, Callable[[], Any]] = {
        "KVCache": lambda: KVCache(model),
        "4 bits": lambda: QuantizedKIVICache(model, nbits=4),
        "2 bits": lambda: QuantizedKIVICache(model, nbits=2),
    }
    results = []
    for batch in (1,) if quick else (1, 4):
        for name, make in kinds.items():
            row: dict[str, Any] = {"cache": name, "batch": batch, "prompt": prompt}
            try:
                cache = make()
                with torch.inference_mode():
                    for start in range(0, prompt, 4096):
                        ids = torch.randint(0, 32000, (batch, min(4096, prompt - start)), device="cuda")
                        model(ids, past_key_values=cache, logits_to_keep=1)
                    token = ids[:, -1:]
                    for step in range(steps + 4):
                        if step == 4:
                            torch.cuda.synchronize()
                            began = time.perf_counter()
                        token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
                    torch.cuda.synchronize()
                row["tokens_per_s"] = batch * steps / (time.perf_counter() - began)
                row["cache_bytes"] = cache.nbytes
                print(
                    f"{name:8s} batch {batch}, {prompt} tokens: {row['tokens_per_s']:8.1f} tokens/s, "
                    f"{cache.nbytes / 2**20:8.0f} MiB"
                )
            except Exception as error:  # a report of the rest is worth more than a stop
                row["error"] = f"{type(error).__name__}: {error}"
                print(f"{name:8s} batch {batch}: {row['error']}")
            results.append(row)
            cache = None
            torch.cuda.empty_cache()
    return results


def tune() -> None:
    """Measure launch parameters for head size 128 and write the best to the table."""
    import torch

    from hf_kvcache.ops import tuning

    target = tuning.target_of(torch.device("cuda"))
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    file = ROOT / "hf_kvcache" / "ops" / "tuning_table.py"
    text = file.read_text()
    loads = ((1, 32768), (1, 131072), (8, 32768))
    for bits in (2, 3, 4, 8):
        before = tuning.lookup(target, bits, DIM)
        scores: dict[tuning.Entry, float] = {}
        for stages, per_processor, tiles in itertools.product((1, 2, 3), (4, 6, 8, 12, 16), (1, 2, 4)):
            entry = before._replace(num_stages=stages, programs=per_processor * processors, min_tiles=tiles)
            try:
                times = [interleaved({"": packed_step(bits, *load, entry)[0]}, 7)[""] for load in loads]
            except Exception as error:  # too much shared memory, for one
                print(f"{bits} bits {entry}: {type(error).__name__}")
                continue
            scores[entry] = math.prod(times) ** (1 / len(times))
        best = min(scores, key=lambda e: scores[e])
        print(f"{bits} bits: {scores[best]:.4f} ms with {best}, {scores.get(before, math.nan):.4f} with {before}")
        section = text.index(f'"{target}": {{')
        new = re.sub(rf'("{bits}x{DIM}": )\([^)]*\)', rf"\g<1>{tuple(best)}", text[section:], count=1)
        text = text[:section] + new
    file.write_text(text)
    print(f"wrote {file}; say there that entries of {target} at head size {DIM} are measured")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    parser.add_argument("--dry", action="store_true", help="tiny, in the interpreter, without a GPU")
    parser.add_argument("--tune", action="store_true", help="rewrite this GPU's launch parameters")
    args = parser.parse_args()
    if args.dry:
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    if not args.dry and not torch.cuda.is_available():
        print("no GPU here: --dry runs the correctness part in Triton's interpreter", file=sys.stderr)
        return 2
    if args.tune:
        tune()
        return 0
    place = Place("cpu", True, (False,)) if args.dry else Place("cuda", False, (True, False))
    began = time.perf_counter()
    report: dict[str, Any] = {"torch": torch.__version__, "correctness": correctness(place)}
    if not args.dry:
        report["gpu"] = torch.cuda.get_device_name()
        report["correctness"].append(graph_replay())
        report["speed"], report["copy_bytes_per_s"] = speed(args.quick)
        report["end_to_end"] = end_to_end(args.quick)
    report["seconds"] = time.perf_counter() - began
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))
    wrong = [row["name"] for row in report["correctness"] if not row["passed"]]
    print(f"{len(report['correctness']) - len(wrong)} right, {len(wrong)} wrong, {report['seconds']:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
