"""What every test shares: at most two threads, one seed, quiet libraries, and the small real model."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from hypothesis import settings

# Reproducible examples, and no failure because a shared machine was slow once.
settings.register_profile("hf_kvcache", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("hf_kvcache")

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def pytest_configure(config: pytest.Config) -> None:
    """Fix the number of threads, and drop warnings that are about upstream code and not about ours."""
    # Side by side (`pytest -n`), each process has a core of its own at best.
    torch.set_num_threads(1 if os.environ.get("PYTEST_XDIST_WORKER") else 2)
    config.addinivalue_line("filterwarnings", "ignore:`past_key_values` is deprecated:FutureWarning")
    for category in ("DeprecationWarning", "FutureWarning", "UserWarning"):
        config.addinivalue_line("filterwarnings", f"ignore::{category}:transformers")
        config.addinivalue_line("filterwarnings", f"ignore::{category}:torch")


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    """The same random weights and tokens whatever ran before."""
    torch.manual_seed(0)
    yield


@pytest.fixture(scope="session")
def smollm2() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct in float32 and its tokenizer. Leave the model as it came: it is shared."""
    from demo_model import ModelUnavailable, load

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, tokenizer, _ = load(None, torch.float32)
    except ModelUnavailable as error:
        pytest.skip(f"needs SmolLM2-135M-Instruct: {error}")
    return model, tokenizer
