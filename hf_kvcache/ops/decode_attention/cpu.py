"""The two halves of attention over packed rows on the CPU, with torch's own int4 matrix product: no compiler needed.

The product takes 4-bit codes in the layout of `ops.packed` and bfloat16 activations, and adds up in float32. Scales stay
outside of it: a scale per token multiplies the logits (keys) or the probabilities (values), one per channel the query.
Codes are read relative to the middle of their range, so that what is rounded to bfloat16 is small. Codes of 2 and 3 bits
become 4-bit ones first, head by head; 8-bit ones are two 4-bit products in one.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from ..packed import Format, Packed, nibbles

PAGE = 256  # tokens of one product where scales belong to channels


@lru_cache(maxsize=1)
def native_half() -> int | None:
    """Half the tile that the int4 product of this CPU reads, or None where it has no fast one."""
    capability = torch.backends.cpu.get_cpu_capability()
    if not hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu"):
        return None
    return {"AVX512": 32, "AVX2": 16}.get(capability)


def supports(fmt: Format, dim: int, half: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether these functions take rows of this kind (else: the reference)."""
    fits = dim % 32 == 0 and fmt.kind in ("affine", "symmetric") and half == native_half()
    return fits and device.type == "cpu" and dtype == torch.bfloat16


def centre(fmt: Format) -> float:
    return (2**fmt.bits - 1) / 2


@lru_cache(maxsize=64)
def _unit(bits: int, groups: int, columns: int) -> torch.Tensor:
    """Scales and zeros `[groups, columns, 2]` that make the product read a code as `code - centre`."""
    zero = 8 - (7.5 if bits == 8 else (2**bits - 1) / 2)
    return torch.tensor([1.0, zero], dtype=torch.bfloat16).expand(groups, columns, 2).contiguous()


def _reduction(length: int) -> int:
    return next(size for size in (256, 128, 64, 32) if length % size == 0)


def _product(rows: torch.Tensor, codes: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """`rows` bf16 `[M, K]` times codes of `columns` columns and K rows of nibbles."""
    size = _reduction(rows.shape[1])
    # Columns are rounded up, so that a growing cache does not ask for new constants at every step.
    unit = _unit(bits, rows.shape[1] // size, columns)
    return torch.ops.aten._weight_int4pack_mm_for_cpu(rows, codes.view(columns, -1), size, unit)


def packed_logits(query: torch.Tensor, keys: Packed, fmt: Format, length: int, half: int) -> torch.Tensor:
    """See `reference.packed_logits`."""
    b, h, m, d = query.shape
    tile = 2 * half
    out = query.new_empty(b, h, m, length, dtype=torch.float32)
    tiles = -(-length // tile)
    for row in range(b):
        for head in range(h):
            codes = nibbles(keys.codes[row, head, :tiles], fmt.bits)
            scale = keys.scale[row, head]
            zero = None if keys.zero is None else keys.zero[row, head]
            q = query[row, head]
            if fmt.axis == "token":
                out[row, head] = _token_logits(q, codes, scale, zero, fmt, length, tiles * tile)
            else:
                _channel_logits(q, codes, scale, zero, fmt, length, tile, out[row, head])
    return out


def _twice(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows for low nibbles and for high ones, where a code has both."""
    return torch.cat([rows, rows * 16], dim=-1) if bits == 8 else rows


def _token_logits(
    q: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    fmt: Format,
    length: int,
    columns: int,
) -> torch.Tensor:
    """`[M, length]`: a scale for each token over groups of channels."""
    m, d = q.shape
    groups = d // fmt.group
    rows = q
    if groups > 1:
        # One row for each group of channels, zero elsewhere.
        rows = (q.view(m, groups, 1, fmt.group) * torch.eye(groups, dtype=q.dtype)[:, :, None]).view(m * groups, d)
    raw = _product(_twice(rows, fmt.bits), codes, fmt.bits, columns)[:, :length]
    by_group = scale[:length].t().float()  # [groups, length]
    logits = (raw.view(m, groups, length) * by_group).sum(1) if groups > 1 else raw * by_group
    if zero is not None:
        base = zero[:length].t().float() + centre(fmt) * by_group
        logits += q.float().view(m, groups, fmt.group).sum(-1) @ base
    return logits


def _channel_logits(
    q: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    fmt: Format,
    length: int,
    tile: int,
    out: torch.Tensor,
) -> None:
    """A scale for each channel over groups of tokens: it goes into the query, which then differs by group."""
    m, d = q.shape
    groups = -(-length // fmt.group)
    scaled = (q.float() * scale[:groups, None].float()).to(q.dtype)  # [groups, M, D]
    scaled = _twice(scaled, fmt.bits)
    page = max(PAGE, fmt.group)
    in_page = page // fmt.group
    parts = []
    for start in range(0, length, page):
        stop = min(start + page, -(-length // tile) * tile)
        first = start // fmt.group
        rows = scaled[first : first + in_page]
        here = codes[start // tile : stop // tile]
        raw = _product(rows.flatten(0, 1), here, fmt.bits, stop - start)
        count = rows.shape[0]
        raw = (
            torch.nn.functional.pad(raw, (0, count * fmt.group - raw.shape[1]))
            if raw.shape[1] < count * fmt.group
            else raw
        )
        own = raw.view(count, m, -1)[:, :, : count * fmt.group].view(count, m, count, fmt.group)
        parts.append(own.diagonal(dim1=0, dim2=2).permute(0, 2, 1).reshape(m, -1))  # [M, count * G]
    logits = torch.cat(parts, dim=1)[:, :length].float()
    if zero is not None:
        base = zero[:groups].float() + centre(fmt) * scale[:groups].float()  # [groups, D]
        constant = q.float() @ base.t()  # [M, groups]
        logits = logits + constant.repeat_interleave(fmt.group, dim=1)[:, :length]
    out.copy_(logits)


def packed_weighted(probs: torch.Tensor, values: Packed, fmt: Format, dim: int, half: int) -> torch.Tensor:
    """See `reference.packed_weighted`."""
    b, h, m, length = probs.shape
    tile = 2 * half
    tiles = -(-length // tile)
    v = values.codes.shape[-1]
    out = probs.new_empty(b, h, m, dim, dtype=torch.float32)
    groups = dim // fmt.group
    for row in range(b):
        for head in range(h):
            scale = values.scale[row, head, :length].t().float()  # [groups, length]
            p = probs[row, head]
            weights = p[:, None] * scale  # [M, groups, length]
            rows = (
                torch.nn.functional.pad(weights, (0, tiles * tile - length)).to(torch.bfloat16).reshape(m * groups, -1)
            )
            if fmt.bits == 8:
                rows = _twice(rows.view(m * groups, tiles, tile), 8).view(m * groups, -1)
            codes = nibbles(values.codes[row, head, :, :tiles], fmt.bits)
            blocks = [
                _product(rows, codes[block], fmt.bits, 2 * v).view(m, groups, 2 * v) for block in range(dim // (2 * v))
            ]
            raw = torch.cat(blocks, dim=-1).float()  # [M, groups, D]
            if groups > 1:
                raw = raw.view(m, groups, groups, fmt.group).diagonal(dim1=1, dim2=2).transpose(1, 2)
            mine = raw.reshape(m, dim)
            if values.zero is not None:
                base = values.zero[row, head, :length].float() + centre(fmt) * scale.t()  # [length, groups]
                mine = mine + (p @ base).repeat_interleave(fmt.group, dim=1)
            out[row, head] = mine
    return out
