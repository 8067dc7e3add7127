"""What must agree before rows of one computation may stand in for another's."""

from __future__ import annotations

import hashlib
import json
from typing import Any, NamedTuple

import torch

from .. import attention, storage
from ..cache import KVCache

# Of a config, what says nothing about the numbers that are computed.
_IRRELEVANT = {"dtype", "torch_dtype", "transformers_version", "use_cache", "return_dict", "output_attentions"}
_IRRELEVANT |= {"output_hidden_states", "architectures", "_name_or_path", "attn_implementation"}


class Key(NamedTuple):
    """What rows belong to, and on which device they are in memory."""

    name: str
    place: str


def key_of(model: Any, cache: KVCache, content: dict[str, Any]) -> Key:
    """The name is a SHA-256 over everything beside the token ids that keys and values depend on.

    That is: weights (a sample of each, see `storage.fingerprint`) and their precision, which adapters are active and
    all of their weights, the config, the attention implementation underneath, autocast, training mode, the technique
    with its codec and arguments, and the `content` that goes in beside the ids (images, sound), byte for byte.
    """
    config = model.config.get_text_config(decoder=True)
    implementation = config._attn_implementation
    device = model.device.type
    parts = {
        "version": 1,
        "technique": [type(cache).__name__, storage._policy_name(cache), cache.arguments(), cache.scope],
        "codec": storage._described(cache.codec),
        "fingerprint": cache.fingerprint,
        "adapters": adapters_of(model),
        "config": {name: value for name, value in config.to_dict().items() if name not in _IRRELEVANT},
        "attention": attention._before.get(implementation, implementation),
        "autocast": str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None,
        "training": model.training,
        "content": {name: content_hash(content[name]) for name in sorted(content)},
    }
    name = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]
    return Key(name, str(model.device))


def adapters_of(model: Any) -> str | None:
    """Names and all weights of what PEFT has put into the model, or None: a sample would not tell adapters apart."""
    digest, found = hashlib.sha256(), False
    for name, module in model.named_modules():
        active = getattr(module, "active_adapters", None)
        if not isinstance(active, (list, tuple)):
            continue
        found = True
        off = bool(getattr(module, "disable_adapters", False))
        digest.update(f"{name}{list(active)}{off}{sorted(getattr(module, 'merged_adapters', []))}".encode())
        digest.update(str(getattr(module, "scaling", None)).encode())
        for own, parameter in module.named_parameters():
            if not own.startswith("base_layer.") and not parameter.is_meta:
                digest.update(own.encode())
                digest.update(_bytes(parameter))
    return digest.hexdigest() if found else None


def content_hash(value: Any) -> str:
    """A SHA-256 of an input: a tensor's shape, type and bytes, or a list of such."""
    digest = hashlib.sha256()
    if isinstance(value, torch.Tensor):
        digest.update(f"{tuple(value.shape)}{value.dtype}".encode())
        digest.update(_bytes(value))
    elif isinstance(value, (list, tuple)):
        digest.update(f"{len(value)}".encode())
        for item in value:
            digest.update(content_hash(item).encode())
    else:
        digest.update(repr(value).encode())
    return digest.hexdigest()


def placeholders(config: Any, ids: torch.Tensor) -> tuple[int, int]:
    """Where in `ids` `[T]` the tokens stand for images or sound: from the first to behind the last.

    Where none is known everything does, so that no prefix ends outside.
    """
    known = set()
    for name, value in vars(config).items():
        what, _, kind = name.partition("_token_")
        if (
            what in ("image", "video", "audio", "vision", "speech")
            and kind in ("id", "index")
            and isinstance(value, int)
        ):
            known.add(value)
    at = torch.isin(ids, torch.tensor(sorted(known), dtype=ids.dtype)).nonzero().flatten()
    return (int(at[0]), int(at[-1]) + 1) if len(at) else (0, len(ids) + 1)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def longest_steady(config: Any) -> int | None:
    """Up to how many tokens the positions of keys do not depend on the length of the text, or None: always."""
    found: list[int] = []
    stack = [getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)]
    while stack:
        item = stack.pop()
        if not isinstance(item, dict):
            continue
        kind = item.get("rope_type", item.get("type"))
        if kind in ("dynamic", "longrope"):
            before = item.get("original_max_position_embeddings")
            before = before or getattr(config, "original_max_position_embeddings", None)
            found.append(int(before or config.max_position_embeddings))
        stack += item.values()
    return min(found) if found else None
