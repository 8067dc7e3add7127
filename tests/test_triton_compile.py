"""The Triton kernels compiled for real GPUs, without one: nothing spills, and the inner loop stays short.

Below 8 bits, decode attention over packed rows is limited by instructions per code, not by memory, so that number is
a property to test. It is counted in the machine code (SASS) of the kernel for head size 128, four query heads per KV
head, keys in groups of 32 tokens per channel and values in groups of 32 channels per token, both with zeros:

    instructions in the loop over tiles * 32 * warps / codes of one pass through it (2 * 64 * 128)

Every instruction between the loop's label and its branch back counts, those of loads, waits, addresses, the softmax and
its rescaling included; see `tests/gpu/sass.py`, which prints the table.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="triton's compiler is there for Linux only"),
]

SCRIPT = Path(__file__).parent / "gpu" / "sass.py"

# With inline assembly as on an NVIDIA GPU, and without: instructions per code at most.
LIMITS = {
    (90, True): {2: 2.6, 3: 4.5, 4: 2.6, 8: 3.5},
    (90, False): {2: 5.5, 4: 5.5},
    (80, True): {2: 2.6, 4: 2.6, 8: 3.5},
}


@lru_cache(maxsize=8)
def compiled(*arguments: str) -> Any:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), "--json", *arguments],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("capability,asm", LIMITS)
def test_decode_attention(capability: int, asm: bool) -> None:
    limits = LIMITS[capability, asm]
    rows = compiled("--capability", str(capability), "--asm", str(int(asm)), "--bits", *(str(bits) for bits in limits))
    for row in rows:
        print(
            f"sm_{capability} {row['bits']}-bit inline_asm={asm}: {row['registers']} registers, {row['shared']} bytes "
            f"shared, {row['loop']} instructions in the loop, {row['per_code']:.2f} per code"
        )
    for row in rows:
        assert row["stack"] == 0 and row["spills"] == 0, f"registers spill: {row}"
        assert row["per_code"] <= limits[row["bits"]], row
        # Half of the loop unrolled away, or another loop taken for it, would be less than a product and an `and` each.
        assert row["opcodes"]["HMMA"] >= 60 and row["loop"] > 700
        # Eight programs on an SM, as the table of launch parameters has it.
        assert row["shared"] <= 163 * 1024 // 8 + (8192 if row["bits"] == 8 else 0)


def test_other_kernels() -> None:
    rows = compiled("--others", "--capability", "90")
    assert len(rows) > 25
    for name, row in rows.items():
        # Rare variants of the decode kernel need only compile.
        assert row["stack"] == 0 or "variant" in name, f"{name}: registers spill: {row}"
