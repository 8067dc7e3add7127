"""Offload: what the user says about where rows live."""

from __future__ import annotations

import os
from dataclasses import dataclass

ATTEND = ("auto", "fetch", "compute")


@dataclass(frozen=True)
class Offload:
    """Where the rows of full-attention layers live. Lossless, except with `top_pages`. FlexGen, arXiv 2303.06865.

    The newest `resident_length` tokens stay on the compute device; older ones leave it in whole pages.

    Args:
        resident_length: newest tokens that always stay on the device.
        page: tokens that leave together; 64, or 16 with `top_pages` (larger pages find single facts less often).
        attend: how older rows are attended to. `"fetch"` copies a layer's pages to the device, the next layer's ahead
            of time; `"compute"` attends on the CPU where they lie, and only the query, the output and its log-sum-exp
            travel; `"auto"` measures which of the two is faster on this machine (`"compute"` where the model runs on
            the CPU, since nothing has to travel then).
        pin_memory: page-locked host memory, which is copied asynchronously (no effect without a GPU).
        host_bytes: host memory for all layers together; older pages beyond it go to `disk`. None: no limit.
        disk: an existing folder for them. A private subfolder is made, and removed with the cache.
        top_pages: attend only to the pages that can matter to a query, a share (a float in (0, 1]) or a number of the
            pages that have left the device. Lossy. Quest, arXiv 2406.10774. None: all.

    Raises:
        ValueError: impossible sizes; `host_bytes` without `disk`; a folder that does not exist.
    """

    resident_length: int = 1024
    page: int = None  # type: ignore[assignment]  # 64, or 16 with `top_pages`
    attend: str = "auto"
    pin_memory: bool = True
    host_bytes: int | None = None
    disk: str | os.PathLike[str] | None = None
    top_pages: float | int | None = None

    def __post_init__(self) -> None:
        from ..policies.base import check_flag, check_not_negative, check_positive

        if self.page is None:
            object.__setattr__(self, "page", 64 if self.top_pages is None else 16)
        check_positive("resident_length", self.resident_length)
        check_positive("page", self.page)
        check_flag("pin_memory", self.pin_memory)
        if self.attend not in ATTEND:
            raise ValueError(f"`attend` must be one of {', '.join(map(repr, ATTEND))}, got {self.attend!r}")
        if self.host_bytes is not None:
            check_not_negative("host_bytes", self.host_bytes)
            if self.disk is None:
                raise ValueError("`host_bytes` needs `disk`, the folder where pages beyond it go")
        if self.disk is not None and not os.path.isdir(self.disk):
            raise ValueError(f"`disk` must be an existing folder, got {os.fspath(self.disk)!r}")
        top = self.top_pages
        if top is not None:
            share = isinstance(top, float) and 0 < top <= 1
            count = isinstance(top, int) and not isinstance(top, bool) and top > 0
            if not share and not count:
                raise ValueError(f"`top_pages` must be a share in (0, 1] or a positive whole number, got {top!r}")

    def pages_of(self, rows: int) -> int:
        """Pages that have left the device when `rows` rows are held."""
        return max(0, rows - self.resident_length) // self.page

    def wanted(self, pages: int) -> int:
        """How many of `pages` pages are attended to."""
        if self.top_pages is None:
            return pages
        if isinstance(self.top_pages, float):
            return min(pages, max(1, round(self.top_pages * pages)))
        return min(pages, self.top_pages)
