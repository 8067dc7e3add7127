"""Attention of one decoding step: dense, and over packed rows in plain torch, by torch's int4 product, natively.

All ways of one row of the table are timed in turn, so that whatever else the machine does falls on all of them alike.
Medians in milliseconds (or another quantile: a busy machine interrupts long calls more often than short ones); `x` is
the time of the fastest dense form divided by that of the way. Formats of one run push each other and the dense tensors
out of the caches, as the layers of a model do: ask for one format to see caches at their best. The error is that of the
native kernels against the reference on the same packed rows, relative; of the dense forms it is about 0.003 (bfloat16).

    python tests/bench/packed_attention.py --threads 1
    python tests/bench/packed_attention.py --tokens 8192 --dims 128 --bits 4 --ways native int4pack
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from common import table, write_json

from hf_kvcache.ops import native
from hf_kvcache.ops.decode_attention import cpu, reference
from hf_kvcache.ops.packed import Format, Packed
from hf_kvcache.ops.quantize_pack.reference import quantize_pack

Way = Callable[[], torch.Tensor]


def formats(name: str, bits: int, dim: int, group: int) -> tuple[Format, Format]:
    """Formats of keys and of values."""
    if name == "kivi":
        return Format(bits, "channel", group), Format(bits, "token", group)
    if name == "symmetric":
        fmt = Format(bits, "token", dim, "symmetric", fit="unbiased")
        return fmt, fmt
    if name == "codebook":
        # Quantiles of a Gaussian: any levels will do here.
        at = (torch.arange(2**bits) + 0.5) / 2**bits
        levels = tuple((2**0.5 * torch.erfinv(2 * at - 1)).tolist())
        fmt = Format(bits, "token", dim, "codebook", levels, fit="unbiased")
        return fmt, fmt
    if name == "float8":
        fmt = Format(8, "token", dim, "float8")
        return fmt, fmt
    raise ValueError(f"unknown format {name!r}: kivi, symmetric, codebook or float8")


def with_room(packed: Packed) -> Packed:
    """The rows in buffers that have room for an eighth more, as a growing cache has."""

    def grown(x: torch.Tensor, dim: int) -> torch.Tensor:
        shape = list(x.shape)
        shape[dim] += shape[dim] // 8 + 1
        buffer = x.new_zeros(shape)
        view = buffer.narrow(dim, 0, x.shape[dim])
        return view.copy_(x)

    codes = grown(packed.codes, packed.codes.ndim - 3)
    return Packed(codes, grown(packed.scale, 2), None if packed.zero is None else grown(packed.zero, 2))


def dense_ways(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Way]:
    """The group is folded into the query length everywhere: q is `[B, Hk, G, D]`."""
    scale = q.shape[-1] ** -0.5

    def sdpa() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)

    def by_head() -> torch.Tensor:
        out = torch.empty_like(q)
        for b in range(q.shape[0]):
            for h in range(q.shape[1]):
                logits = torch.mm(q[b, h], k[b, h].t())
                probs = torch.softmax(logits * scale, -1, dtype=torch.float32).to(q.dtype)
                torch.mm(probs, v[b, h], out=out[b, h])
        return out

    def batched() -> torch.Tensor:
        logits = torch.matmul(q, k.transpose(-1, -2))
        return torch.matmul(torch.softmax(logits * scale, -1, dtype=torch.float32).to(q.dtype), v)

    return {"sdpa": sdpa, "by head": by_head, "batched": batched}


def packed_way(ops: Any, q: torch.Tensor, keys: Packed, values: Packed, fmts: tuple[Format, Format], half: int) -> Way:
    b, h, m, d = q.shape
    tokens = keys.codes.shape[2] * 2 * half
    typed = {"dtype": q.dtype} if ops is native else {}

    def run() -> torch.Tensor:
        logits = ops.packed_logits(q, keys, fmts[0], tokens, half)
        probs = torch.softmax(logits.mul_(d**-0.5), -1)
        return ops.packed_weighted(probs, values, fmts[1], d, half, **typed).to(q.dtype)

    return run


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


@torch.no_grad()
def measure(args: argparse.Namespace, dim: int, tokens: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    shape = (args.batch, args.kv_heads, tokens, dim)
    # Channels of unlike size, as keys have them.
    k = (torch.randn(shape) * torch.rand(1, args.kv_heads, 1, dim).add(0.2)).to(dtype)
    v = torch.randn(shape).to(dtype)
    q = torch.randn(args.batch, args.kv_heads, args.group * args.queries, dim).to(dtype)
    ways: dict[str, Way] = dict(dense_ways(q, k, v))
    half = cpu.native_half() or 32
    cases = []
    for name in args.formats:
        for bits in [8] if name == "float8" else args.bits:
            fmts = formats(name, bits, dim, args.q_group)
            keys = with_room(quantize_pack(k, fmts[0], "keys", half))
            values = with_room(quantize_pack(v, fmts[1], "values", half))
            keys = keys._replace(codes=keys.codes[:, :, : tokens // (2 * half)])
            cases.append((name, bits))
            for way, ops in (("reference", reference), ("int4pack", cpu), ("native", native)):
                if way not in args.ways:
                    continue
                if ops is not reference and not ops.supports(fmts[0], dim, half, dtype, q.device):
                    continue
                ways[f"{way} {name} {bits}"] = packed_way(ops, q, keys, values, fmts, half)
            exact = packed_way(reference, q, keys, values, fmts, half)()
            if "native" in args.ways:
                errors[(dim, tokens, name, bits)] = relative(ways[f"native {name} {bits}"](), exact)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()
    for turn in range(args.repeats):
        for name, way in ways.items():
            if name.startswith("reference") and turn >= 3:  # slow, and the slowest by far
                continue
            began = time.perf_counter()
            way()
            times[name].append(1000 * (time.perf_counter() - began))
    middle = {name: sorted(all_)[int(args.quantile * (len(all_) - 1))] for name, all_ in times.items()}
    dense = {name: middle[name] for name in ("sdpa", "by head", "batched")}
    best = min(dense.values())
    rows = []
    for name, bits in cases:
        row: dict[str, Any] = {"D": dim, "tokens": tokens, "format": name, "bits": bits} | dense
        for way in ("reference", "int4pack", "native"):
            if way in args.ways:
                ms = middle.get(f"{way} {name} {bits}")
                row[way] = "-" if ms is None else ms
                row[f"{way} x"] = "-" if ms is None else round(best / ms, 2)
        if "native" in args.ways:
            row["error"] = errors[(dim, tokens, name, bits)]
        rows.append(row)
    return rows


errors: dict[tuple[int, int, str, int], float] = {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 32768], help="multiples of 64")
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--formats", nargs="+", default=["kivi", "symmetric"], help="kivi, symmetric, codebook, float8")
    parser.add_argument("--ways", nargs="+", default=["reference", "int4pack", "native"])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--group", type=int, default=4, help="query heads for each KV head")
    parser.add_argument("--queries", type=int, default=1, help="new tokens")
    parser.add_argument("--q-group", type=int, default=32, help="elements that share a scale (kivi)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--quantile", type=float, default=0.5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", help="a file, or - for standard output")
    args = parser.parse_args()
    if any(tokens % 64 for tokens in args.tokens):
        parser.error("--tokens: multiples of 64")
    torch.set_num_threads(args.threads)
    if "native" in args.ways:
        native.enable()
    rows = [row for dim in args.dims for tokens in args.tokens for row in measure(args, dim, tokens)]
    print(table(rows))
    write_json(args.json, {"arguments": vars(args), "rows": rows})


if __name__ == "__main__":
    main()
