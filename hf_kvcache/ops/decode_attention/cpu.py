"""The two halves of attention over packed rows on the CPU, with torch's own int4 matrix product: no compiler needed.

The product takes 4-bit codes in the layout of `ops.packed` and bfloat16 activations, and adds up in float32. Scales
stay outside of it: one per token multiplies the logits (keys) or the probabilities (values), one per channel the
query. Codes are read relative to the middle of their range, so that what is rounded to bfloat16 is small. Codes of 2
and 3 bits become 4-bit ones first, head by head; 8-bit ones are two 4-bit products in one.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from ..packed import SCALE_STEP, Format, Packed, nibbles

if TYPE_CHECKING:
    from .dispatch import PackedRows

PAGE = 256  # tokens of one product where scales belong to channels


@lru_cache(maxsize=1)
def native_half() -> int | None:
    """Half the tile that the int4 product of this CPU reads, or None where it has no fast one."""
    capability = torch.backends.cpu.get_cpu_capability()
    if not hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu"):
        return None
    return {"AVX512": 32, "AVX2": 16}.get(capability)


def supports(fmt: Format, role: str, dim: int, half: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether these functions take rows of this kind (else: the reference)."""
    # Value channels are the columns of the product, which come in whole blocks.
    fits = (
        dim % (32 if role == "keys" else 2 * half) == 0
        and fmt.kind in ("affine", "symmetric")
        and half == native_half()
    )
    return fits and device.type == "cpu" and dtype == torch.bfloat16


def centre(fmt: Format) -> float:
    return (2**fmt.bits - 1) / 2


def _unit(bits: int, groups: int, columns: int) -> torch.Tensor:
    """Scales and zeros `[groups, columns, 2]` that make the product read a code as `code - centre`."""
    zero = 8 - (7.5 if bits == 8 else (2**bits - 1) / 2)
    return torch.tensor([1.0, zero], dtype=torch.bfloat16).expand(groups, columns, 2).contiguous()


