"""Attention over latents where they lie: a page of rows at a time, two products for the logits and one for the output.

Made for the CPU, right on every device. Packed latents are turned into numbers once for each page and step, in the
coordinates that they were coded in: it is the queries that are turned, and the sum of a page that is turned back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..attention import Block, Extras, finished_logits
from ..decode_attention import PackedRows
from ..decode_attention.reference import _page, page_size
from ..dequantize import dequantize, levels
from ..packed import Format, Packed, unpack_codes

if TYPE_CHECKING:
    from .dispatch import Part

# Up to this many batch rows get a product each: torch's 16-bit CPU kernel copies rows that lie in buffers with room.
MANY = 64


class Page(NamedTuple):
    """Rows in the coordinates of `query`, and one scale for each row's latent and rotary part (None: 1)."""

    latent: torch.Tensor  # [B, N, R]
    rope: torch.Tensor  # [B, N, P]
    latent_scale: torch.Tensor | None  # [B, 1, N] float32
    rope_scale: torch.Tensor | None


def latent_attention(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    parts: Sequence[Part],
    extras: Extras,
    visible: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    need_probs: bool = False,
    need_lse: bool = False,
) -> Block:
    """See `reference.latent_attention`."""
    if len(parts) == 1 and not isinstance(parts[0], PackedRows) and extras.sinks is None and not need_lse:
        return _over_one(q_latent, q_rope, parts[0], extras, visible, bias, need_probs)
    b, h, q, r = q_latent.shape
    dtype = q_latent.dtype
    plain = extras._replace(scaling=1.0)  # queries are scaled here: they are smaller than the logits
    latent_query, rope_query = (x.flatten(1, 2).float() * extras.scaling for x in (q_latent, q_rope))
    tops, totals, outputs, logits = [], [], [], []
    start = 0
    for part in parts:
        lq, rq, constant = latent_query, rope_query, None
        if isinstance(part, PackedRows):
            if part.key_mean is not None:
                constant = torch.matmul(lq, part.key_mean[:, 0, :, None].float())  # [B, H * Q, 1]
            lq = lq if part.key_turn is None else torch.matmul(lq, part.key_turn.float())
            rq = rq if part.value_turn is None else torch.matmul(rq, part.value_turn.float())
        lq, rq = lq.to(dtype), rq.to(dtype)
        part_tops, part_totals, part_outputs = [], [], []
        for page in _pages(part, dtype):
            stop = start + page.latent.shape[1]
            products = _scaled(_product(lq, page.latent.transpose(1, 2)).float(), page.latent_scale)
            products = products + _scaled(_product(rq, page.rope.transpose(1, 2)).float(), page.rope_scale)
            if constant is not None:
                products = products + constant
            seen = visible if visible is None else visible[..., start:stop]
            added = bias if bias is None else bias[..., start:stop]
            s = finished_logits(products.view(b, 1, h, q, stop - start), plain, seen, added).view(b, h * q, -1)
            top = s.amax(-1, keepdim=True)
            weights = torch.exp(s - top)
            part_tops.append(top)
            part_totals.append(weights.sum(-1, keepdim=True))
            part_outputs.append(_product(_scaled(weights, page.latent_scale).to(dtype), page.latent).float())
            if need_probs:
                logits.append(s)
            start = stop
        if isinstance(part, PackedRows) and part_tops:
            for i, total in enumerate(part_totals):
                if part.key_turn is not None:
                    part_outputs[i] = torch.matmul(part_outputs[i], part.key_turn.float().transpose(-1, -2))
                if part.key_mean is not None:
                    part_outputs[i] = part_outputs[i] + total * part.key_mean.float()
        tops += part_tops
        totals += part_totals
        outputs += part_outputs
    peak = tops[0] if len(tops) == 1 else torch.stack(tops).amax(0)
    sinks = None
    if extras.sinks is not None:
        sinks = extras.sinks.float().view(1, h, 1, 1).expand(b, -1, q, -1).reshape(b, h * q, 1)
        peak = torch.maximum(peak, sinks)
    shares = [torch.exp(top - peak) for top in tops]
    total, output = shares[0] * totals[0], shares[0] * outputs[0]
    for share, mine, sums in zip(shares[1:], totals[1:], outputs[1:], strict=True):
        total, output = total + share * mine, output + share * sums
    if sinks is not None:
        total = total + torch.exp(sinks - peak)
    output = (output / total).to(dtype).view(b, h, q, r)
    lse = peak + total.log()
    probs = torch.exp(torch.cat(logits, -1) - lse).view(b, h, q, -1) if need_probs else None
    return Block(output, lse.view(b, h, q) if need_lse else None, probs)


