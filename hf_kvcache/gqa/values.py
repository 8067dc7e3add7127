"""One value for a group of heads: what `o_proj` makes of it decides which of its directions are kept."""

from __future__ import annotations

import torch

from ..mla.factor import _roots
from ..mla.host import Host

_STEPS = 100


class ValueFit:
    """The values of one layer's heads.

    Args:
        gram: `[n, n]` second moment of all values.
    """

    def __init__(self, host: Host, gram: torch.Tensor) -> None:
        self.size, group = host.head_dim, host.heads // host.kv_heads
        out = host.module.o_proj.weight.detach().double().cpu().view(-1, host.heads, self.size)
        used = torch.einsum("ohd,ohe->hde", out, out)
        self.used = used.view(host.kv_heads, group, self.size, self.size).sum(1)  # [Hkv, D, D]
        self.blocks = gram.view(host.kv_heads, self.size, host.kv_heads, self.size).transpose(1, 2)  # [Hkv, Hkv, D, D]
        self.group = group

    def energy(self, members: list[int]) -> float:
        """Mean square of what the values of these heads add to the output, each for itself."""
        return float(sum((self.used[kv] * self.blocks[kv, kv]).sum() for kv in members))

    def loss(self, members: list[int], share: torch.Tensor, back: torch.Tensor) -> float:
        """Mean square of the error, for `share` `[k, D, D]` and `back` `[k, D, D]` (shared value to a head's)."""
        joint = torch.cat(list(share), dim=1)
        total = 0.0
        for i, kv in enumerate(members):
            error = -back[i] @ joint
            error[:, i * self.size : (i + 1) * self.size] += torch.eye(self.size, dtype=torch.float64)
            total += float((self.used[kv] * (error @ self._joined(members) @ error.t())).sum())
        return max(0.0, total)

    def fit(self, members: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """`share` and `back` with the smallest loss: the principal components, weighted by `o_proj`."""
        root, inverse = _roots(self.used[members])
        root, inverse = torch.block_diag(*root), torch.block_diag(*inverse)
        vectors = torch.linalg.eigh(root @ self._joined(members) @ root)[1][:, -self.size :]
        count = len(members)
        share, back = vectors.t() @ root, inverse @ vectors
        # Any basis of these directions is as good; take the one closest to the heads' own, at their own scale, which is
        # kinder to codecs than one whose first channels hold everything.
        turn = polar(back.view(count, self.size, self.size).sum(0).t())
        share, back = turn.t() @ share, back @ turn
        own = float(self._joined(members).diagonal().mean())
        scale = (own / float((share @ self._joined(members) @ share.t()).diagonal().mean())) ** 0.5
        share, back = share * scale, back / scale
        return share.view(self.size, count, self.size).transpose(0, 1), back.view(count, self.size, self.size)

    def best_loss(self, members: list[int]) -> float:
        root = torch.block_diag(*_roots(self.used[members])[0])
        values = torch.linalg.eigvalsh(root @ self._joined(members) @ root)
        return float(values[: -self.size].clamp(min=0).sum())

    def turns(self, members: list[int]) -> torch.Tensor:
        """Orthogonal `[k, D, D]` that bring the heads as close to their common mean as can be (Procrustes)."""
        blocks = self.blocks[members][:, members]
        # From the principal directions, which are the answer where the heads are turned copies of each other.
        vectors = torch.linalg.eigh(self._joined(members))[1][:, -self.size :]
        turns = torch.stack([polar(part.t()) for part in vectors.view(len(members), self.size, self.size)])
        last = -1.0
        for _ in range(_STEPS):
            for i in range(len(members)):
                others = sum(turns[j] @ blocks[j, i] for j in range(len(members)) if j != i)
                turns[i] = polar(others)  # type: ignore[arg-type]
            near = float(torch.einsum("iab,ijbc,jac->", turns, blocks, turns))
            if near - last <= 1e-9 * abs(near):
                break
            last = near
        return turns

    def _joined(self, members: list[int]) -> torch.Tensor:
        size = len(members) * self.size
        return self.blocks[members][:, members].transpose(1, 2).reshape(size, size)


def polar(matrix: torch.Tensor) -> torch.Tensor:
    """The orthogonal matrix closest to it."""
    left, _, right = torch.linalg.svd(matrix)
    return left @ right