def _product(rows: torch.Tensor, codes: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """`rows` bf16 `[M, K]` times codes of `columns` columns and K rows of nibbles: bf16 `[M, columns]`."""
    size, unit = _constants(bits, rows.shape[1], columns)
    return torch.ops.aten._weight_int4pack_mm_for_cpu(rows, codes.view(columns, -1), size, unit)


@lru_cache(maxsize=64)
def _constants(bits: int, length: int, columns: int) -> tuple[int, torch.Tensor]:
    """Rows that share a scale, and the scales."""
    size = next(size for size in (256, 128, 64, 32) if length % size == 0)
    return size, _unit(bits, length // size, columns)


def _twice(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows for low nibbles and for high ones, where a code has both."""
    return torch.cat([rows, rows * 16], dim=-1) if bits == 8 else rows


def _heads(tensor: torch.Tensor) -> list[torch.Tensor]:
    """One tensor for each batch row and head."""
    return list(tensor.flatten(0, 1).unbind(0))


def packed_logits(query: torch.Tensor, keys: Packed, fmt: Format, length: int, half: int) -> torch.Tensor:
    """See `reference.packed_logits`."""
    tiles = -(-length // (2 * half))
    codes = [nibbles(head, fmt.bits) for head in _heads(keys.codes[:, :, :tiles])]
    if fmt.axis == "token":
        return _token_logits(query, codes, keys, fmt, length)
    return _channel_logits(query, codes, keys, fmt, length, 2 * half)


def _token_logits(
    query: torch.Tensor, codes: list[torch.Tensor], keys: Packed, fmt: Format, length: int
) -> torch.Tensor:
    """A scale for each token over groups of channels."""
    b, h, m, d = query.shape
    groups = d // fmt.group
    rows = query
    if groups > 1:
        # One row for each group of channels, zero elsewhere.
        eye = torch.eye(groups, dtype=query.dtype)[:, :, None]
        rows = (query.view(b, h, m, groups, 1, fmt.group) * eye).view(b, h, m * groups, d)
    rows = _twice(rows, fmt.bits)
    columns = codes[0].shape[0] * 2 * codes[0].shape[-1]
    pairs = zip(_heads(rows), codes, strict=True)
    raw = torch.stack([_product(mine, theirs, fmt.bits, columns) for mine, theirs in pairs])
    raw = raw.view(b, h, m, groups, columns)[..., :length]
    scale = keys.scale[:, :, :length].transpose(2, 3).float()  # [B, H, groups, N]
    logits = raw * scale[:, :, None]
    logits = logits.sum(3) if groups > 1 else logits[:, :, :, 0]
    if keys.zero is not None:
        base = keys.zero[:, :, :length].transpose(2, 3).float() + centre(fmt) * scale
        logits += query.float().view(b, h, m, groups, fmt.group).sum(-1) @ base
    return logits


def _channel_logits(
    query: torch.Tensor, codes: list[torch.Tensor], keys: Packed, fmt: Format, length: int, tile: int
) -> torch.Tensor:
    """A scale for each channel over groups of tokens: it goes into the query, which then differs by group.

    A page of several groups is one product with the queries of all of them, of which each group's own are taken.
    """
    b, h, m, d = query.shape
    group = fmt.group
    groups = -(-length // group)
    scale = keys.scale[:, :, :groups].float()  # [B, H, groups, D]
    scaled = _twice(
        (query.float()[:, :, None] * scale[:, :, :, None]).to(query.dtype), fmt.bits
    )  # [B, H, groups, M, D]
    page = math.lcm(tile, group)
    page *= max(1, PAGE // page)
    count = page // group
    whole = groups // count * count  # groups of full pages
    parts = []
    for rows, mine in zip(_heads(scaled), codes, strict=True):
        # [pages, count * M, D] against [pages, tiles of a page, ...]
        paged = rows[:whole].reshape(-1, count * m, rows.shape[-1]).unbind(0)
        tiles = mine[: whole * group // tile].unflatten(0, (-1, page // tile)).unbind(0) if whole else ()
        raw = [_product(q, c, fmt.bits, page) for q, c in zip(paged, tiles, strict=True)]
        out = []
        if raw:
            own = torch.stack(raw).view(-1, count, m, count, group).diagonal(dim1=1, dim2=3)  # [pages, M, G, count]
            out.append(own.permute(1, 0, 3, 2).reshape(m, -1))
        if whole < groups:
            left, rest = groups - whole, mine[whole * group // tile :]
            last = _product(rows[whole:].flatten(0, 1), rest, fmt.bits, rest.shape[0] * tile)
            last = torch.nn.functional.pad(last, (0, max(0, left * group - last.shape[1])))[:, : left * group]
            own = last.view(left, m, left, group).diagonal(dim1=0, dim2=2)  # [M, G, left]
            out.append(own.transpose(1, 2).reshape(m, -1))
        parts.append(torch.cat(out, dim=1)[:, :length])
    logits = torch.stack(parts).view(b, h, m, length).float()
    if keys.zero is not None:
        base = keys.zero[:, :, :groups].float() + centre(fmt) * scale
        constant = query.float() @ base.transpose(2, 3)  # [B, H, M, groups]
        logits += constant.repeat_interleave(group, dim=-1)[..., :length]
    return logits


def packed_weighted(probs: torch.Tensor, values: Packed, fmt: Format, dim: int, half: int) -> torch.Tensor:
    """See `reference.packed_weighted`."""
    b, h, m, length = probs.shape
    tile = 2 * half
    tiles = -(-length // tile)
    v = values.codes.shape[-1]
    groups = dim // fmt.group
    scale = values.scale[:, :, :length].transpose(2, 3).float()  # [B, H, groups, N]
    weights = probs.new_zeros(b, h, m, groups, tiles * tile, dtype=torch.bfloat16)
    torch.mul(probs[:, :, :, None], scale[:, :, None], out=weights[..., :length])
    if fmt.bits == 8:
        weights = _twice(weights.unflatten(-1, (tiles, tile)), 8)
    heads = []
    for rows, codes in zip(_heads(weights), _heads(values.codes[:, :, :, :tiles]), strict=True):
        flat = rows.reshape(m * groups, -1)
        blocks = [_product(flat, nibbles(block, fmt.bits), fmt.bits, 2 * v) for block in codes.unbind(0)]
        heads.append(blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=-1))
    raw = torch.stack(heads).float().view(b, h, m, groups, dim)
    if groups > 1:
        raw = raw.unflatten(-1, (groups, fmt.group)).diagonal(dim1=3, dim2=4).transpose(3, 4)
    output = raw.reshape(b, h, m, dim)
    if values.zero is not None:
        base = values.zero[:, :, :length].float() + centre(fmt) * scale.transpose(2, 3)  # [B, H, N, groups]
        output = output + (probs @ base).repeat_interleave(fmt.group, dim=-1)
    return output


class Steady:
    """What a step over packed rows needs and the step before needed too: the codes of each head, and constants.

    Only views, so what is written into the buffers is seen; where there are other buffers, or more rows, another one
    is made. For keys and values with one scale per token and no zero; `of` gives None for all others.
    """

    def __init__(self, packed: PackedRows, dim: int, value_dim: int) -> None:
        keys, values, half = packed.keys, packed.values, packed.half
        self.length = length = packed.length
        tiles = -(-length // (2 * half))
        self.tile = 2 * half
        self.columns = columns = tiles * 2 * half
        self.key_bits, self.value_bits = packed.key_format.bits, packed.value_format.bits
        self.key_turn, self.value_turn = packed.key_turn, packed.value_turn
        self.back = None if packed.value_turn is None else packed.value_turn.t()
        self.mean = None if packed.key_mean is None else packed.key_mean.flatten(0, 1)[:, None]  # [B * H, 1, D]
        self.key_constants = _constants(self.key_bits, dim * (2 if self.key_bits == 8 else 1), columns)
        self.width = 2 * values.codes.shape[-1]
        self.value_constants = _constants(self.value_bits, columns * (2 if self.value_bits == 8 else 1), self.width)
        self.key_codes = list(keys.codes[:, :, :tiles].flatten(0, 1).unbind(0))
        if self.key_bits == 4:
            self.key_codes = [codes.view(columns, -1) for codes in self.key_codes]
        self.value_codes = [
            [block if self.value_bits != 4 else block.view(self.width, -1) for block in head.unbind(0)]
            for head in values.codes[:, :, :, :tiles].flatten(0, 1).unbind(0)
        ]
        self.key_scale = _Scales(keys.scale, packed.key_base, length)
        self.value_scale = _Scales(values.scale, packed.value_base, length)

    @classmethod
    def of(cls, packed: PackedRows, dim: int, value_dim: int, dtype: torch.dtype) -> Steady | None:
        if packed.key_scale is not None:
            return None
        for role, fmt, size in (("keys", packed.key_format, dim), ("values", packed.value_format, value_dim)):
            if fmt.kind != "symmetric" or fmt.group != size:
                return None
            if not supports(fmt, role, size, packed.half, dtype, packed.keys.codes.device):
                return None
        return cls(packed, dim, value_dim)


class _Scales:
    """One scale per token, `[B * H, 1, length]`, as they are stored."""

    def __init__(self, scale: torch.Tensor, base: torch.Tensor | None, length: int) -> None:
        self.stored = scale[:, :, :length, 0].flatten(0, 1)[:, None]
        self.base = None if base is None else base.flatten(0, 1).view(torch.int32)

    def __call__(self) -> torch.Tensor:
        if self.base is None:
            return self.stored
        return torch.sub(self.base, self.stored, alpha=SCALE_STEP).view(torch.float32)


def attend(
    query: torch.Tensor,  # [B, Hq, Q, D], bf16
    scaling: torch.Tensor,  # float32 [1]: the scaling of the logits times log2(e)
    front: tuple[torch.Tensor, torch.Tensor] | None,
    packed: Steady,
    tail: tuple[torch.Tensor, torch.Tensor],
    visible: torch.Tensor | None,  # bool, broadcastable to [B, H, M, F + length + T]
) -> torch.Tensor:
    """The whole step where keys and values have one scale per token and no zero: `[B, Hq, Q, Dv]`, bf16.

    The same as the general way, in fewer and cheaper operations, of which there are dozens for little data: products
    are scaled straight into one buffer, which becomes the weights in place.
    """
    b, hq, q_len, d = query.shape
    h, value_dim = tail[0].shape[1], tail[1].shape[3]
    heads, m, length = b * h, hq // h * q_len, packed.length
    folded = torch.mul(query.reshape(heads, m, d), scaling)  # float32
    turned = folded if packed.key_turn is None else torch.matmul(folded, packed.key_turn)
    # Exact rows stand behind the packed ones here. An empty float32 tensor, or the float16 mean, makes `cat` convert.
    pairs = [tail] if front is None else [front, tail]
    keys = [k.flatten(0, 1) for k, _ in pairs]
    values = [v.flatten(0, 1) for _, v in pairs]
    keys.append(folded[:, :0] if packed.mean is None else packed.mean)
    small = torch.bmm(folded, torch.cat(keys, dim=1).transpose(1, 2))
    count = small.shape[2] - (packed.mean is not None)
    logits = folded.new_empty(heads, m, length + count)
    middle, exact = logits.narrow(2, 0, length), logits.narrow(2, length, count)
    if packed.mean is None:
        exact.copy_(small)
    else:
        # Packed logits lack the product with the mean; taking it from the others gives the same probabilities.
        torch.sub(small.narrow(2, 0, count), small.narrow(2, count, 1), out=exact)
    product = torch.ops.aten._weight_int4pack_mm_for_cpu.default
    size, unit = packed.key_constants
    raw = []
    for rows, codes in zip(turned.to(query.dtype).unbind(0), packed.key_codes, strict=True):
        if packed.key_bits != 4:
            rows, codes = _twice(rows, packed.key_bits), nibbles(codes, packed.key_bits).view(packed.columns, -1)
        raw.append(product(rows, codes, size, unit))
    weights = folded.new_empty(heads, m, packed.columns, dtype=torch.bfloat16)
    torch.stack(raw, out=weights)
    # Two passes, each of one dtype or one operation, take less than one over mixed dtypes.
    middle.copy_(weights.narrow(2, 0, length)).mul_(packed.key_scale())
    if visible is not None:
        ahead = 0 if front is None else front[0].shape[2]
        order = (visible[..., ahead : ahead + length], visible[..., :ahead], visible[..., ahead + length :])
        hidden = ~torch.cat(order, dim=-1)
        logits.view(b, h, m, -1).masked_fill_(hidden, torch.finfo(torch.float32).min)
    # Powers of two take a third of the time of `exp`; the sums divide the output, which is smaller.
    logits.sub_(logits.amax(-1, keepdim=True)).exp2_()
    total = logits.sum(-1, keepdim=True)
    values.append(folded.new_empty(heads, 0, value_dim))
    output = torch.bmm(exact, torch.cat(values, dim=1))
    if packed.columns > length:
        weights.narrow(2, length, packed.columns - length).zero_()
    weights.narrow(2, 0, length).copy_(middle.mul_(packed.value_scale()))
    size, unit = packed.value_constants
    sums = []
    for rows, blocks in zip(weights.unbind(0), packed.value_codes, strict=True):
        if packed.value_bits == 8:
            rows = _twice(rows.unflatten(-1, (-1, packed.tile)), 8).flatten(1)
        for block in blocks:
            codes = block if packed.value_bits == 4 else nibbles(block, packed.value_bits).view(packed.width, -1)
            sums.append(product(rows, codes, size, unit))
    coded = torch.stack(sums).float()
    if value_dim != packed.width:
        coded = coded.view(heads, -1, m, packed.width).transpose(1, 2)
    if packed.back is None:
        output += coded.reshape(heads, m, value_dim)
    else:
        output.view(-1, value_dim).addmm_(coded.reshape(-1, value_dim), packed.back)
    return (output / total).to(query.dtype).view(b, hq, q_len, value_dim)
