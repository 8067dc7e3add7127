"""The bytes of a page: slices of several tensors behind one another, as one record."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

ALIGN = 16


class Column(NamedTuple):
    """A tensor that is cut into pages along one dimension."""

    name: str
    shape: tuple[int, ...]  # of one page
    dim: int  # the dimension that is cut
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @staticmethod
    def of(name: str, tensor: torch.Tensor, dim: int, page: int) -> Column:
        """The column of `tensor` with `page` entries of `dim` to a page."""
        return Column(name, (*tensor.shape[:dim], page, *tensor.shape[dim + 1 :]), dim, tensor.dtype)


def record_bytes(columns: list[Column]) -> int:
    return sum(-(-column.nbytes // ALIGN) * ALIGN for column in columns)


def by_page(tensor: torch.Tensor, dim: int, page: int) -> torch.Tensor:
    """A view `[pages, ...]` of a tensor of whole pages."""
    return tensor.unflatten(dim, (tensor.shape[dim] // page, page)).movedim(dim, 0)


def views(records: torch.Tensor, columns: list[Column]) -> dict[str, torch.Tensor]:
    """Each column of records (uint8 `[pages, size]`) as a view `[pages, *shape]`."""
    table, start = {}, 0
    for column in columns:
        flat = records[:, start : start + column.nbytes].view(column.dtype)
        table[column.name] = flat.unflatten(1, column.shape)
        start += -(-column.nbytes // ALIGN) * ALIGN
    return table


def pack(tensors: dict[str, torch.Tensor], columns: list[Column]) -> torch.Tensor:
    """Tensors of whole pages (on the CPU) as records, uint8 `[pages, size]`."""
    first = columns[0]
    pages = tensors[first.name].shape[first.dim] // first.shape[first.dim]
    records = torch.zeros(pages, record_bytes(columns), dtype=torch.uint8)
    for column in columns:
        page = column.shape[column.dim]
        views(records, columns)[column.name].copy_(by_page(tensors[column.name], column.dim, page))
    return records
