"""KVView: what `cache.update` hands to the attention function instead of tensors.

A view is a tensor in name only: it carries the shape, dtype and device of one layer's keys (or values) and knows the
layer. The registered attention function recognises it and attends straight over the layer's segments. Any other torch
operation *materialises* it: the operation then sees the full keys or values, in order. That keeps models that touch
keys before attention correct, only slower; caches that drop rows refuse there, because the mask that such a model
applies no longer matches the rows that are held.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

if TYPE_CHECKING:
    from .layer import KVLayer

# Metadata that a wrapper subclass answers by itself; everything else needs the data.
_METADATA = {
    torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
    torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
    torch.Tensor.device.__get__,  # type: ignore[attr-defined]
    torch.Tensor.layout.__get__,  # type: ignore[attr-defined]
    torch.Tensor.ndim.__get__,  # type: ignore[attr-defined]
    torch.Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_cuda.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_meta.__get__,  # type: ignore[attr-defined]
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.element_size,
    torch.Tensor.get_device,
    torch.is_floating_point,
    torch.numel,
}


class KVView(torch.Tensor):
    """The keys or values of one layer, `[batch, kv_heads, rows, head_dim]`, not yet read.

    Attributes:
        layer: the layer that holds the rows.
        which: `"keys"` or `"values"`.
    """

    layer: KVLayer
    which: str

    @staticmethod
    def __new__(cls, layer: KVLayer, which: str, like: torch.Tensor, rows: int) -> KVView:
        batch, heads, _, dim = like.shape
        view = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, (batch, heads, rows, dim), dtype=like.dtype, device=like.device, requires_grad=False
        )
        view.layer = layer
        view.which = which
        return view

    def __init__(self, layer: KVLayer, which: str, like: torch.Tensor, rows: int) -> None:
        super().__init__()

    def materialize(self) -> torch.Tensor:
        """The full tensor, in order. Raises `NotImplementedError` for a layer whose policy drops rows."""
        return self.layer.materialize(self.which)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"KVView({self.which}, shape={tuple(self.shape)}, dtype={self.dtype}, layer={self.layer.layer_idx})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return func(*_read(args), **_read(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Reached when C++ code gets hold of a view without passing through `__torch_function__`.
        return func(*_read(args), **_read(kwargs or {}))


def _read(tree: Any) -> Any:
    return tree_map(lambda x: x.materialize() if isinstance(x, KVView) else x, tree)
