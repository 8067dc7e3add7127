"""How a model's cached keys depend on position: found by asking the model, not by reading its config.

A single token attends to nothing but itself, so its hidden states are the same at every position unless the model adds
positions to them. Two one-token passes at different positions therefore show, layer by layer, what the model does to a
key: nothing (no positional encoding, or a bias), a rotation (RoPE: which dimensions, which layout, which frequencies),
or something that cannot be undone (learned absolute positions).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

_PROBES = (5, 61, 211)  # positions to try; all but tiny contexts contain them


@dataclass(frozen=True)
class KeyRotation:
    """A rotary embedding of part of a cached row.

    Attributes:
        inv_freq: `[R/2]` float32 radians per token.
        interleaved: pairs are `(2i, 2i+1)`; otherwise `(i, i + R/2)`.
        offset: first rotated dimension.
        which: `"keys"`, or `"values"` where a model caches its rotary key in the second tensor (MLA).
    """

    inv_freq: torch.Tensor
    interleaved: bool
    offset: int
    which: str = "keys"

    def apply(self, rows: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
        """Rows `[B, H, F, D]` moved forward by `distance` `[B, 1]` tokens, in float32 internally; a new tensor."""
        inv_freq = self.inv_freq.to(rows.device)
        size = 2 * inv_freq.numel()
        angle = distance.to(rows.device).float()[:, :, None, None] * inv_freq  # [B, 1, 1, R/2]
        cos, sin = angle.cos(), angle.sin()
        part = rows[..., self.offset : self.offset + size].float()
        if self.interleaved:
            first, second = part[..., 0::2], part[..., 1::2]
            turned = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
        else:
            first, second = part.chunk(2, dim=-1)
            turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        result = rows.clone()
        result[..., self.offset : self.offset + size] = turned.to(rows.dtype)
        return result


def find_rotations(model: PreTrainedModel) -> list[KeyRotation | None]:
    """The rotation of each layer's cached rows; None where they do not depend on position.

    Costs a few one-token forward passes. Raises `NotImplementedError` for models whose positions cannot be moved.
    """
    name = type(model).__name__
    _refuse_growing_frequencies(model)
    _refuse_positions_over_images(model)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            still = _one_token(model, 0)
            moved = [(p, _one_token(model, p)) for p in _probes(model)]
    except NotImplementedError:
        raise
    except Exception as error:
        raise NotImplementedError(
            f"{name}: a one-token pass with explicit `position_ids` failed ({type(error).__name__}: {error}), so how "
            "its keys depend on position is unknown and they cannot be moved. Use SnapKVCache or HeavyHitterCache."
        ) from error
    finally:
        model.train(was_training)
    frequencies = _frequencies(model, sorted({x.shape[-1] for rows in still for x in rows.values()}))
    # Attention sinks in low precision: the weight of a lone token on itself rounds differently at each position.
    same = partial(_same, share=0.1 if model.dtype == torch.float32 else 1.0)
    result: list[KeyRotation | None] = []
    for layer, before in enumerate(still):
        found: list[KeyRotation] = []
        for which, x in before.items():
            if all(same(x, rows[layer][which]) for _, rows in moved):
                continue
            rotation = _match(x, [(p, rows[layer][which]) for p, rows in moved], frequencies, which)
            if rotation is None:
                raise NotImplementedError(
                    f"{name}: the {which} of layer {layer} depend on absolute position in a way that is no rotation "
                    "(learned absolute positions?), so tokens cannot be moved inside a window. Use SnapKVCache or "
                    "HeavyHitterCache, which keep original positions."
                )
            found.append(rotation)
        if len(found) > 1:
            raise NotImplementedError(f"{name}: layer {layer} rotates both cached tensors; this is not supported")
        result.append(found[0] if found else None)
    if not any(result) and not _lone_position_is_enough(model):
        raise NotImplementedError(
            f"{name}: its keys depend on absolute position (learned positions that ignore `position_ids`), so tokens "
            "cannot be moved inside a window. Use SnapKVCache or HeavyHitterCache, which keep original positions."
        )
    return result


def _lone_position_is_enough(model: PreTrainedModel) -> bool:
    """Whether keys that ignore `position_ids` really ignore position: BART counts tokens by itself.

    Equal tokens side by side have equal keys in the first attention layer, unless something counts them. (Recurrent
    layers before it do, but models that have them and no rotation have no positions at all.)
    """
    cache = DynamicCache(config=model.config)
    if any(cache.is_linear) or any(hasattr(layer, "conv_states") for layer in cache.layers):
        return True
    ids = torch.full((1, 6), 7 % model.config.get_text_config(decoder=True).vocab_size, device=model.device)
    was_training = model.training
    model.eval()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=cache, use_cache=True)
    model.train(was_training)
    keys = next((layer.keys for layer in cache.layers if isinstance(layer.keys, torch.Tensor)), None)
    if keys is None:
        return True
    keys = keys.float()
    return _same(keys[:, :, :1].expand_as(keys), keys, 0.1)


def _refuse_growing_frequencies(model: PreTrainedModel) -> None:
    config = model.config.get_text_config(decoder=True)
    parameters: Any = getattr(config, "rope_parameters", None) or {}
    kinds = {parameters.get("rope_type")} | {p.get("rope_type") for p in parameters.values() if isinstance(p, dict)}
    for kind in ("dynamic", "longrope"):
        if kind in kinds:
            raise NotImplementedError(
                f"{type(model).__name__} uses rope_type='{kind}', whose frequencies change with the length of the "
                "stream, so cached keys of a long stream do not fit together. Use SnapKVCache or HeavyHitterCache."
            )


def _refuse_positions_over_images(model: PreTrainedModel) -> None:
    if any(hasattr(module, "get_rope_index") for module in model.modules()):
        raise NotImplementedError(
            f"{type(model).__name__} gives the tokens of an image positions on a grid (M-RoPE), which advance by less "
            "than one a token, so the number of dropped tokens does not say how far to move the first ones. Pass "
            "move_sinks=False: they keep their positions."
        )


def _probes(model: PreTrainedModel) -> list[int]:
    config = model.config.get_text_config(decoder=True)
    limit = getattr(config, "max_position_embeddings", None) or 1 << 30
    return [p for p in _PROBES if p < limit] or [1]


def _one_token(model: PreTrainedModel, position: int) -> list[dict[str, torch.Tensor]]:
    """Keys and values of each layer for three lone tokens at `position`, in float32."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.tensor([[3 % vocabulary], [7 % vocabulary], [11 % vocabulary]], device=model.device)
    cache = DynamicCache(config=model.config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            position_ids=torch.full_like(ids, position),
            past_key_values=cache,
            use_cache=True,
        )
    result: list[dict[str, torch.Tensor]] = []
    for layer in cache.layers:
        rows: dict[str, torch.Tensor] = {}
        if isinstance(getattr(layer, "keys", None), torch.Tensor):
            # The newest row: a sliding layer may keep none but that one anyway.
            rows = {"keys": layer.keys[:, :, -1:].float(), "values": layer.values[:, :, -1:].float()}
        result.append(rows)
    return result


