"""Sharing: a map of layers that share, how it was found, and its file (nothing in it is trusted)."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from typing import Any

METHODS = ("kl", "kvsharer")
FORMAT_VERSION = 1
MAX_FILE_BYTES = 10_000_000
MAX_LAYERS = 4096


@dataclass
class Sharing:
    """Which layer reads whose rows, and how it was found. `KVCache(model, sharing=this)` takes it.

    Attributes:
        map: follower -> source, layer indices, in the order they were chosen: the first n pairs are what a search for n
            would have found.
        layers: layers of the model.
        method: `"kl"` or `"kvsharer"`.
        kl: divergence of the shared model's predictions from the model's own, on the calibration texts (nats a token).
        cosine: mean cosine of the last hidden states of the two, in [-1, 1].
        tried: `[follower, source, order, result]` of every candidate that was measured, in that order. For `"kvsharer"`
            the distance of the pair and the cosine of the model that shares it too; for `"kl"` the divergence of the
            pair alone (of the first ones, the same again) and together with those chosen before.
        texts, tokens: how many texts were used, and tokens of each.
        signature: of the model (type and sizes).
    """

    map: dict[int, int]
    layers: int
    method: str
    kl: float
    cosine: float
    tried: list[list[float]]
    texts: int
    tokens: int
    signature: list[Any]

    def save(self, path: str) -> None:
        """Write it as JSON (whole, or not at all)."""
        content = asdict(self) | {"format_version": FORMAT_VERSION, "map": [list(pair) for pair in self.map.items()]}
        temporary = f"{os.fspath(path)}.part{os.getpid()}"
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                json.dump(content, file, indent=1, allow_nan=False)
            os.replace(temporary, path)
        finally:
            if os.path.exists(temporary):
                os.remove(temporary)

    @classmethod
    def load(cls, path: str) -> Sharing:
        """Read a file written by `save`. Raises `ValueError` for anything that is not one, or is not sound."""
        if os.path.getsize(path) > MAX_FILE_BYTES:
            raise ValueError(f"{path}: larger than {MAX_FILE_BYTES} bytes, so not a map of layers")
        try:
            with open(path, encoding="utf-8") as file:
                return _read(json.load(file, parse_constant=_no_constant))
        except (ValueError, RecursionError) as error:  # what json and unicode raise are ValueErrors
            raise ValueError(f"{path}: not a map of shared layers, or altered ({error})") from error


def plain_signature(config: Any) -> list[Any]:
    """`signature_of` as JSON gives it back."""
    from ..attention import signature_of

    return json.loads(json.dumps(signature_of(config.get_text_config(decoder=True))))


# ---------------------------------------------------------------------- files


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is no finite number")


def _read(content: Any) -> Sharing:
    """The map in the content of a file, every field checked."""
    if not isinstance(content, dict):
        raise ValueError("holds no map")
    if type(content.get("format_version")) is not int or content["format_version"] != FORMAT_VERSION:
        raise ValueError(f"format version {content.get('format_version')!r}, this version reads {FORMAT_VERSION}")
    names = {field.name for field in fields(Sharing)}
    given = set(content) - {"format_version"}
    if given != names:
        raise ValueError(f"lacks the fields {sorted(names - given)} and has unknown ones {sorted(given - names)}")
    for name, least, most in (("layers", 2, MAX_LAYERS), ("texts", 1, 10**6), ("tokens", 1, 10**9)):
        if type(content[name]) is not int or not least <= content[name] <= most:
            raise ValueError(f"`{name}` must be a whole number of {least} to {most}")
    if content["method"] not in METHODS:
        raise ValueError(f"`method` is none of {', '.join(METHODS)}")
    _check_number("kl", content["kl"], 0, 1e9)
    _check_number("cosine", content["cosine"], -1, 1)
    layers = content["layers"]
    pairs = content["map"]
    if not isinstance(pairs, list) or not 1 <= len(pairs) < layers:
        raise ValueError("`map` must list pairs of layers")
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2 or any(type(x) is not int for x in pair):
            raise ValueError("`map` must list pairs of layers")
        if not 0 <= pair[1] < pair[0] < layers:
            raise ValueError(f"`map` has layer {pair[0]} follow layer {pair[1]}, of {layers} layers")
    found = {follower: source for follower, source in pairs}
    if len(found) != len(pairs) or set(found) & set(found.values()):
        raise ValueError("`map` names a follower twice, or as a source")
    tried = content["tried"]
    if not isinstance(tried, list):
        raise ValueError("`tried` must be a list")
    for row in tried:
        if not isinstance(row, list) or len(row) != 4:
            raise ValueError("`tried` must list [follower, source, order, result]")
        if any(type(x) is not int for x in row[:2]) or not 0 <= row[1] < row[0] < layers:
            raise ValueError(f"`tried` names layers other than 0 to {layers - 1}")
        for value in row[2:]:
            _check_number("tried", value, -1, 1e9)
    _check_signature(content["signature"])
    return Sharing(**{name: content[name] for name in names} | {"map": found})


def _check_number(name: str, value: Any, least: float, most: float) -> None:
    if type(value) not in (int, float) or not least <= value <= most:  # no NaN either
        raise ValueError(f"`{name}` must be a number from {least} to {most}, got {str(value)[:40]}")


def _check_signature(signature: Any) -> None:
    def plain(value: Any) -> bool:
        return value is None or type(value) in (int, str)

    fine = isinstance(signature, list) and 1 <= len(signature) <= 64
    if not fine or not all(plain(x) or (isinstance(x, list) and all(map(plain, x))) for x in signature):
        raise ValueError("`signature` must list a model type and sizes")