def _over_one(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    part: tuple[torch.Tensor, torch.Tensor],
    extras: Extras,
    visible: torch.Tensor | None,
    bias: torch.Tensor | None,
    need_probs: bool,
) -> Block:
    """Exact rows in one place, as they mostly are: a few operations, since each costs as much as many rows."""
    b, h, q, r = q_latent.shape
    latent, rope = (x[:, 0].to(q_latent.dtype) for x in part)
    s = _product(q_latent.flatten(1, 2), latent.transpose(1, 2)).float()
    s = s + _product(q_rope.flatten(1, 2), rope.transpose(1, 2))
    s = s * extras.scaling
    if visible is not None or bias is not None or extras.softcap is not None:
        s = finished_logits(s.view(b, 1, h, q, -1), extras._replace(scaling=1.0), visible, bias).view(b, h * q, -1)
    probs = torch.softmax(s, dim=-1)
    output = _product(probs.to(q_latent.dtype), latent).view(b, h, q, r)
    return Block(output, None, probs.view(b, h, q, -1) if need_probs else None)


def _pages(part: Part, dtype: torch.dtype) -> Iterator[Page]:
    if not isinstance(part, PackedRows):
        latent, rope = part
        if latent.shape[2]:
            yield Page(latent[:, 0].to(dtype), rope[:, 0].to(dtype), None, None)
        return
    step = page_size(part.half, part.key_format, part.value_format)
    for start in range(0, part.length, step):
        stop = min(start + step, part.length)
        latent, latent_scale = _numbers(part.keys, part.key_format, "keys", start, stop, part.half, dtype)
        rope, rope_scale = _numbers(part.values, part.value_format, "values", start, stop, part.half, dtype)
        yield Page(latent, rope, latent_scale, rope_scale)


def _numbers(
    packed: Packed, fmt: Format, role: str, start: int, stop: int, half: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows `[B, N, D]` of a page, and the scale that they lack."""
    page = _page(packed, fmt, role, start, stop, half)
    codes = page.codes
    dim = codes.shape[3] * 4 // fmt.bits if role == "keys" else codes.shape[2] * 2 * codes.shape[5]
    if fmt.axis == "token" and fmt.group == dim and not fmt.has_zero:
        # Levels are exact in 16 bits, and a scale of the whole row is cheaper to apply to logits and weights.
        numbers = levels(unpack_codes(codes, fmt.bits, role, dim)[:, 0, : stop - start], fmt).to(dtype)
        return numbers, page.scale[:, :, : stop - start, 0].float()
    return dequantize(page, fmt, role, dim, stop - start, dtype)[:, 0], None


def _scaled(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    return x if scale is None else x * scale


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a @ b` for `[B, M, K]` and `[B, K, N]`."""
    direct = a.device.type == "cpu" and a.dtype != torch.float32 and a.shape[0] <= MANY
    if (
        not direct
        or torch.is_autocast_enabled("cpu")
        or torch.is_grad_enabled()
        and (a.requires_grad or b.requires_grad)
    ):
        return torch.bmm(a, b)
    out = a.new_empty(a.shape[0], a.shape[1], b.shape[2])
    for row in range(a.shape[0]):
        torch.mm(a[row], b[row], out=out[row])
    return out
