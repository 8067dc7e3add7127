"""Quantize exact rows and pack their codes. Plain torch, every device."""

from __future__ import annotations

import torch

from ..packed import Format, Packed, pack_codes, step_of

# Shares of the full range that the clipping search tries.
CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6)
# Factors on the Gaussian step that the search of the uniform quantizer tries.
STEPS = (1.0, 0.9, 1.1, 0.8, 1.2)
FLOAT8_MAX = 448.0


def quantize(x: torch.Tensor, fmt: Format) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Codes (uint8 `[B, H, N, D]`), scale and zero (float16) of exact rows.

    N must be a multiple of `fmt.group` for a scale per channel, D for a scale per token. Rounds half to even.
    """
    b, h, n, d = x.shape
    x = x.float()
    if fmt.axis == "channel":
        grouped = x.view(b, h, n // fmt.group, fmt.group, d).transpose(-1, -2)  # [B, H, n / G, D, G]
    else:
        grouped = x.view(b, h, n, d // fmt.group, fmt.group)
    if fmt.kind == "affine":
        codes, scale, zero = _affine(grouped, fmt)
    elif fmt.kind == "float8":
        codes, scale = _float8(grouped)
        zero = None
    else:
        codes, scale = _levels(grouped, fmt)
        zero = None
    if fmt.axis == "channel":
        codes = codes.transpose(-1, -2)
    return codes.reshape(b, h, n, d), scale, zero


def _affine(x: torch.Tensor, fmt: Format) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    top = 2**fmt.bits - 1
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    best: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    error: torch.Tensor | None = None
    for clip in CLIPS if fmt.fit == "mse" else CLIPS[:1]:
        middle, reach = (high + low) / 2, (high - low) / 2 * clip
        # Codes are chosen against the numbers that are stored, so rounding them costs nothing twice.
        zero = (middle - reach).half() if clip < 1 else low.half()
        scale = (2 * reach / top).half()
        codes = _divide(x - zero.float(), scale.float()).round().clamp(0, top)
        if fmt.fit != "mse":
            return codes.to(torch.uint8), scale[..., 0], zero[..., 0]
        wrong = (codes * scale.float() + zero.float() - x).square().sum(-1, keepdim=True)
        if best is None or error is None:
            best, error = (codes, scale, zero), wrong
            continue
        better = wrong < error
        error = torch.where(better, wrong, error)
        best = tuple(torch.where(better, a, b) for a, b in zip((codes, scale, zero), best, strict=True))  # type: ignore
    assert best is not None
    return best[0].to(torch.uint8), best[1][..., 0], best[2][..., 0]


def _levels(x: torch.Tensor, fmt: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of the nearest level of a unit-variance codebook, and the scale that undoes the normalisation."""
    rms = x.square().mean(-1, keepdim=True).sqrt()
    unit = _divide(x, rms)
    if fmt.kind == "symmetric":
        codes, level = _uniform(unit, fmt.bits)
    else:
        assert fmt.levels is not None
        table = torch.tensor(fmt.levels, dtype=torch.float32, device=x.device)
        codes = torch.bucketize(unit, (table[1:] + table[:-1]) / 2)
        level = table[codes]
    along = (x * level).sum(-1, keepdim=True)
    if fmt.fit == "unbiased":
        scale = _divide(x.square().sum(-1, keepdim=True), along)
    else:
        scale = _divide(along, level.square().sum(-1, keepdim=True))
    return codes.to(torch.uint8), scale.half()[..., 0]


def _uniform(unit: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and levels on the uniform grid whose step keeps most of each vector's direction."""
    top = 2**bits - 1
    best: torch.Tensor | None = None
    codes = score = unit
    for factor in STEPS if bits < 8 else STEPS[:1]:
        new = (unit / (step_of(bits) * factor) + top / 2).round().clamp(0, top)
        level = new - top / 2
        cosine = (unit * level).sum(-1, keepdim=True).square() / level.square().sum(-1, keepdim=True)
        if best is None:
            best, codes, score = level, new, cosine
            continue
        better = cosine > score
        score = torch.where(better, cosine, score)
        codes, best = torch.where(better, new, codes), torch.where(better, level, best)
    assert best is not None
    return codes, best


def _float8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = (x.abs().amax(-1, keepdim=True) / FLOAT8_MAX).half()
    unit = _divide(x, scale.float()).clamp(-FLOAT8_MAX, FLOAT8_MAX)
    return unit.to(torch.float8_e4m3fn).view(torch.uint8), scale[..., 0]


def _divide(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """`x / by`, and 0 where `by` is 0 (a constant group, or one below the smallest float16)."""
    return torch.where(by == 0, torch.zeros_like(x), x / torch.where(by == 0, torch.ones_like(by), by))


def quantize_pack(x: torch.Tensor, fmt: Format, role: str, half: int = 32, lead: int = 0) -> Packed:
    """Quantize `[B, H, N, D]` exact rows.

    The codes fill whole tiles: `lead` empty tokens (code 0) stand before the first row, and as many after the last as
    the last tile needs. Scales and zeros are those of the N rows.
    """
    codes, scale, zero = quantize(x, fmt)
    tile = 2 * half
    after = -(lead + codes.shape[2]) % tile
    if lead or after:
        codes = torch.nn.functional.pad(codes, (0, 0, lead, after))
    return Packed(pack_codes(codes, fmt.bits, role, half), scale, zero)
