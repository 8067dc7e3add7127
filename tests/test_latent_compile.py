"""The kernels of attention over latents compiled for real GPUs, without one: registers suffice, and shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="triton's compiler is there for Linux only"),
]

SCRIPT = Path(__file__).parent / "gpu" / "latent_sass.py"
SHARED = {80: 163 * 1024, 90: 227 * 1024}


@pytest.mark.parametrize("capability", SHARED)
def test_nothing_spills(capability: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), "--json", "--capability", str(capability)],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    assert len(rows) >= 6
    for row in rows:
        print(f"sm_{capability} {row['name']}: {row['registers']} registers, {row['shared']} bytes shared")
    for row in rows:
        assert row["stack"] == 0, f"registers spill: {row}"
        assert row["shared"] <= SHARED[capability], row
        assert row["registers"] * 32 * row["warps"] <= 65536, row
