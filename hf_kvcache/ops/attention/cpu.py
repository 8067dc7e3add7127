"""Matrix products over buffers with slack, on the CPU."""

from __future__ import annotations

import torch

# More products than this are cheaper as one batched call, copy or not; so are operands of few rows.
MANY = 64
FEW = 512


def batched_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a @ b` for `[B, H, M, K]` and `[B, H, K, N]`.

    In 16-bit types torch's CPU kernel copies an operand whose heads do not lie next to each other, as in a buffer that
    has room to grow; one product for each head reads it where it lies (the same result, three times as fast).
    """
    if _apart(a, b):
        # Rows of the batch that are not evenly spaced heads, as in blocks of a pool, would be copied in every type.
        out = a.new_empty(*a.shape[:-1], b.shape[-1])
        for row in range(b.shape[0]):
            part = batched_matmul(a[row : row + 1], b[row : row + 1])
            out[row : row + 1] = part
        return out
    slack = b.ndim == 4 and b.stride(1) != b.shape[2] * b.shape[3] and b.shape[:2] == a.shape[:2]
    slack = slack and max(b.shape[2:]) > FEW
    if b.device.type != "cpu" or b.dtype == torch.float32 or not slack or b.shape[0] * b.shape[1] > MANY:
        return torch.matmul(a, b)
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return torch.matmul(a, b)
    out = a.new_empty(*a.shape[:-1], b.shape[-1])
    for row in range(b.shape[0]):
        for head in range(b.shape[1]):
            torch.mm(a[row, head], b[row, head], out=out[row, head])
    return out


def _apart(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether heads and batch of `b` cannot be counted through in one step."""
    if b.device.type != "cpu" or b.ndim != 4 or b.shape[0] == 1 or b.shape[1] == 1 or b.shape[:2] != a.shape[:2]:
        return False
    uneven = b.stride(0) != b.shape[1] * b.stride(1)
    return uneven and not (torch.is_grad_enabled() and (a.requires_grad or b.requires_grad))
