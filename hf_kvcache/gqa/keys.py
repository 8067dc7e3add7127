"""One key for a group of heads: which maps of queries and keys keep their logits.

A logit at distance `d` is `sum_a q_a conj(k_a) exp(i w_a d)` over complex channels `a`: two conjugate ones for each
rotary pair, real ones with `w = 0` for channels that are not rotated. The shared key is the sum of `B_k k` over the
keys `k` of the group, and head `h` asks it `A_h q_h`. With queries, keys and distances taken as independent, the mean
square of the logits' error is quadratic in either map alone, and the second moments of what the map is applied to
cancel from its solution:

    A_h = (conj(P_h) o S)^-1 (conj(P_h) o T_h)       S, T_h: moments of shared keys with themselves, and with the head's
    B_k = (sum_h P_h o A_h Q_h A_h*)^-1 sum_{h of k} P_h o A_h Q_h

with `o` the product of entries, `Q_h` the moments of the head's queries, and `P_h[a, b]` the mean of
`exp(i (w_a - w_b) d)` over the distances at which the head attends. Both are as small as a head. All in float64.
"""

from __future__ import annotations

import torch

from ..mla.host import Host
from ..mla.moments import Moments

_STEPS = 200
_RIDGE = 1e-9  # towards the step before, against the mean diagonal
_ENOUGH = 1e-4  # relative fall of the loss in one step below which the search ends


