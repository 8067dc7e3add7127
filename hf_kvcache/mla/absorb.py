"""`enable_absorb` and `disable_absorb`: attention over latents as they are cached, on models that are made so (MLA)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..attention import ABSORBED, attach, detach, is_ours, why_not_attach
from .attention import Absorbed
from .weights import halves_of, runs_as_module

_NEEDED = ("kv_b_proj", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_ATTACHED = "_hf_kvcache_attached_to_absorb"


def enable_absorb(model: Any) -> Any:
    """Attend over the cached latents themselves, instead of expanding all of them to every head at every step.

    For DeepSeek-type models (multi-head latent attention, arXiv 2405.04434): the key half of `kv_b_proj` goes into the
    query and its value half behind the attention, so one shared head of width rank + rope is attended to, and a step
    reads rank + rope numbers of each token. Exact but for rounding; weights are used where they lie, and changes of
    them (LoRA adapters too) show at the next step. Each step takes the side with fewer products: prompts are mostly
    expanded, decoding and short steps are absorbed. Works with every cache, transformers' own too. Attaches the model.
    Idempotent.

    Training, steps for which somebody hooked `kv_b_proj`, and steps while another attention implementation is set are
    expanded as before.

    Args:
        model: the model, or a PEFT wrapper around it. It is returned.

    Raises:
        ValueError: not a transformers model, or one without latent attention.
        NotImplementedError: models with an indexer or attention code of their own; `kv_b_proj` with a bias, of a kind
            whose weights cannot be read (other quantizations than bitsandbytes' 4-bit), or with an adapter that is no
            plain LoRA.
    """
    inner = _inner(model)
    modules = latent_modules(inner)
    if not modules:
        raise ValueError(
            f"{type(inner).__name__} has no multi-head latent attention (no module with `expand_kv` and `kv_b_proj`), "
            "so there is nothing to absorb"
        )
    reason = why_not_attach(inner)
    if reason is not None:
        raise NotImplementedError(f"{reason}, so its latents cannot be attended to directly. Leave it as it is.")
    handlers = [Absorbed() for _ in modules]
    for module, handler in zip(modules, handlers, strict=True):
        if ABSORBED not in vars(module):
            _check(module, handler)
    if not is_ours(inner.config.get_text_config(decoder=True)._attn_implementation):
        attach(inner)
        setattr(inner, _ATTACHED, True)
    for module, handler in zip(modules, handlers, strict=True):
        if ABSORBED not in vars(module):
            _patch().apply(module, handler)
    return model


def disable_absorb(model: Any) -> Any:
    """Take `enable_absorb` back: every module, and the attention implementation, are what they were before it.

    Does nothing on a model where it is not enabled. Caches may stay: they hold the same latents either way. (Those that
    drop tokens need `hf_kvcache.attach(model)`, if it was `enable_absorb` that attached the model.)
    """
    inner = _inner(model)
    for module in latent_modules(inner):
        _patch().undo(module)
    if vars(inner).pop(_ATTACHED, False):
        detach(inner)
    return model


def latent_modules(model: nn.Module) -> list[nn.Module]:
    """The attention modules of a model that cache latents."""
    return [module for module in model.modules() if hasattr(module, "expand_kv") and hasattr(module, "kv_b_proj")]


def _patch() -> Any:
    try:
        from ..patches import mla
    except ModuleNotFoundError:  # a checkout that is not installed: `patches/` lies beside the package there
        from patches import mla  # type: ignore[no-redef]
    return mla


def _inner(model: Any) -> PreTrainedModel:
    from ..cache import _model_and_config

    inner = _model_and_config(model)[0] if isinstance(model, nn.Module) else None
    if inner is None:
        raise ValueError(f"expected a transformers model, got {type(model).__name__}")
    return inner


@torch.no_grad()
def _check(module: Any, handler: Absorbed) -> None:
    """Hold two rows of random latents, expanded by the model's own code, against what its weights say."""
    missing = [name for name in _NEEDED if not hasattr(module, name)]
    if missing:
        raise NotImplementedError(
            f"{type(module).__name__} has no {', '.join(missing)}: not a form of MLA that is known"
        )
    base = getattr(module.kv_b_proj, "base_layer", module.kv_b_proj)
    halves = halves_of(module, handler.decoded, getattr(base, "compute_dtype", None) or torch.float32)
    weight = halves.weight
    if weight.is_meta or runs_as_module(module.kv_b_proj):
        return  # nothing to compare with: such layers are expanded for as long as that is so
    generator = torch.Generator().manual_seed(0)
    dtype = weight.dtype
    latent, rope = (
        torch.randn(1, 1, 2, size, generator=generator).to(weight.device, dtype)
        for size in (module.kv_lora_rank, module.qk_rope_head_dim)
    )
    linear = module.kv_b_proj
    modes = [(part, part.training) for part in linear.modules()]
    try:
        if any(type(part).__name__ == "Linear4bit" for part, _ in modes):
            linear.train()  # see `Decoded.weight_of`
        keys, values = handler.expand(module, latent, rope)
    finally:
        for part, mode in modes:
            part.training = mode
    whole = weight.float()
    for up, down, scale in halves.terms:
        whole = whole + scale * torch.matmul(up.float(), down.float())
    rows = torch.matmul(latent[0, 0].float(), whole.transpose(1, 2))  # [H, 2, Dk + Dv]
    size = halves.key_size
    wanted_keys = torch.cat([rows[..., :size], rope[0].float().expand(rows.shape[0], -1, -1)], dim=-1)
    scale_of = max(1.0, float(rows.abs().max()))
    tolerance = scale_of * (1e-4 if dtype == torch.float32 else 0.05)
    for mine, theirs in ((wanted_keys, keys[0]), (rows[..., size:], values[0])):
        if mine.shape != theirs.shape or float((mine - theirs.float()).abs().max()) > tolerance:
            raise NotImplementedError(
                f"{type(module).__name__} expands its latents in a way that is not known (other than `kv_b_proj` by "
                "head, keys first, rotary part last), so they cannot be attended to directly. Leave it as it is."
            )
