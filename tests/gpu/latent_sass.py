"""Compile the kernels of attention over latents without a GPU: `python tests/gpu/latent_sass.py` prints a table.

Rank 512 and rope 64, as DeepSeek has them. Every variant is compiled as a call with these sizes would be.
"""

from __future__ import annotations

import argparse
import json
import os

import torch
from sass import compile_launch, resources

from hf_kvcache.ops.attention import Extras
from hf_kvcache.ops.decode_attention import PackedRows
from hf_kvcache.ops.packed import Format, Packed, codes_shape

RANK, ROPE, TOKENS = 512, 64, 4096


def packed_rows(bits: int) -> PackedRows:
    """Packed rows of the right shape, full of zeros."""
    scale = torch.zeros(1, 1, TOKENS, 1, dtype=torch.float16)

    def one(dim: int, bits: int, role: str) -> tuple[Packed, Format]:
        codes = torch.zeros(codes_shape((1, 1, TOKENS, dim), bits, role, 32), dtype=torch.uint8)
        return Packed(codes, scale, None), Format(bits, "token", dim, "symmetric")

    (keys, key_format), (values, value_format) = one(RANK, bits, "keys"), one(ROPE, 8, "values")
    mean = torch.zeros(1, 1, RANK)
    return PackedRows(keys, values, key_format, value_format, TOKENS, 32, torch.eye(RANK), key_mean=mean)


def launches(heads: int, dtype: torch.dtype, bits: int | None, masked: bool) -> list:
    from hf_kvcache.ops.latent_attention.triton import plan

    exact = (torch.zeros(1, 1, 256, RANK, dtype=dtype), torch.zeros(1, 1, 256, ROPE, dtype=dtype))
    parts = [exact] if bits is None else [packed_rows(bits), exact]
    total = 256 if bits is None else 256 + TOKENS
    mask = torch.ones(1, 1, 1, total, dtype=torch.bool) if masked else None
    queries = (torch.zeros(1, heads, 1, size, dtype=dtype) for size in (RANK, ROPE))
    extras = Extras(1.0, 30.0 if masked else None, torch.zeros(heads) if masked else None)
    return plan(*queries, parts, extras, mask, need_lse=True)[0]


# name -> heads, dtype, bits of packed rows, with a mask and all extras, which of the launches
VARIANTS = {
    "exact bf16, 16 heads": (16, torch.bfloat16, None, False, 0),
    "exact bf16, 128 heads, masked": (128, torch.bfloat16, None, True, 0),
    "exact fp32": (16, torch.float32, None, False, 0),
    "packed 4 bits": (16, torch.bfloat16, 4, False, 0),
    "packed 8 bits, masked": (128, torch.bfloat16, 8, True, 0),
    "merge": (16, torch.bfloat16, 4, True, 2),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", type=int, nargs="*", default=[80, 90])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)
    rows = []
    for name, (heads, dtype, bits, masked, which) in VARIANTS.items():
        launch = launches(heads, dtype, bits, masked)[which]
        for capability in args.capability:
            compiled = compile_launch(launch, capability)
            registers, stack = resources(compiled.asm["cubin"])
            row = {
                "name": name, "capability": capability, "warps": launch.options["num_warps"],
                "registers": registers, "stack": stack, "shared": compiled.metadata.shared,
            }  # fmt: skip
            rows.append(row)
            if not args.json:
                print(row, flush=True)
    if args.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