class KeyFit:
    """The keys of one layer's heads, in complex channels.

    Args:
        gram: `[n, n]` second moment of all keys before rotation.
    """

    def __init__(self, host: Host, moments: Moments, gram: torch.Tensor, importance: torch.Tensor) -> None:
        self.size, self.half = host.head_dim, host.rotary_dim // 2
        self.group = host.heads // host.kv_heads
        self.basis = complex_channels(self.size, self.half)  # [D, D]
        turns = moments.phases.conj()  # [T, F]: exp(i w d)
        still = turns.new_ones(len(turns), self.size - 2 * self.half)
        waves = torch.cat([turns, turns.conj(), still], dim=1)  # [T, D]
        weight = moments.distance[:, : len(turns)].to(torch.complex128)
        self.waves = torch.einsum("ht,ta,tb->hab", weight, waves, waves.conj())  # [H, D, D]
        back = self.basis.conj().t()
        queries = moments.queries * importance[:, None, None]
        self.queries = self.basis @ queries.to(torch.complex128) @ back
        blocks = gram.view(host.kv_heads, self.size, host.kv_heads, self.size).transpose(1, 2)
        self.keys = self.basis @ blocks.to(torch.complex128) @ back  # [Hkv, Hkv, D, D]

    def heads_of(self, members: list[int]) -> list[int]:
        """Query heads of these KV heads, in order."""
        return [kv * self.group + i for kv in members for i in range(self.group)]

    def energy(self, members: list[int]) -> float:
        """Sum over the query heads of these KV heads of the mean square of their logits."""
        heads = self.heads_of(members)
        own = torch.stack([self.keys[kv, kv] for kv in members]).repeat_interleave(self.group, dim=0)
        return float((self.waves[heads] * self.queries[heads] * own.conj()).sum().real)

    def loss(self, members: list[int], ask: torch.Tensor, share: torch.Tensor) -> float:
        """Mean square of the logits' error; `ask` `[h, D, D]` and `share` `[k, D, D]` in complex channels."""
        heads = self.heads_of(members)
        shared, crossed = self._shared(members, share)
        asked = ask @ self.queries[heads]
        cross = (self.waves[heads] * asked * crossed.conj()).sum().real
        own = (self.waves[heads] * (asked @ ask.mH) * shared.conj()).sum().real
        return max(0.0, self.energy(members) - 2 * float(cross) + float(own))

    def fit(
        self, members: list[int], ask: torch.Tensor, share: torch.Tensor, steps: int = _STEPS
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Better `ask` and `share`, from these on. Each step can only lower the loss; exact maps stay as they are."""
        heads = self.heads_of(members)
        waves, queries = self.waves[heads], self.queries[heads]
        loss, total = self.loss(members, ask, share), self.energy(members)
        for _ in range(steps):
            if loss <= 1e-20 * total:
                break
            shared, crossed = self._shared(members, share)
            new_ask = ask + _solve(waves.conj() * shared, waves.conj() * crossed, ask)
            asked = waves * (new_ask @ queries)
            both = (waves * (new_ask @ queries @ new_ask.mH)).sum(0)
            wanted = asked.view(len(members), self.group, self.size, self.size).sum(1)
            new_share = share + _solve(both, wanted, share)
            new = self.loss(members, new_ask, new_share)
            if new >= loss:
                break
            ask, share = new_ask, new_share
            if loss - new < _ENOUGH * loss:
                break
            loss = new
        return ask, share

    def start(self, members: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """For each frequency the first principal component of the heads' complex numbers, weighted by their queries.

        Exact where the heads are one head turned by rotations that commute with the rotary embedding.
        """
        count, half = len(members), self.half
        square = self.queries.diagonal(dim1=1, dim2=2).real.view(-1, self.group, self.size).sum(1)[members]
        square = square.clamp(min=1e-12 * float(square.max()) + 1e-300)
        keys = self.keys[members][:, members]
        ask = torch.zeros(count, self.size, self.size, dtype=torch.complex128)
        share = torch.zeros_like(ask)
        f = torch.arange(half)
        root = square[:, :half].t().sqrt()  # [F, k]
        covariance = keys[:, :, f, f].permute(2, 0, 1)
        vectors = torch.linalg.eigh(root[:, :, None] * covariance * root[:, None, :])[1][..., -1]  # [F, k]
        scale = root.square().mean(1, keepdim=True).sqrt()
        analyse, synthesise = (vectors.conj() * root / scale).t(), (vectors / root * scale).t()
        share[:, f, f], share[:, f + half, f + half] = analyse, analyse.conj()
        ask[:, f, f], ask[:, f + half, f + half] = synthesise.conj(), synthesise
        rest = self.size - 2 * half
        if rest:
            root = square[:, 2 * half :].sqrt().flatten()
            block = keys[:, :, 2 * half :, 2 * half :].real.transpose(1, 2).reshape(count * rest, count * rest)
            vectors = torch.linalg.eigh(root[:, None] * block * root)[1][:, -rest:]
            down = (vectors.t() * root).view(rest, count, rest).transpose(0, 1)
            up = (vectors / root[:, None]).view(count, rest, rest)
            share[:, 2 * half :, 2 * half :] = down.to(torch.complex128)
            ask[:, 2 * half :, 2 * half :] = up.transpose(1, 2).to(torch.complex128)
        return ask.repeat_interleave(self.group, dim=0), share

    def turns(self, members: list[int]) -> torch.Tensor:
        """`[k, F]` of modulus one: each head's phases against what the heads have in common."""
        _, share = self.start(members)
        phase = share.diagonal(dim1=1, dim2=2)[:, : self.half]
        return phase / phase.abs().clamp(min=1e-300)

    def real(self, maps: torch.Tensor) -> torch.Tensor:
        """Maps in complex channels `[..., D, D]` as those of the real ones."""
        return (self.basis.mH @ maps @ self.basis).real

    def complex(self, maps: torch.Tensor) -> torch.Tensor:
        return self.basis @ maps.to(torch.complex128) @ self.basis.mH

    def _shared(self, members: list[int], share: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Moments of the shared key with itself `[D, D]`, and with the keys of each query head `[h, D, D]`."""
        crossed = torch.einsum("kab,kjbc->jac", share, self.keys[members][:, members])
        shared = torch.einsum("jac,jbc->ab", crossed, share.conj())
        return shared, crossed.repeat_interleave(self.group, dim=0)


def complex_channels(size: int, half: int) -> torch.Tensor:
    """Unitary `[D, D]`: channels `i`, `i + half` to a complex number and its conjugate, the rest as they are."""
    basis = torch.eye(size, dtype=torch.complex128)
    f, root = torch.arange(half), 0.5**0.5
    basis[f, f], basis[f, f + half] = root, 1j * root
    basis[f + half, f], basis[f + half, f + half] = root, -1j * root
    return basis


def _solve(matrix: torch.Tensor, wanted: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
    """The step from `now` to the solution of `matrix @ x = wanted`; none where `now` solves it."""
    scale = matrix.diagonal(dim1=-2, dim2=-1).real.mean(-1)[..., None, None]
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype)
    return torch.linalg.solve(matrix + _RIDGE * scale * eye, wanted - matrix @ now)
