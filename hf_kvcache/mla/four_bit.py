"""4-bit layers of bitsandbytes: written, decoded, and kept from packing themselves for inference.

They have a trap (0.50.2): on CPUs with AVX512-BF16, a forward pass in evaluation mode over an input without gradient
packs the weight for inference. It cannot be undone exactly, it fails for sizes that are not multiples of 32 and 64, and
no gradient flows through such a layer any more, without an error. `keep_trainable` rules it out; evaluation then sees
the weights that training sees.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .module import MLAAttention


def keep_trainable(model: nn.Module) -> None:
    """Unpack 4-bit layers that were packed for inference on a CPU, and keep all of them from being packed.

    Unpacking rounds: scales went through 16 bits, so weights are off by about 0.2%, and a warning says so.

    Raises `NotImplementedError` for a bitsandbytes whose packing cannot be prevented.
    """
    packed = [layer for _, layer in four_bit_layers(model) if _is_packed(layer)]
    for layer in packed:
        layer.state_dict()  # bitsandbytes unpacks what it is about to save
    if packed:
        warnings.warn(
            f"{len(packed)} 4-bit layers had been packed for inference by an earlier evaluation; they are unpacked, "
            "with their scales rounded to 16 bits. Load the model anew for its exact weights.",
            stacklevel=2,
        )
    tried: set[type] = set()
    for name, layer in four_bit_layers(model):
        layer.support_avx512bf16_for_cpu = False
        fits = layer.out_features % 32 == 0 and layer.in_features % 64 == 0  # others cannot be packed
        if fits and layer.weight.device.type == "cpu" and type(layer) not in tried:
            tried.add(type(layer))
            _try(layer)
        if _is_packed(layer):
            raise NotImplementedError(
                f"{name} is packed for inference by this bitsandbytes in a way that cannot be prevented, so it cannot "
                "be trained on this CPU: use bitsandbytes 0.50.2"
            )


def four_bit_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if any(
            cls.__name__ == "Linear4bit" and cls.__module__.startswith("bitsandbytes") for cls in type(module).__mro__
        ):
            yield name, module


def _is_packed(layer: Any) -> bool:
    return bool(getattr(getattr(layer.weight, "quant_state", None), "packing_format_for_cpu", False))


@torch.no_grad()
def _try(layer: Any) -> None:
    """Evaluate a row of zeros, and leave everything else as it was."""
    before = {name: getattr(layer, name) for name in ("training", "compute_dtype", "compute_type_is_set")}
    layer.training = False
    try:
        layer(torch.zeros(1, layer.in_features, dtype=layer.compute_dtype or torch.float32))
    finally:
        vars(layer).update(before)


@torch.no_grad()
def to_four_bit(model: Any) -> None:
    """Write the plain linear layers as NF4 with double quantization, one after the other.

    The output embedding stays, and the `kv_b_proj` of converted layers: the lengths of its rows differ a thousandfold,
    which scales of 8 bits around their mean cannot tell apart (SmolLM2 at 50%: perplexity 17 becomes 11,000).
    """
    bnb = imported("bitsandbytes")
    kept = [model.get_output_embeddings(), *(m.kv_b_proj for m in model.modules() if isinstance(m, MLAAttention))]
    for name in [n for n, m in model.named_modules() if type(m) is nn.Linear and not any(m is k for k in kept)]:
        old: Any = model.get_submodule(name)
        new = bnb.nn.Linear4bit(
            old.in_features,
            old.out_features,
            bias=False,
            compute_dtype=old.weight.dtype,
            quant_type="nf4",
            device="meta",
        )
        new.weight = bnb.nn.Params4bit(old.weight.data, compress_statistics=True, quant_type="nf4", module=new)
        new.bias = old.bias
        replace(model, name, new.to(old.weight.device))
        del old
    model.is_loaded_in_4bit = True  # by which PEFT and accelerate know


def decoded(layer: Any) -> nn.Linear:
    """A plain layer with the weights of a 4-bit one."""
    weight = imported("bitsandbytes").functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    new = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    new.weight = nn.Parameter(weight.to(layer.compute_dtype or weight.dtype), requires_grad=False)
    new.bias = layer.bias
    return new


def replace(model: nn.Module, name: str, new: nn.Module) -> None:
    """Put a layer in another's place: its mode and accelerate's hook go with it."""
    old = model.get_submodule(name)
    new.train(old.training)
    hook = getattr(old, "_hf_hook", None)
    if hook is not None:
        from accelerate.hooks import add_hook_to_module

        add_hook_to_module(new, hook)
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, new)


def imported(name: str) -> Any:
    try:
        return __import__(name)
    except ImportError as error:
        raise ImportError(f"prepare_for_healing needs {name}: pip install 'hf-kvcache[train]'") from error
