"""Sizes of latents and rotary keys: proposed from a config, or shared out among layers by what they cost."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

STEP = 8  # sizes are multiples of it, for kernels and for codecs
# Share of a layer's numbers that the rotary key gets: proposed, and tried.
_ROTARY = 0.3
_TRIED = (0.2, 0.27, 0.34, 0.42)
_BUDGETS = (1.0,)


@dataclass(frozen=True)
class MLAPlan:
    """Sizes for `convert_to_mla`.

    Attributes:
        kv_lora_rank, qk_rope_head_dim: numbers of the latent and of the rotary key.
        width: numbers of a token's keys, and of its values, before.
        searched: whether layers may get other sizes of the same sum.
    """

    kv_lora_rank: int
    qk_rope_head_dim: int
    width: int
    searched: bool = False

    @property
    def kept(self) -> float:
        """Share of the cached bytes."""
        return (self.kv_lora_rank + self.qk_rope_head_dim) / (2 * self.width)


def plan_mla(config: Any, kv_keep: float = 0.5) -> MLAPlan:
    """Propose sizes that keep the share `kv_keep` of the cached bytes, the same for all layers.

    About three tenths go to the rotary key, which has been near the best on the models that were tried.

    Raises `ValueError` for a share outside of (0, 1] or too small to hold anything.
    """
    config = config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return complete(heads * size, None, None, kv_keep, searched=False)


def complete(
    width: int,
    rank: int | None,
    rope: int | None,
    keep: float | None,
    searched: bool = True,
    widest: int | None = None,
) -> MLAPlan:
    """The missing ones of rank, rope and share. The rotary key has `widest` numbers at most."""
    most = width if widest is None else widest
    check_share(keep)
    if rank is None and rope is None and keep is None:
        keep = 0.5
    if keep is not None and rank is not None and rope is not None:
        raise ValueError("give `kv_keep`, or both sizes, not all three")
    if rope is not None and (rope < 2 or rope % 2 or rope > most):
        size = "KV heads x head size" if widest is None else "head size: default RoPE has each frequency once"
        raise ValueError(f"`qk_rope_head_dim` must be even, from 2 to {most} ({size}), got {rope}")
    budget = None if keep is None else round(2 * width * keep)
    if rope is None:
        if budget is None:
            assert rank is not None
            rope = min(most, max(2, 2 * width - rank))
        elif rank is not None:
            rope = (budget - rank) // 2 * 2
        elif keep == 1:
            rope = most  # lossless, if all of the keys can turn
        else:
            rope = min(most, max(2, _rounded(_ROTARY * budget, budget)))
        if rope < 2 or rope > most:
            raise ValueError(
                f"`kv_lora_rank={rank}` and `kv_keep={keep}` leave {rope} numbers for the rotary key, which must have "
                f"from 2 to {most}"
            )
        free = rank is None and keep is not None and keep < 1
    else:
        free = False
    full = 2 * width - rope
    if rank is None:
        rank = full if budget is None else budget - rope
    if budget is not None and not 1 <= rank <= full:
        raise ValueError(
            f"`kv_keep={keep}` keeps {budget} of a token's {2 * width} numbers: too few for a rotary key of {rope} and "
            "a latent. Keep more"
        )
    if not 1 <= rank <= full:
        raise ValueError(
            f"`kv_lora_rank` must be from 1 to {full} with `qk_rope_head_dim={rope}` (a token has {2 * width} "
            f"numbers), got {rank}"
        )
    return MLAPlan(rank, rope, width, searched and free)


def check_share(keep: float | None) -> None:
    if keep is not None and not (isinstance(keep, (int, float)) and 0 < keep <= 1):
        raise ValueError(f"`kv_keep` must be a number in (0, 1], got {keep!r}")


def _rounded(x: float, budget: int) -> int:
    step = STEP if budget >= 4 * STEP else 2
    return max(step, round(x / step) * step)


def grid(width: int, plan: MLAPlan, by_layer: bool, widest: int | None = None) -> Iterator[tuple[int, list[int]]]:
    """Rotary sizes to try (of `widest` numbers at most), and for each the ranks."""
    budget = round(2 * width * plan.kept)
    budgets = (
        sorted({min(2 * width, _rounded(budget * b, budget)) for b in _BUDGETS} | {budget}) if by_layer else [budget]
    )
    for rope in sorted({min(widest or width, _rounded(budget * share, budget)) for share in _TRIED}):
        ranks = [b - rope for b in budgets if 1 <= b - rope <= 2 * width - rope]
        if ranks:
            yield rope, ranks


def allot(curves: dict[str, dict[tuple[int, int], float]], plan: MLAPlan, by_layer: bool) -> dict[str, tuple[int, int]]:
    """For each layer `(rank, rope)`, such that the sum of the errors is small under the plan's mean size."""
    if not by_layer:
        total: dict[tuple[int, int], float] = {}
        for curve in curves.values():
            for sizes, error in curve.items():
                total[sizes] = total.get(sizes, 0.0) + error
        rope, rank = min(total, key=lambda sizes: total[sizes])
        return {name: (rank, rope) for name in curves}
    # The best error for each number of elements, and of these the ones on the lower convex hull.
    hulls: dict[str, list[tuple[int, float, tuple[int, int]]]] = {}
    for name, curve in curves.items():
        best: dict[int, tuple[float, tuple[int, int]]] = {}
        for (rope, rank), error in curve.items():
            best[rope + rank] = min(best.get(rope + rank, (math.inf, (0, 0))), (error, (rank, rope)))
        hull: list[tuple[int, float, tuple[int, int]]] = []
        for size in sorted(best):
            point = (size, *best[size])
            if hull and point[1] >= hull[-1][1]:
                continue
            while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], point):
                hull.pop()
            hull.append(point)
        hulls[name] = hull
    left = round(plan.kept * 2 * plan.width) * len(curves) - sum(hull[0][0] for hull in hulls.values())
    at = dict.fromkeys(hulls, 0)
    steps = [(_slope(hull[0], hull[1]), name) for name, hull in hulls.items() if len(hull) > 1]
    heapq.heapify(steps)
    while steps:
        _, name = heapq.heappop(steps)
        hull, i = hulls[name], at[name]
        more = hull[i + 1][0] - hull[i][0]
        if more > left:
            continue
        left -= more
        at[name] = i + 1
        if i + 2 < len(hull):
            heapq.heappush(steps, (_slope(hull[i + 1], hull[i + 2]), name))
    chosen = {name: hull[at[name]][2] for name, hull in hulls.items()}
    # What is left over goes to latents.
    for name, (rank, rope) in chosen.items():
        more = min(left // STEP * STEP, STEP, 2 * plan.width - rope - rank)
        if more > 0:
            chosen[name] = (rank + more, rope)
            left -= more
    return chosen


def _slope(a: tuple[int, float, Any], b: tuple[int, float, Any]) -> float:
    """Change of the error by element: negative."""
    return (b[1] - a[1]) / (b[0] - a[0])
