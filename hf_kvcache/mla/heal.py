"""`prepare_for_healing` and `merge_healed`: low-rank training (QLoRA) of what a conversion lost."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .absorb import latent_modules
from .four_bit import decoded, four_bit_layers, imported, keep_trainable, replace, to_four_bit
from .module import MLAAttention

# In attention over latents, and in any other.
LATENT_TARGETS = ("q_proj", "q_b_proj", "kv_b_proj", "o_proj")
OTHER_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
FOLDED_NORM = 10.0  # Trained norms of latents have weights around one; folding makes them hundreds.


def prepare_for_healing(
    model: PreTrainedModel,
    target_modules: Sequence[str] | str | None = None,
    *,
    rank: int = 16,
    alpha: float | None = None,
    dropout: float = 0.0,
    quantize: bool = True,
    gradient_checkpointing: bool = True,
) -> Any:
    """Put LoRA adapters (arXiv 2106.09685) on a model in 4 bits (QLoRA, arXiv 2305.14314), ready for training.

    The linear layers are written in place as NF4 with double quantization (4.127 bits a weight; the output embedding
    and the `kv_b_proj` of converted layers stay as they are), everything is frozen but the adapters, and the 4-bit
    layers are kept from packing themselves for inference, so that the model may be evaluated at any time. Works with
    `enable_absorb`, before or after.

    Args:
        model: a converted model, or any other; in full precision, or loaded with bitsandbytes' 4 bits.
        target_modules: names of linear layers to adapt, or a regular expression for whole names. By default the
            projections of the attention: `q_proj` or `q_b_proj`, `kv_b_proj`, `o_proj`, and in converted models
            `kv_a_proj_with_mqa`; `k_proj` and `v_proj` in models without latents.
        rank, alpha, dropout: of the adapters; `alpha` is twice the rank by default.
        quantize: False leaves the weights in full precision (plain LoRA).
        gradient_checkpointing: compute activations again in the backward pass instead of keeping them.

    Returns:
        The `PeftModel`, in training mode. `merge_healed` takes the adapters into the weights.

    Raises:
        ValueError: an export with a folded norm, a model with adapters, targets that it does not have, bad sizes.
        NotImplementedError: weights that are offloaded, or quantized in another way.
        ImportError: peft or bitsandbytes is missing.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"expected a transformers model, got {type(model).__name__}"
            + (": it has adapters, merge them (`merge_healed`) first" if hasattr(model, "peft_config") else "")
        )
    if any(hasattr(module, "lora_A") for module in model.modules()):
        raise ValueError(f"{type(model).__name__} has adapters already: merge them (`merge_healed`) first")
    if rank < 1 or not 0 <= dropout < 1 or (alpha is not None and alpha <= 0):
        raise ValueError(
            f"`rank` and `alpha` must be positive and `dropout` in [0, 1), got {rank}, {alpha} and {dropout}"
        )
    _refuse_folded(model)
    targets = _targets(model, target_modules)
    peft = imported("peft")
    if quantize or any(four_bit_layers(model)):
        imported("bitsandbytes")
    _refuse_unknown(model)
    if any(name.endswith("kv_b_proj") for name, _ in four_bit_layers(model)):
        warnings.warn(
            "`kv_b_proj` of a converted model loses much in 4 bits with double quantization: load the model with "
            "`llm_int8_skip_modules=['kv_b_proj', 'lm_head']` in its BitsAndBytesConfig",
            stacklevel=2,
        )
    if quantize:
        to_four_bit(model)
    keep_trainable(model)
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,
        lora_dropout=dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    if gradient_checkpointing:
        # The reentrant form needs inputs with gradients, and the embeddings are frozen.
        _switch(model, "enable")({"use_reentrant": False})
    return peft.get_peft_model(model, config).train()


