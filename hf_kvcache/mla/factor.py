"""From moments to matrices: which part of the keys stays rotary, and the latent that carries all the rest.

A rotary embedding multiplies the complex number that two channels of a key make by a phase, the same one in every head.
So any complex matrix over the *heads* commutes with it, one for each frequency: `Components` chooses them such that few
components carry most of the logits (a Hermitian PCA, weighted by the queries). The components that lose most if they
are taken out of the rotation stay in it, and are one rotary key for all heads. In what is left, every phase is replaced
by the number that is closest to it on average over the distances at which a head attends; and as nothing in it turns
any more, it goes through one low-rank map together with the values. All in float64.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .host import Host
from .moments import Moments

_FLOOR = 1e-6  # least eigenvalue of a weight, against its largest
FOLD = 4  # neighbouring frequencies that the baseline `freqfold` takes for one
_RIDGE = 1e-5  # added to second moments, against their mean diagonal: directions that calibration never saw


@dataclass(frozen=True)
class Recipe:
    """What a conversion looks at. The defaults are this library's; `BASELINES` are what it is measured against.

    Attributes:
        data: whether moments come from calibration, or from the weights alone.
        by_attention: whether tokens count by the attention they receive.
        real: whether only real rotations mix the heads (as in TransMLA), or complex matrices.
        positions: whether the distances at which heads attend are looked at.
        weighted: whether errors count by the queries and by `o_proj`, or all alike.
        balance: how much the errors of logits count against those of values. Where errors all count alike: whether keys
            are brought to the mean square of the values.
        fold: how many neighbouring frequencies are taken for one (FreqFold): their components mix, and turn with the
            middle one.
    """

    data: bool = True
    by_attention: bool = True
    real: bool = False
    positions: bool = True
    weighted: bool = True
    balance: float = 1.0
    fold: int = 1


BASELINES = {
    "transmla": Recipe(by_attention=False, real=True, positions=False, weighted=False),
    "freqfold": Recipe(by_attention=False, real=True, positions=False, weighted=False, fold=FOLD),
    "svd": Recipe(data=False, real=True, positions=False, weighted=False, balance=0.0),
}


@dataclass
class Factors:
    """The matrices of one converted layer, over keys and values `[n]` and queries `[D]` as they are before rotation.

    Attributes:
        frequencies: `[P / 2]` index of each rotary component's frequency.
        rope_key: `[P, n]` keys to the rotary key.
        rope_query: `[H, P, D]` a head's query to that for the rotary key.
        nope_query: `[H, D, D]` a head's query to that for keys without position.
        encode: `[R, 2n]` keys and values to the latent.
        keys, values: `[H, D, R]` the latent to a head's key without position, and to its value.
        offset: `[H, D]` what is added to a head's output, or None.
        kept: share of the logits' energy that stays rotary, and of the weighted moments that the latent carries.
    """

    frequencies: torch.Tensor
    rope_key: torch.Tensor
    rope_query: torch.Tensor
    nope_query: torch.Tensor
    encode: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    offset: torch.Tensor | None
    kept: tuple[float, float]
    energies: torch.Tensor | None = None  # of the latent's numbers, all of them, descending
    means: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def rank(self) -> int:
        return self.encode.shape[0]

    @property
    def rope(self) -> int:
        return self.rope_key.shape[0]

    def at(self, rank: int) -> Factors:
        """The same with the first `rank` numbers of the latent only."""
        encode, values, offset = self.encode[:rank], self.values[..., :rank], self.offset
        if self.means is not None:
            mean, value_mean = self.means
            offset = value_mean - values @ (encode @ mean)
        share = 1.0 if self.energies is None else float(self.energies[:rank].sum() / self.energies.sum())
        kept = (self.kept[0], share)
        return replace(self, encode=encode, keys=self.keys[..., :rank], values=values, offset=offset, kept=kept)


class Components:
    """The rotary components of one layer, and what each of them loses without its rotation.

    Attributes:
        groups: `[F, M]` frequencies that are taken for one; `M` is 1 but for one baseline, and `F` that of all.
        analyse: `[F, C, Hkv * M]` complex: keys of a frequency to its components.
        synthesise: `[F, Hkv * M, C]` complex: back.
        loss: `[F, C]` mean square of the logits' error when a component does not turn.
        energy: `[F, C]` its share in the mean square of the logits.
        phase: `[H, F]` complex: what stands for the rotation then.
    """

    def __init__(self, host: Host, moments: Moments, recipe: Recipe = Recipe()) -> None:
        heads, n, half = host.kv_heads, host.width, host.head_dim // 2
        if half % recipe.fold:
            raise ValueError(f"{half} frequencies cannot be folded by {recipe.fold}")
        self.groups = torch.arange(half).view(-1, recipe.fold)
        f, g = self.groups[:, :, None], self.groups[:, None]
        gram = moments.gram[:n, :n].view(heads, 2, half, heads, 2, half)
        real = _by_head(gram[:, 0, f, :, 0, g] + gram[:, 1, f, :, 1, g])
        imaginary = _by_head(gram[:, 1, f, :, 0, g] - gram[:, 0, f, :, 1, g])
        if recipe.real:
            imaginary = torch.zeros_like(imaginary)
        covariance = torch.complex(real, imaginary)  # [F, Hkv, Hkv]
        square = moments.queries.diagonal(dim1=1, dim2=2).view(heads, -1, 2, half).sum((1, 2))
        square = square.view(heads, -1, recipe.fold).transpose(0, 1).flatten(1)  # [F, Hkv * M]
        if not recipe.weighted:
            square = square.mean(1, keepdim=True).expand(-1, heads * recipe.fold)
        root = square.clamp(min=1e-12 * float(square.max()) + 1e-300).sqrt()
        energy, basis = torch.linalg.eigh(root[:, :, None] * covariance * root[:, None, :])
        energy, basis = energy.flip(-1).clamp(min=0), basis.flip(-1)
        scale = float(square.mean().sqrt())
        self.analyse = basis.conj().transpose(1, 2) * root[:, None, :] / scale
        self.synthesise = basis / root[:, :, None] * scale
        self.energy = energy
        lengths = moments.phases.shape[0]
        self.phase = moments.distance[:, :lengths].to(torch.complex128) @ moments.phases
        # Averaged over heads: those of a group share their components.
        still = (1 - self.phase.abs().square().mean(0)).clamp(min=1e-9)
        if not recipe.positions:
            self.phase, still = torch.ones_like(self.phase), torch.ones_like(still)
        still = still.view_as(self.groups).mean(1)
        self.loss = energy * still[:, None]

    def choose(self, count: int) -> torch.Tensor:
        """Bool `[F, C]`: the `count` components with the largest loss."""
        kept = torch.zeros(self.loss.numel(), dtype=torch.bool)
        kept[self.loss.flatten().topk(count).indices] = True
        return kept.view_as(self.loss)


def choose_alike(layers: list[Components], count: int) -> torch.Tensor:
    """The same components for all layers: as `choose`, by the sum of their shares in each layer's loss."""
    total = torch.stack([layer.loss / layer.loss.sum() for layer in layers]).sum(0)
    kept = torch.zeros(total.numel(), dtype=torch.bool)
    kept[total.flatten().topk(count).indices] = True
    return kept.view_as(total)


