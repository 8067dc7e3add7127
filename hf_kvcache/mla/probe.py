"""A few tokens through a model, to hold an exported form of its layers against what they do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .module import MLAAttention

_TOKENS = 48


@dataclass
class Probe:
    """What was seen.

    Attributes:
        streams: `[1, T, hidden]` before each layer, and after the last one.
        logits: `[1, T, vocabulary]`.
        rms: for each layer the largest root mean square of a token's latent, and of what goes into the projections.
        tolerance: how far a form that is the same may be off, relative to the largest value.
    """

    ids: torch.Tensor
    streams: list[torch.Tensor]
    logits: torch.Tensor
    rms: list[tuple[float, float]]
    tolerance: float


@torch.no_grad()
def probe(model: Any, modules: list[MLAAttention]) -> Probe:
    """Run `_TOKENS` tokens of all over the vocabulary through the model."""
    ids = (torch.arange(min(_TOKENS, model.config.max_position_embeddings)) * 7919 + 5) % model.config.vocab_size
    layers = model.model.layers
    streams: list[torch.Tensor] = []
    last: list[torch.Tensor] = []
    latents: dict[int, float] = {}
    inputs: dict[int, float] = {}

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        streams.append((args[0] if args else kwargs["hidden_states"]).detach().cpu().double())

    def after(module: nn.Module, args: Any, output: Any) -> None:
        last.append((output[0] if isinstance(output, tuple) else output).detach().cpu().double())

    def down(module: MLAAttention) -> Callable[..., None]:
        def hook(linear: nn.Module, args: Any, output: torch.Tensor) -> None:
            inputs[id(module)] = _rms(args[0])
            latents[id(module)] = _rms(output[..., : module.kv_lora_rank])

        return hook

    handles = [layer.register_forward_pre_hook(before, with_kwargs=True) for layer in layers]
    handles.append(layers[-1].register_forward_hook(after))
    handles += [module.kv_a_proj_with_mqa.register_forward_hook(down(module)) for module in modules]
    was_training = model.training
    model.eval()
    try:
        logits = model(input_ids=ids[None].to(model.device), use_cache=False).logits
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    exact = model.dtype in (torch.float32, torch.float64)
    rms = [(latents[id(module)], inputs[id(module)]) for module in modules]
    return Probe(ids, [*streams, *last], logits.detach().cpu().double(), rms, 1e-3 if exact else 6e-2)


def _rms(rows: torch.Tensor) -> float:
    return float(rows.double().square().mean(-1).max().sqrt())


@torch.no_grad()
def check_layers(
    config: Any,
    seen: Probe,
    layer: Callable[[int], dict[str, torch.Tensor]],
    ends: dict[str, torch.Tensor],
    stream: float,
) -> float:
    """Run every layer of the exported form on what the model's own had; the largest relative difference of an output.

    Raises `NotImplementedError` where one is larger than rounding: then the model does something that the format does
    not, such as scaled embeddings, or norms that add one.
    """
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
        DeepseekV3DecoderLayer,
        DeepseekV3RMSNorm,
        DeepseekV3RotaryEmbedding,
    )

    length = len(seen.ids)
    config = type(config).from_dict(config.to_dict())
    config._attn_implementation = "eager"
    table = DeepseekV3RotaryEmbedding(config)(torch.zeros(1, dtype=torch.float32), torch.arange(length)[None])
    mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
    worst = 0.0

    def hold(what: str, mine: torch.Tensor, theirs: torch.Tensor) -> None:
        nonlocal worst
        off = float((mine.double() - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30))
        worst = max(worst, off)
        if not off <= seen.tolerance:
            raise NotImplementedError(
                f"{what} of this model does something that DeepSeek-V3's does not: outputs differ by {off:.2g} of the "
                "largest. Only decoders like Llama can be exported (RMS norms before attention and MLP, no scaled "
                "embeddings, residuals or logits)"
            )

    hold("the embedding", ends["model.embed_tokens.weight"][seen.ids][None] / stream, seen.streams[0])
    with torch.device("meta"):
        made: Any = DeepseekV3DecoderLayer(config, 0)
    made.eval()
    for index in range(len(seen.streams) - 1):
        state = {name: tensor.float() for name, tensor in layer(index).items()}
        made.load_state_dict(state, strict=True, assign=True)
        x = (seen.streams[index] * stream).float()
        output = made(x, attention_mask=mask, position_ids=torch.arange(length)[None], position_embeddings=table)
        output = output[0] if isinstance(output, tuple) else output
        hold(f"layer {index}", output.double() / stream, seen.streams[index + 1])
    norm = DeepseekV3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
    norm.weight.data = ends["model.norm.weight"].float()
    normed = norm((seen.streams[-1] * stream).float())
    hold("the head", normed @ ends["lm_head.weight"].float().t(), seen.logits)
    return worst
