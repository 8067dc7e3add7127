"""Decode attention of one layer over blocks of a pool, in each of the ways there are, against one dense buffer.

One token for each sequence, in the layer shapes of SmolLM2 unless told otherwise. The ways are interleaved; medians in
microseconds. `dense` is a contiguous buffer read by SDPA with the group folded (what `KVCache` does); `rows` brings all
blocks together first and does the same; `pieces` reads them apart (`hf_kvcache/paging/attend.py`); `taken` names which
of the two a cache with a pool does. How the blocks lie:

- run: one sequence, neighbouring blocks;
- scattered: blocks anywhere;
- rows: each sequence a run of its own, and one block more for each;
- shared: all sequences begin with the same run, and have 40 tokens of their own behind it.

    python tests/bench/paged_attention.py --dtype bfloat16
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import table, write_json

from hf_kvcache import BlockPool
from hf_kvcache.attention import _packed_sdpa
from hf_kvcache.ops.attention import Extras
from hf_kvcache.paging.attend import over_blocks, reads_in_pieces
from hf_kvcache.segments import PagedSegment, Rows

OWN = 40  # tokens of each sequence after a shared run


def random_rows(batch: int, n: int, heads: int, dim: int, dtype: torch.dtype) -> Rows:
    keys = torch.randn(batch, heads, n, dim, dtype=dtype)
    return Rows(keys, torch.randn_like(keys), torch.arange(n, dtype=torch.int32).expand(batch, 1, n))


def scatter(segment: PagedSegment) -> None:
    """Move the blocks to places that do not lie together."""
    arena = segment.arena
    order = np.random.RandomState(0).permutation(arena.capacity).astype(np.int32)
    for tensor in arena.tensors().values():
        tensor[:, torch.from_numpy(order).long()] = tensor.clone()
    counts = arena.counts.copy()
    arena.counts[order] = counts
    segment._table.ids = order[segment.table]


def laid(kind: str, batch: int, tokens: int, shape: tuple[int, int], dtype: torch.dtype) -> PagedSegment:
    segment = PagedSegment(BlockPool(), 0)
    if kind == "shared":
        segment.append(random_rows(1, tokens - OWN, *shape, dtype))
        segment.batch_map(lambda t: t.repeat_interleave(batch, 0))
        segment.append(random_rows(batch, OWN, *shape, dtype))
        return segment
    segment.append(random_rows(batch, tokens - 64, *shape, dtype))
    if kind == "scattered":
        scatter(segment)
    segment.append(random_rows(batch, 64, *shape, dtype))  # a block of its own
    return segment


def interleaved(ways: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median microseconds of each way."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats + 3):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            times[name].append(1e6 * (time.perf_counter() - began))
    return {name: statistics.median(values[3:]) for name, values in times.items()}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 4096])
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--group", type=int, default=3)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--json", help="a file, or - for standard output")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype, shape = getattr(torch, args.dtype), (args.heads, args.dim)
    extras = Extras(args.dim**-0.5)
    found = []
    for kind, batch in (
        ("run", 1),
        ("scattered", 1),
        ("rows", args.batch),
        ("scattered", args.batch),
        ("shared", args.batch),
    ):
        for tokens in args.lengths:
            segment = laid(kind, batch, tokens, shape, dtype)
            query = torch.randn(batch, args.heads * args.group, 1, args.dim, dtype=dtype)
            held = segment.rows.map(torch.clone)

            def dense(rows: Rows = held, query: torch.Tensor = query) -> torch.Tensor:
                return _packed_sdpa(query, rows.keys, rows.values, None, extras.scaling)

            ways = {
                "dense": dense,
                "rows": lambda s=segment, query=query: dense(s.rows, query),
                "pieces": lambda s=segment, query=query: over_blocks(s, query, extras),
            }
            median = interleaved(ways, args.repeats)
            found.append(
                {"blocks": kind, "batch": batch, "tokens": tokens}
                | {k: round(v) for k, v in median.items()}
                | {"taken": "pieces" if reads_in_pieces(segment) else "rows"}
            )
    print(f"{args.dtype}, {args.heads} KV heads of {args.dim}, groups of {args.group}, {args.threads} thread(s)")
    print(table(found))
    write_json(args.json, {"dtype": args.dtype, "rows": found})


if __name__ == "__main__":
    main()
