"""CPUOffloadedCache: every token, most of them beyond the GPU."""

from __future__ import annotations

import os
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from ..cache import KVCache
from ..offload import Offload


class CPUOffloadedCache(KVCache):
    """Keep the newest tokens on the compute device and older ones in host memory or on disk. Lossless, except with
    `top_pages`. FlexGen, arXiv 2303.06865; Quest, arXiv 2406.10774.

    Device bytes per token and layer: `2 * Hkv * D * bytes(dtype) + 4` for the newest `resident_length` tokens, 4
    beyond, and two layers' worth of staging where pages are fetched. With a codec, pages move packed.

    Args:
        model_or_config: the model (it is attached), or its config.
        resident_length: newest tokens that stay on the device.
        pin_memory: page-locked host memory (no effect without a GPU).
        disk: an existing folder for pages beyond `host_bytes`.
        host_bytes: host memory for all layers together; None: no limit.
        attend: `"fetch"`, `"compute"` or `"auto"`, see `Offload`.
        page: tokens that leave the device together; 64, or 16 with `top_pages`.
        top_pages: attend only to this share (a float) or number of the pages that have left. Lossy.

    Raises:
        ValueError: impossible sizes, a folder that does not exist.
        NotImplementedError: policies that change rows at every step, models without full-attention layers.
    """

    def __init__(
        self,
        model_or_config: PreTrainedModel | PreTrainedConfig,
        resident_length: int = 1024,
        pin_memory: bool = True,
        disk: str | os.PathLike[str] | None = None,
        host_bytes: int | None = None,
        attend: str = "auto",
        page: int | None = None,
        top_pages: float | int | None = None,
        scope: str = "full",
        **parts: Any,
    ) -> None:
        if "offload" in parts:
            raise ValueError(f"{type(self).__name__} has its offload; pass an Offload of your own to KVCache")
        sizes = {} if page is None else {"page": page}
        offload = Offload(
            resident_length,
            attend=attend,
            pin_memory=pin_memory,
            host_bytes=host_bytes,
            disk=disk,
            top_pages=top_pages,
            **sizes,
        )
        super().__init__(model_or_config, offload=offload, scope=scope, **parts)

    @property
    def stored_as(self) -> str:
        return KVCache.__name__
