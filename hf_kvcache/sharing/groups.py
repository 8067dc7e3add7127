"""Which layer reads whose rows: the map follower -> source, made from what the user asked for and checked."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
)

from ..attention import _field
from .find import Sharing, plain_signature

# What must be equal for two layers to share, or (a string) why this layer cannot.
Kind = tuple[Any, ...] | str


def layer_kinds(config: PreTrainedConfig, scope: str = "full") -> list[Kind]:
    """The kind of every layer of the model; only layers of one kind may share.

    Raises `NotImplementedError` for models that share natively, or whose layers cannot share at all.
    """
    decoder = config.get_text_config(decoder=True)
    native = DynamicCache(config=config).layers
    reason = _why_not(config, decoder, len(native))
    if reason is not None:
        raise NotImplementedError(f"`sharing` does not fit '{config.model_type}': {reason}")
    names = getattr(decoder, "layer_types", None) or []
    rotated = getattr(decoder, "no_rope_layers", None) or []
    by_layer = getattr(decoder, "per_layer_config", None) or [decoder] * len(native)
    kinds: list[Kind] = []
    for index, layer in enumerate(native):
        name = names[index] if index < len(names) else None
        window = layer.sliding_window if type(layer) is DynamicSlidingWindowLayer else None
        if type(layer) is LinearAttentionAndFullAttentionLayer:
            kinds.append("it keeps a recurrent state beside its keys and values")
        elif window is not None and scope != "all":
            kinds.append("it has a window and is left to transformers; `scope='all'` takes it over")
        elif type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            kinds.append(f"it is left to transformers (a {type(layer).__name__})")
        else:
            positions = rotated[index] if index < len(rotated) else None
            kinds.append((name, window, positions, *_sizes(by_layer[index])))
    return kinds


def _why_not(config: PreTrainedConfig, decoder: PreTrainedConfig, layers: int) -> str | None:
    if config.is_encoder_decoder:
        return "an encoder-decoder model shares nothing between its layers here; leave it None"
    shared = getattr(decoder, "num_kv_shared_layers", None) or 0
    if isinstance(shared, int) and shared > 0:
        return (
            f"its last {shared} layers were trained to read the keys and values of earlier ones, and keep doing so. "
            "Every cache of this library holds those rows once; leave `sharing` None"
        )
    if layers != decoder.num_hidden_layers:
        return (
            f"its {decoder.num_hidden_layers} layers keep {layers} caches already, by a map of its own; leave it None"
        )
    if getattr(decoder, "kv_lora_rank", None) is not None:
        return "it caches latents, which every layer expands with weights of its own (MLA); leave it None"
    return None


def _sizes(config: PreTrainedConfig) -> tuple[Any, ...]:
    """Whatever names the shape of a cached row."""
    names = ("num_attention_heads", "num_key_value_heads", "head_dim", "multi_query")
    return tuple(_field(config, name) for name in names)


def resolve(sharing: Any, kinds: Sequence[Kind], config: PreTrainedConfig) -> dict[int, int]:
    """The map follower -> source of `sharing`, in order of the followers.

    Args:
        sharing: a factor of at least 2 (of the layers of one kind, in order, the first of each so many is the source
            of the others), a map `{follower: source}`, or a `Sharing`.
        kinds: see `layer_kinds`.
        config: of the model, to hold against that of a `Sharing`.

    Raises:
        ValueError: not such a thing, or a map that names layers which cannot share, saying why.
        NotImplementedError: a factor for a model in which no two layers could share.
    """
    if isinstance(sharing, Sharing):
        signature = plain_signature(config)
        if signature != sharing.signature:
            raise ValueError(
                f"`sharing` was found for another model ({sharing.signature}) than this one ({signature}): run "
                "`find_sharing` for it"
            )
        sharing = sharing.map
    if isinstance(sharing, numbers.Integral) and not isinstance(sharing, bool):
        return _by_factor(int(sharing), kinds)
    if not isinstance(sharing, Mapping):
        raise ValueError(
            "`sharing` must be a whole number of layers that share (2 for pairs), a map {follower: source} of layer "
            f"indices, or what `find_sharing` returned; got {type(sharing).__name__}"
        )
    return _checked(sharing, kinds)


def _by_factor(factor: int, kinds: Sequence[Kind]) -> dict[int, int]:
    if factor < 2:
        raise ValueError(f"`sharing` must be at least 2 (layers that share one cache), got {factor}; None shares none")
    groups: dict[Kind, list[int]] = {}
    for index, kind in enumerate(kinds):
        if not isinstance(kind, str):
            groups.setdefault(kind, []).append(index)
    found = {
        layer: members[place - place % factor]
        for members in groups.values()
        for place, layer in enumerate(members)
        if place % factor
    }
    if not found:
        reasons = sorted({kind for kind in kinds if isinstance(kind, str)})
        raise NotImplementedError(
            f"`sharing={factor}` would change nothing: no two layers of this model are of one kind and can share"
            + (f" (of the others, {'; '.join(reasons)})" if reasons else "")
        )
    return dict(sorted(found.items()))


def _checked(mapping: Mapping[Any, Any], kinds: Sequence[Kind]) -> dict[int, int]:
    if not mapping:
        raise ValueError("`sharing` is an empty map: leave it None to share nothing")
    for layer in [*mapping.keys(), *mapping.values()]:
        if not isinstance(layer, numbers.Integral) or isinstance(layer, bool) or int(layer) not in range(len(kinds)):
            raise ValueError(f"`sharing` names layer {layer!r}; this model has layers 0 to {len(kinds) - 1}")
    found = {int(follower): int(source) for follower, source in sorted(mapping.items())}
    for follower, source in found.items():
        pair = f"`sharing`: layer {follower} cannot read the rows of layer {source}"
        if source >= follower:
            raise ValueError(f"{pair}, which does not come before it: map later layers to earlier ones")
        if source in found:
            raise ValueError(f"{pair}, which itself reads those of layer {found[source]}: map both to that one")
        for layer in (follower, source):
            if isinstance(kinds[layer], str):
                raise ValueError(f"{pair}: of layer {layer}, {kinds[layer]}")
        if kinds[follower] != kinds[source]:
            raise ValueError(
                f"{pair}: they differ in kind, window, positions or sizes ({kinds[follower]} and {kinds[source]})"
            )
    return found


def check_devices(found: dict[int, int], devices: Sequence[Any]) -> None:
    """Raises `ValueError` where a follower's layer is on another device than its source's."""
    for follower, source in found.items():
        if devices[follower] != devices[source]:
            raise ValueError(
                f"`sharing`: layer {follower} is on {devices[follower]} and layer {source} on {devices[source]}, so it "
                "would fetch all rows in every step. Change the device map, or give a map of layers {follower: source} "
                "that share a device."
            )


__all__ = ["Kind", "check_devices", "layer_kinds", "resolve"]