def choose_default(layers: list[Components], count: int) -> torch.Tensor:
    """The first component of each of `count` evenly spaced frequencies, beginning with the highest: default RoPE."""
    total = torch.stack([layer.loss / layer.loss.sum() for layer in layers]).sum(0)[:, 0]
    size = len(total)
    steps = range(1, max(1, (size - 1) // max(1, count - 1)) + 1)
    best = max(steps, key=lambda step: float(total[: step * (count - 1) + 1 : step].sum()))
    kept = torch.zeros_like(layers[0].loss, dtype=torch.bool)
    kept[: best * (count - 1) + 1 : best, 0] = True
    return kept


def factorize(
    host: Host,
    moments: Moments,
    components: Components,
    kept: torch.Tensor,
    recipe: Recipe = Recipe(),
    center: bool = False,
) -> Factors:
    """All of the latent for these rotary components; see `Factors.at` for fewer of its numbers.

    Args:
        center: whether the latent leaves the mean of keys and values to an offset.
    """
    heads, size, n = host.kv_heads, host.head_dim, host.width
    half, group = size // 2, host.heads // host.kv_heads
    f, g = components.groups[:, :, None], components.groups[:, None]
    rope_key, rope_query, frequencies = _rotary(host, components, kept)
    mask = kept.to(torch.complex128)
    turning = components.synthesise @ (mask[:, :, None] * components.analyse)
    rest = torch.eye(n, dtype=torch.float64).view(heads, 2, half, heads, 2, half).clone()
    for i, j, part in ((0, 0, turning.real), (1, 1, turning.real), (0, 1, -turning.imag), (1, 0, turning.imag)):
        rest[:, i, f, :, j, g] -= part.view(-1, heads, f.shape[1], heads, f.shape[1]).permute(0, 2, 4, 1, 3)
    rest = rest.view(n, n)
    if bool(kept.all()):
        rest.zero_()
    phase = components.phase.conj() * host.table_scale**2  # [H, F]
    nope_query = torch.zeros(host.heads, 2, half, 2, half, dtype=torch.float64)
    f = torch.arange(half)
    for i, j, part in ((0, 0, phase.real), (1, 1, phase.real), (0, 1, -phase.imag), (1, 0, phase.imag)):
        nope_query[:, i, f, j, f] = part
    nope_query = nope_query.view(host.heads, size, size)

    asked = (nope_query @ moments.queries @ nope_query.transpose(1, 2)).view(heads, group, size, size).sum(1)
    out = host.module.o_proj.weight.detach().double().cpu().view(-1, host.heads, size)
    used = torch.einsum("ohd,ohe->hde", out, out).view(heads, group, size, size).sum(1)
    if not recipe.weighted:
        asked = used = torch.eye(size, dtype=torch.float64).expand(heads, -1, -1)
    gram = moments.gram - torch.outer(moments.mean, moments.mean) if center else moments.gram
    gram = gram.clone()
    for part in (slice(None, n), slice(n, None)):
        gram.diagonal()[part] += _RIDGE * gram.diagonal()[part].mean()
    both = torch.block_diag(rest, torch.eye(n, dtype=torch.float64))
    gram = both @ gram @ both.t()
    # An error of the logits moves the output by as much as the values differ.
    spread = float((torch.block_diag(*used) * gram[n:, n:]).sum()) / host.heads
    balance = recipe.balance * spread * host.scaling**2
    if not recipe.weighted:
        balance = 1.0
        if recipe.balance:  # keys and values of the same mean square
            balance = float(gram.diagonal()[n:].sum() / gram.diagonal()[:n].sum().clamp(min=1e-300))
    key_root, key_inverse = _roots(asked * balance)
    value_root, value_inverse = _roots(used)
    root = torch.block_diag(*key_root, *value_root)
    inverse = torch.block_diag(*key_inverse, *value_inverse)
    weighed = root @ gram @ root
    full = 2 * n - rope_key.shape[0]
    if bool(kept.all()):
        # Nothing is left of the keys: their rounding errors must not find their way into directions of the values that
        # calibration saw little of.
        energies, vectors = torch.linalg.eigh(weighed[n:, n:])
        vectors = torch.cat([torch.zeros_like(vectors), vectors])
    else:
        energies, vectors = torch.linalg.eigh(weighed)
    energies, vectors = energies.flip(0).clamp(min=0), vectors.flip(1)[:, :full]
    decode = (inverse @ vectors).view(2, heads, 1, size, full).expand(-1, -1, group, -1, -1).flatten(1, 2)
    encode = vectors.t() @ root @ both
    means = None
    if center:
        value_mean = moments.mean[n:].view(heads, 1, size).expand(-1, group, -1).flatten(0, 1)
        means = (moments.mean, value_mean)
    share = 1 - float((components.loss * ~kept).sum() / components.energy.sum())
    return Factors(
        frequencies, rope_key, rope_query, nope_query, encode, decode[0], decode[1], None, (share, 1.0), energies, means
    ).at(full)


def _rotary(host: Host, components: Components, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`rope_key`, `rope_query` and `frequencies` of the kept components."""
    heads, size, half = host.kv_heads, host.head_dim, host.head_dim // 2
    which, component = kept.nonzero(as_tuple=True)
    count, fold = len(which), components.groups.shape[1]
    analyse = components.analyse[which, component].view(count, heads, fold)
    synthesise = components.synthesise[which, :, component].view(count, heads, fold)
    synthesise = synthesise.repeat_interleave(host.heads // heads, dim=1)
    key = torch.zeros(2, count, heads, 2, half, dtype=torch.float64)
    index = torch.arange(count)
    query = torch.zeros(host.heads, 2, count, 2, half, dtype=torch.float64)
    for m, frequencies in enumerate(components.groups[which].t()):
        for i, j, sign, part in ((0, 0, 1, "real"), (1, 1, 1, "real"), (0, 1, -1, "imag"), (1, 0, 1, "imag")):
            key[i, index, :, j, frequencies] = sign * getattr(analyse[..., m], part)
            # Queries are multiplied by the conjugate.
            query[:, i, index, j, frequencies] = (-sign if part == "imag" else 1) * getattr(
                synthesise[..., m], part
            ).t()
    middle = components.groups[which, fold // 2]
    return key.view(2 * count, heads * size), query.view(host.heads, 2 * count, size), middle


def _by_head(pairs: torch.Tensor) -> torch.Tensor:
    """`[F, M, M, Hkv, Hkv]` as `[F, Hkv * M, Hkv * M]`."""
    return pairs.permute(0, 3, 1, 4, 2).flatten(3, 4).flatten(1, 2)


def _roots(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Square roots of `[N, D, D]` symmetric matrices, and their inverses."""
    values, vectors = torch.linalg.eigh(matrices)
    values = values.clamp(min=_FLOOR * float(values.max()) + 1e-300).sqrt()
    back = vectors.transpose(1, 2)
    return (vectors * values[:, None, :]) @ back, (vectors / values[:, None, :]) @ back
