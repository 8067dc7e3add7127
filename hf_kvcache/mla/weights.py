"""The two halves of `kv_b_proj`, read where they lie: absorbed into queries, and applied to what attention gives.

A head's key is `latent @ W_k.T` and its value `latent @ W_v.T`, so its logits are `(q @ W_k) . latent` and its output
is `(weights @ latent) @ W_v.T`. Plain linear layers are used through views, and LoRA adapters through their factors, so
a change of either shows at the next step. Weights in 4 bits are decoded once, and again when they change.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

FEW = 4  # rows of queries


class Term(NamedTuple):
    """A low-rank addition to the weight: `scale * up @ down`."""

    up: torch.Tensor  # [H, Dk + Dv, r]
    down: torch.Tensor  # [r, R]
    scale: float


class Halves(NamedTuple):
    """`kv_b_proj` by head. `R` is the latent's size, `Dk` that of keys without position, `Dv` that of values."""

    weight: torch.Tensor  # [H, Dk + Dv, R]
    key_size: int
    terms: list[Term]

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """Queries without position `[B, H, Q, Dk]` as queries over latents `[B, H, Q, R]`."""
        rows = _by_head(query)  # [H, B * Q, Dk]
        out = _products(rows, self.weight[:, : self.key_size])
        for up, down, scale in self.terms:
            small = torch.bmm(rows.to(up.dtype), up[:, : self.key_size])
            out = out + (torch.matmul(small, down) * scale).to(out.dtype)
        return _back(out, query)

    def release(self, output: torch.Tensor) -> torch.Tensor:
        """Weighted sums of latents `[B, H, Q, R]` as outputs of the heads `[B, H, Q, Dv]`."""
        rows = _by_head(output)  # [H, B * Q, R]
        out = _products(rows, self.weight[:, self.key_size :].transpose(1, 2))
        for up, down, scale in self.terms:
            small = torch.matmul(rows.to(down.dtype), down.t())
            out = out + (torch.bmm(small, up[:, self.key_size :].transpose(1, 2)) * scale).to(out.dtype)
        return _back(out, output)


def _by_head(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).flatten(1, 2)


def _back(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    batch, heads, queries, _ = like.shape
    return rows.reshape(heads, batch, queries, -1).transpose(0, 1)


def _products(rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """`rows[h] @ matrices[h]`."""
    transposed = matrices.stride(1) == 1 and rows.device.type == "cpu" and rows.dtype != torch.float32
    if not transposed or torch.is_autocast_enabled("cpu"):
        return torch.bmm(rows, matrices)
    # torch's 16-bit product on the CPU copies transposed operands. Few rows are turned instead; for more, one product
    # for each head reads the matrices as they lie.
    if rows.shape[1] <= FEW:
        return torch.bmm(matrices.transpose(1, 2), rows.transpose(1, 2)).transpose(1, 2)
    out = rows.new_empty(rows.shape[0], rows.shape[1], matrices.shape[2])
    for head in range(rows.shape[0]):
        torch.mm(rows[head], matrices[head], out=out[head])
    return out


class Decoded:
    """Weights of quantized layers in full precision, made again when the layer's tensors change."""

    def __init__(self) -> None:
        self._key: Any = None
        self._weight: torch.Tensor | None = None

    def weight_of(self, layer: nn.Module, features: int, dtype: torch.dtype) -> torch.Tensor:
        """`[out, in]` of a linear layer in the model's dtype, by its own forward pass over the unit vectors."""
        parameter: Any = layer.weight
        state = getattr(parameter, "quant_state", None)
        key = (id(layer), parameter.data_ptr(), parameter._version, parameter.shape, id(state), dtype)
        if self._weight is None or key != self._key:
            unit = torch.eye(features, dtype=dtype, device=parameter.device)
            # bitsandbytes repacks 4-bit weights on some CPUs at the first evaluation without gradients, and trains on
            # wrong ones afterwards: not on our account.
            training = layer.training
            layer.training = True
            try:
                with torch.no_grad():
                    self._weight = layer(unit).t().contiguous()
            finally:
                layer.training = training
            self._key = key
        return self._weight

    @property
    def nbytes(self) -> int:
        return 0 if self._weight is None else self._weight.untyped_storage().nbytes()

    def __deepcopy__(self, memo: dict[int, Any]) -> Decoded:
        return Decoded()  # the copy's layers are others


def runs_as_module(layer: Any) -> bool:
    """Whether something has to happen around the layer's forward pass, so that its weights alone say too little.

    Hooks, weights that are loaded for the pass only (offloading), and adapters that the pass would first unmerge.
    """
    if layer._forward_hooks or layer._forward_pre_hooks or getattr(getattr(layer, "_hf_hook", None), "offload", False):
        return True
    base = getattr(layer, "base_layer", None)
    if base is None:
        return False
    return runs_as_module(base) or bool(layer.disable_adapters and layer.merged)


def halves_of(module: Any, decoded: Decoded, dtype: torch.dtype) -> Halves:
    """The halves of `module.kv_b_proj` as they are now. `dtype` is that of the queries, for weights that have none.

    Raises `NotImplementedError` for kinds of layers whose weights cannot be read.
    """
    layer = module.kv_b_proj
    terms: list[Term] = []
    size = module.qk_nope_head_dim + module.v_head_dim
    base = layer
    if _is_lora(layer):
        base = layer.base_layer
        if not layer.disable_adapters and not layer.merged:
            terms = [_term(layer, name, size) for name in layer.active_adapters if name in layer.lora_A]
    if getattr(base, "bias", None) is not None:
        raise NotImplementedError(f"{type(module).__name__}: its kv_b_proj has a bias, which cannot be absorbed")
    if any(cls.__name__ == "Linear4bit" for cls in type(base).__mro__):
        weight = decoded.weight_of(base, module.kv_lora_rank, dtype)
    elif type(base) is nn.Linear and type(base.weight.data) is torch.Tensor and base.weight.is_floating_point():
        weight = base.weight
    else:
        raise NotImplementedError(_unknown(module, base))
    return Halves(weight.view(-1, size, module.kv_lora_rank), module.qk_nope_head_dim, terms)


def _unknown(module: nn.Module, layer: nn.Module) -> str:
    return (
        f"the kv_b_proj of {type(module).__name__} is a {type(layer).__name__}, whose weights cannot be absorbed: only "
        "nn.Linear, 4-bit layers of bitsandbytes, and LoRA over these. Load the model without quantization (or "
        "dequantized), merge the adapter (`merge_and_unload`), or call `disable_absorb(model)`."
    )


def _is_lora(layer: Any) -> bool:
    return all(hasattr(layer, name) for name in ("base_layer", "lora_A", "lora_B", "active_adapters", "merged"))


def _term(layer: Any, name: str, size: int) -> Term:
    variant = (getattr(layer, "lora_variant", None) or {}).get(name)
    if variant is not None or (getattr(layer, "use_dora", None) or {}).get(name) or getattr(layer, "fan_in_fan_out", 0):
        raise NotImplementedError(
            f"adapter {name!r} of kv_b_proj is no plain LoRA ({type(variant).__name__ if variant else 'DoRA'}), which "
            "cannot be absorbed: merge it (`merge_and_unload`) or call `disable_absorb(model)`"
        )
    down, up = layer.lora_A[name], layer.lora_B[name]
    if getattr(down, "bias", None) is not None or getattr(up, "bias", None) is not None:
        raise NotImplementedError(f"adapter {name!r} of kv_b_proj has a bias, which cannot be absorbed: merge it")
    weight = up.weight
    return Term(weight.view(-1, size, weight.shape[1]), down.weight, float(layer.scaling[name]))
