"""Launch parameters of decode attention: `{gpu: {"bits x head size": tuning.Entry}}`, bits 16 for exact rows alone.

None of these entries was measured: they follow from registers and shared memory of the compiled kernels. At up to 255
registers an SM holds 8 programs of one warp; two stages of 64 tokens take 18 to 23 KB of shared memory each, so 8 fit
into the 163 KB of sm_80 too (7 with 8-bit codes; 4 at head size 256). Programs are to fill the GPU once. A third stage
would cost occupancy for bytes that are already in flight: 8 programs x 5 to 9 KB per SM, where latency times bandwidth
asks for about 25 KB.
`python tests/gpu/check.py --tune` rewrites the entries of the GPU that it runs on.
"""

TABLE: dict[str, dict[str, tuple[int, ...]]] = {
    "sm_80": {
        # num_warps, num_stages, programs, min_tiles, max_splits, block_n
        "2x64": (1, 2, 864, 2, 256, 64),
        "2x128": (1, 2, 864, 2, 256, 32),
        "2x256": (1, 2, 432, 2, 256, 16),
        "3x64": (1, 2, 864, 2, 256, 64),
        "3x128": (1, 2, 864, 2, 256, 32),
        "3x256": (1, 2, 432, 2, 256, 16),
        "4x64": (1, 2, 864, 2, 256, 64),
        "4x128": (1, 2, 864, 2, 256, 32),
        "4x256": (1, 2, 432, 2, 256, 16),
        "8x64": (1, 2, 864, 2, 256, 64),
        "8x128": (1, 2, 864, 2, 256, 32),
        "8x256": (1, 2, 432, 2, 256, 16),
        "16x64": (1, 2, 864, 2, 256, 64),
        "16x128": (1, 2, 864, 2, 256, 32),
        "16x256": (1, 2, 432, 2, 256, 16),
    },
    "sm_90": {
        # num_warps, num_stages, programs, min_tiles, max_splits, block_n
        "2x64": (1, 2, 1056, 2, 256, 64),
        "2x128": (1, 2, 1056, 2, 256, 32),
        "2x256": (1, 2, 792, 2, 256, 16),
        "3x64": (1, 2, 1056, 2, 256, 64),
        "3x128": (1, 2, 1056, 2, 256, 32),
        "3x256": (1, 2, 792, 2, 256, 16),
        "4x64": (1, 2, 1056, 2, 256, 64),
        "4x128": (1, 2, 1056, 2, 256, 32),
        "4x256": (1, 2, 792, 2, 256, 16),
        "8x64": (1, 2, 1056, 2, 256, 64),
        "8x128": (1, 2, 1056, 2, 256, 32),
        "8x256": (1, 2, 792, 2, 256, 16),
        "16x64": (1, 2, 1056, 2, 256, 64),
        "16x128": (1, 2, 1056, 2, 256, 32),
        "16x256": (1, 2, 792, 2, 256, 16),
    },
}