def _frequencies(model: PreTrainedModel, sizes: Iterable[int]) -> list[torch.Tensor]:
    """Candidates for radians per token: the model's own buffers, else the usual ones; each in both directions."""
    found: list[torch.Tensor] = []

    def add(value: torch.Tensor) -> None:
        if not any(torch.equal(value, other) for other in found):
            found.extend([value, -value])

    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name.endswith("inv_freq") and "original" not in name and buffer.ndim == 1:
                add(buffer.detach().float().cpu())
    for module in model.modules():
        chosen = getattr(module, "frequencies", None)  # of a converted layer, see `hf_kvcache.mla.MLAAttention`
        if isinstance(chosen, torch.Tensor) and not chosen.is_floating_point():
            index = chosen.detach().cpu()
            for table in [t for t in found if index.numel() and int(index.max()) < t.numel()]:
                add(table[index])
    config = model.config.get_text_config(decoder=True)
    for size in (getattr(config, "rotary_dim", None), *sizes):  # GPT-J and CodeGen hold tables of sines
        if isinstance(size, int) and size > 1:
            add(1.0 / 10000.0 ** (torch.arange(0, size, 2).float() / size))
    return found


def _tolerance(x: torch.Tensor) -> float:
    return 4e-2 * float(x.abs().max())


def _same(x: torch.Tensor, y: torch.Tensor, share: float) -> bool:
    return x.shape == y.shape and bool(torch.allclose(x, y, rtol=0, atol=_tolerance(x) * share))


def _match(
    x: torch.Tensor, moved: list[tuple[int, torch.Tensor]], frequencies: list[torch.Tensor], which: str
) -> KeyRotation | None:
    for inv_freq in frequencies:
        size = 2 * inv_freq.numel()
        if size > x.shape[-1]:
            continue
        for offset in {0, x.shape[-1] - size}:
            for interleaved in (False, True):
                rotation = KeyRotation(inv_freq, interleaved, offset, which)
                if all(
                    torch.allclose(
                        rotation.apply(x, torch.full((x.shape[0], 1), p, device=x.device)),
                        y,
                        rtol=0,
                        atol=_tolerance(x),
                    )
                    for p, y in moved
                ):
                    return rotation
    return None
