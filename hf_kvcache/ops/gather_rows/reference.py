"""Some rows of a packed tensor as a packed tensor of their own. Plain torch, every device."""

from __future__ import annotations

import torch

from ..packed import Format, Packed, pack_codes, unpack_codes


def gather_rows(packed: Packed, fmt: Format, role: str, dim: int, index: torch.Tensor, half: int = 32) -> Packed:
    """Rows `index` `[B, H, K]` in that order: codes, scales and zeros move as they are.

    Only for formats with a scale per token, whose rows are complete in themselves. The codes fill whole tiles, with
    code 0 after the last row; scales and zeros are those of the K rows.
    """
    if not fmt.per_token:
        raise ValueError("rows that share scales with their neighbours cannot be gathered: use a scale per token")
    codes = unpack_codes(packed.codes, fmt.bits, role, dim)
    chosen = codes.gather(2, index[..., None].expand(-1, -1, -1, dim))
    chosen = torch.nn.functional.pad(chosen, (0, 0, 0, -chosen.shape[2] % (2 * half)))
    return Packed(pack_codes(chosen, fmt.bits, role, half), *gather_scales(packed, index))


def gather_scales(packed: Packed, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    wide = index[..., None].expand(-1, -1, -1, packed.scale.shape[-1])
    return packed.scale.gather(2, wide), None if packed.zero is None else packed.zero.gather(2, wide)
