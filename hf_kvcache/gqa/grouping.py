"""Which heads to pool with which: groups of one size whose members cost least to hold as one."""

from __future__ import annotations

from collections.abc import Iterator

import torch

_EXHAUSTIVE = 5000  # partitions up to which all are tried


def contiguous(heads: int, size: int) -> list[list[int]]:
    return [list(range(start, start + size)) for start in range(0, heads, size)]


def choose(costs: torch.Tensor, size: int) -> list[list[int]]:
    """Groups of `size` with the smallest sum of `costs` `[n, n]` over the pairs within them.

    All partitions are tried if they are few. Otherwise heads are swapped between groups for as long as it helps, from
    several starts.
    """
    heads = len(costs)
    if _count(heads, size) <= _EXHAUSTIVE:
        found = min(_partitions(list(range(heads)), size), key=lambda groups: _total(costs, groups))
    else:
        starts = [contiguous(heads, size)] + [_greedy(costs, size, first) for first in range(heads)]
        found = min((_swap(costs, groups) for groups in starts), key=lambda groups: _total(costs, groups))
    return sorted(sorted(group) for group in found)


def _count(heads: int, size: int) -> int:
    """How many partitions there are (as far as it matters)."""
    total = 1
    while heads:
        # The first head that is left, with any `size - 1` of the others.
        ways = 1
        for i in range(size - 1):
            ways = ways * (heads - 1 - i) // (i + 1)
        total *= ways
        heads -= size
        if total > _EXHAUSTIVE:
            break
    return total


def _partitions(heads: list[int], size: int) -> Iterator[list[list[int]]]:
    if not heads:
        yield []
        return
    from itertools import combinations

    first, others = heads[0], heads[1:]
    for chosen in combinations(others, size - 1):
        left = [head for head in others if head not in chosen]
        for groups in _partitions(left, size):
            yield [[first, *chosen], *groups]


def _total(costs: torch.Tensor, groups: list[list[int]]) -> float:
    index = torch.tensor(groups)
    return float(costs[index[:, :, None], index[:, None, :]].sum())


def _greedy(costs: torch.Tensor, size: int, first: int) -> list[list[int]]:
    left = [(first + i) % len(costs) for i in range(len(costs))]
    groups = []
    while left:
        group = [left.pop(0)]
        while len(group) < size:
            group.append(min(left, key=lambda head: float(costs[head, group].sum())))
            left.remove(group[-1])
        groups.append(group)
    return groups


def _swap(costs: torch.Tensor, groups: list[list[int]]) -> list[list[int]]:
    size, flat = len(groups[0]), torch.tensor(groups).flatten()
    heads = len(flat)
    of = torch.arange(heads) // size
    apart = of[:, None] != of
    for _ in range(10 * heads):
        c = costs[flat][:, flat]
        to = c.view(heads, heads // size, size).sum(-1)  # [n, groups]: cost of a head with the heads of a group
        own = to.gather(1, of[:, None])
        moved = to[:, of] - own  # [i, j]: what head i costs more in the group of j, where j still counts
        gain = moved + moved.t() - 2 * c
        gain = torch.where(apart, gain, torch.zeros_like(gain))
        best = int(gain.argmin())
        i, j = divmod(best, heads)
        if float(gain[i, j]) >= -1e-12 * float(costs.abs().max()):
            break
        flat[[i, j]] = flat[[j, i]]
    return flat.view(-1, size).tolist()
