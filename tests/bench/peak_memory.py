"""Peak resident memory of 200 decoding steps at a long context: is there a dense copy that nobody counts? (Linux)

A prompt is read into the cache, a few steps warm everything up, the kernel's high-water mark of this process is reset,
and 200 tokens are decoded. Reported: how far the mark rose above what was resident before, the cache's bytes, and the
bytes of the same rows in full precision. Each cache has a process of its own.

    python tests/bench/peak_memory.py
    python tests/bench/peak_memory.py --codecs kivi-4 --tokens 4096
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from common import forward, load_model, table, topics_text, track, write_json

from hf_kvcache import KVCache


def resident(field: str) -> int:
    """Bytes: `VmRSS` (now) or `VmHWM` (the most since the mark was reset)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


@torch.no_grad()
def measure(codec: str, tokens: int, steps: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    model, tokenizer, _ = load_model(None, torch.bfloat16)
    ids = tokenizer(topics_text()[5000 : 5000 + 12 * tokens], return_tensors="pt").input_ids[:, :tokens]
    cache = KVCache(model, codec=None if codec == "none" else codec)
    for start in range(0, tokens, 1024):
        forward(model, ids[:, start : start + 1024], cache)
    for token in range(40):
        forward(model, ids[:, token : token + 1], cache)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # pages that the prompt left behind would hide what the steps take
    before, bytes_before = resident("VmRSS"), cache.nbytes
    Path("/proc/self/clear_refs").write_text("5")
    for token in range(steps):
        forward(model, ids[:, token : token + 1], cache)
    rose = resident("VmHWM") - before
    layer = cache.layers[0]
    batch, heads, key_dim, value_dim = layer.segments.shape
    dense = len(cache.layers) * batch * heads * (key_dim + value_dim) * 2 * cache.get_seq_length()
    return {
        "codec": codec,
        "rose": rose,
        "bytes": cache.nbytes,
        "bytes grew": cache.nbytes - bytes_before,
        "dense": dense,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codecs", nargs="+", default=["rotated-4", "rotated-2", "kivi-4", "kivi-2", "none"])
    parser.add_argument("--tokens", type=int, default=7936)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--json", help="a file, or - for standard output")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args.tokens, args.steps)))
        return
    rows = []
    for codec in track(args.codecs, "caches"):
        options = ["--tokens", str(args.tokens), "--steps", str(args.steps), "--one", codec]
        done = subprocess.run([sys.executable, __file__, *options], capture_output=True, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    print(f"{args.steps} steps at {args.tokens} tokens, bfloat16; bytes")
    print(table([{k: v if k == "codec" else f"{v:,}" for k, v in row.items()} for row in rows]))
    write_json(args.json, {"rows": rows, "tokens": args.tokens, "steps": args.steps})


if __name__ == "__main__":
    main()
