"""How a block table is read: runs of columns that lie together, or that several sequences share."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

# Measured, see docs/paging.md.
LEAST_SHARED = 8  # leading blocks of a group from which on they are read once for all of it
LEAST_RUN = 16  # blocks from which on a run is read where it lies (twice that for runs of several sequences, which are
# multiplied one after the other); shorter ones are brought together
MOST_RUNS = 4
GATHERED = 64  # blocks that are brought together at a time: larger pieces fall out of the processor's caches


class Piece(NamedTuple):
    """Columns `start:stop` of a table, read once for each group of `fold` neighbouring sequences."""

    start: int
    stop: int
    fold: int
    ids: np.ndarray  # [groups, stop - start]
    step: int | None  # block of group g, column c: ids[0, 0] + step * g + c; None: anywhere


def pieces_of(table: np.ndarray) -> tuple[Piece, ...]:
    """The pieces of a table `[B, n]`, in order. Layers with equal tables (most have) get the same answer."""
    return _pieces(table.tobytes(), table.shape)


def run_of(table: np.ndarray) -> Piece | None:
    """The whole table as one run, or None where it is none."""
    return _whole(table.tobytes(), table.shape)


@lru_cache(maxsize=256)
def _pieces(data: bytes, shape: tuple[int, int]) -> tuple[Piece, ...]:
    table = np.frombuffer(data, dtype=np.int32).reshape(shape)
    fold, common = _shared(table)
    if common < LEAST_SHARED:
        fold = common = 0
    found = _split(table[::fold, :common], 0, fold) if fold else []
    return tuple(found + _split(table[:, common:], common, 1))


@lru_cache(maxsize=256)
def _whole(data: bytes, shape: tuple[int, int]) -> Piece | None:
    table = np.frombuffer(data, dtype=np.int32).reshape(shape)
    runs = _runs(table)
    return Piece(0, shape[1], 1, table, runs[0][2]) if len(runs) == 1 and runs[0][2] is not None else None


def _shared(table: np.ndarray) -> tuple[int, int]:
    """(sequences in a group, leading columns that are the same for all of a group), or (0, 0)."""
    batch = len(table)
    if batch < 2 or not table.size:
        return 0, 0
    ends = np.flatnonzero(np.diff(table[:, 0])) + 1
    fold = int(ends[0]) if len(ends) else batch
    if fold < 2 or batch % fold or len(ends) != batch // fold - 1 or (ends % fold).any():
        return 0, 0
    groups = table.reshape(batch // fold, fold, -1)
    same = (groups == groups[:, :1]).all(axis=(0, 1))
    return fold, len(same) if same.all() else int(same.argmin())


def _runs(table: np.ndarray) -> list[tuple[int, int, int | None]]:
    """(start, stop, step) of the longest runs of columns in which every sequence has neighbouring blocks."""
    if not table.size:
        return []
    ends = np.flatnonzero((np.diff(table, axis=1) != 1).any(axis=0)) + 1
    bounds = [0, *ends.tolist(), table.shape[1]]
    found: list[tuple[int, int, int | None]] = []
    for start, stop in zip(bounds, bounds[1:], strict=False):
        steps = np.diff(table[:, start])
        even = not len(steps) or (steps[0] >= 0 and bool((steps == steps[0]).all()))
        found.append((start, stop, (int(steps[0]) if len(steps) else 0) if even else None))
    return found


def _split(table: np.ndarray, offset: int, fold: int) -> list[Piece]:
    """Long runs as pieces of their own; what lies between them is brought together."""
    runs = _runs(table)
    alone = len(table) == 1
    least = 1 if alone and len(runs) == 1 else LEAST_RUN if alone else 2 * LEAST_RUN
    long = [run for run in runs if run[2] is not None and run[1] - run[0] >= least]
    long = sorted(sorted(long, key=lambda run: run[0] - run[1])[:MOST_RUNS])
    found, at, columns = [], 0, max(1, GATHERED // max(1, len(table)))
    for start, stop, step in [*long, (table.shape[1], table.shape[1], None)]:
        for first in range(at, start, columns):
            last = min(first + columns, start)
            found.append(Piece(offset + first, offset + last, fold, table[:, first:last], None))
        if start < stop:
            found.append(Piece(offset + start, offset + stop, fold, table[:, start:stop], step))
        at = stop
    return found