@torch.no_grad()
def merge_healed(model: Any, base: PreTrainedModel | None = None) -> PreTrainedModel:
    """Take the adapters into full-precision weights. Nothing is written in 4 bits again.

    Args:
        model: what `prepare_for_healing` returned, trained. Use the model that this returns afterwards.
        base: the model as it was before it was prepared, in full precision: the adapters are added to its weights, and
            the error of the 4-bit weights they were trained on is left behind. Without it, the weights are the decoded
            ones, and the outputs those of the adapted model.

    Raises:
        ValueError: no adapters, or a base with other layers.
        NotImplementedError: adapters that are no plain LoRA.
    """
    if not hasattr(model, "peft_config") or isinstance(model, PreTrainedModel):
        raise ValueError(f"expected the PEFT model of `prepare_for_healing`, got {type(model).__name__}")
    inner = model.get_base_model()
    changes = {name: _change(name, layer) for name, layer in inner.named_modules() if hasattr(layer, "lora_A")}
    if base is not None:
        layers = dict(base.named_modules())
        for name, change in changes.items():
            weight = getattr(layers.get(name), "weight", None)
            if type(layers.get(name)) is not nn.Linear or weight is None or weight.shape != change.shape:
                raise ValueError(f"`base` has no plain linear layer {name} of size {tuple(change.shape)}")
        for name, change in changes.items():
            _add(layers[name], change)
        return base.eval()
    keep_trainable(inner)
    inner = model.unload()
    for name in [
        name for name, _ in four_bit_layers(inner)
    ]:  # names, so that each layer is freed as the next is decoded
        replace(inner, name, decoded(inner.get_submodule(name)))
    for name, change in changes.items():
        _add(inner.get_submodule(name), change)
    for name in ("quantization_method", "hf_quantizer", "is_loaded_in_4bit", "is_quantized"):
        vars(inner).pop(name, None)
    if hasattr(inner.config, "quantization_config"):
        del inner.config.quantization_config
    _switch(inner, "disable")()
    return inner.eval()


# ---------------------------------------------------------------------- what is refused


def _refuse_folded(model: PreTrainedModel) -> None:
    folded = bool(getattr(model.config, "hf_kvcache_norm_folded", False))
    for module in latent_modules(model):
        weight = getattr(getattr(module, "kv_a_layernorm", None), "weight", None)
        if weight is not None and not weight.is_meta:
            folded = folded or float(weight.detach().float().abs().mean()) > FOLDED_NORM
    if folded:
        raise ValueError(
            f"this {type(model).__name__} is an export whose latent norm is folded away: it is exact only as long as "
            "its tiny latents stay as they are, and training would change them. Heal the converted model "
            "(`convert_to_mla`, or its checkpoint) and export it again."
        )


def _refuse_unknown(model: PreTrainedModel) -> None:
    method = getattr(model, "quantization_method", None)
    if method is not None and not list(four_bit_layers(model)):
        raise NotImplementedError(
            f"{type(model).__name__} is quantized by {getattr(method, 'value', method)}: only bitsandbytes' 4 bits can "
            "be trained. Load it in full precision."
        )
    for name, module in model.named_modules():
        if type(module) is nn.Linear and not module.weight.is_floating_point():
            raise NotImplementedError(f"{name} has weights of {module.weight.dtype}: load the model in full precision")
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise NotImplementedError(
                f"{name} is not in memory (offloaded by `device_map`): load the model where all of it fits"
            )


def _targets(model: PreTrainedModel, wanted: Sequence[str] | str | None) -> list[str] | str:
    """Names for PEFT, which ignores those that match nothing."""
    if isinstance(wanted, str):
        return wanted
    linear = {name.rpartition(".")[2]: name for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    if wanted is not None:
        names = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
        missing = [w for w in wanted if not any(name == w or name.endswith(f".{w}") for name in names)]
        if missing or not wanted:
            raise ValueError(
                f"{type(model).__name__} has no linear layer {', '.join(map(repr, missing)) or 'in an empty list'}; it "
                f"has {', '.join(sorted(linear))}"
            )
        return list(wanted)
    latent = latent_modules(model)
    found = [name for name in (LATENT_TARGETS if latent else OTHER_TARGETS) if name in linear]
    if any(isinstance(module, MLAAttention) for module in latent):
        found.append("kv_a_proj_with_mqa")
    if not found:
        raise ValueError(f"{type(model).__name__} has none of {', '.join(OTHER_TARGETS)}: give `target_modules`")
    return found


def _switch(model: Any, what: str) -> Any:
    """Gradient checkpointing by the name that this transformers has for it."""
    return getattr(model, f"activation_checkpointing_{what}", None) or getattr(model, f"gradient_checkpointing_{what}")


def _change(name: str, layer: Any) -> torch.Tensor:
    """What the active adapters add to a layer's weight."""
    active = [adapter for adapter in layer.active_adapters if adapter in layer.lora_A]
    if (
        layer.merged
        or not active
        or any(adapter in layer.lora_variant for adapter in active)
        or any(layer.lora_bias[adapter] for adapter in active)
    ):
        raise NotImplementedError(
            f"the adapters of {name} are merged, inactive or no plain LoRA: they cannot be merged"
        )
    return sum(layer.get_delta_weight(adapter).float() for adapter in active)  # type: ignore[return-value]


def _add(layer: nn.Module, change: torch.Tensor) -> None:
    weight: Any = layer.weight
    weight.copy_((weight.float() + change.to(weight.device)).to(weight.dtype))
