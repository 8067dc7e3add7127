"""Caches by name, as they are typed on a command line.

A spec is one technique or two joined by `+`: a policy (which tokens stay) and a codec (how they are written), in any
order. Arguments follow a colon, as `name=value,...`, and are those of the technique's own class:

    kv                                              every token, full precision
    kivi:nbits=4,num_sink_tokens=4                  every token, 4-bit integers
    snapkv:max_capacity_prompt=0.25                 a quarter of the prompt
    snapkv:max_capacity_prompt=0.5+kivi:nbits=4     half of the prompt, in 4 bits

Where an argument counts tokens, a number with a decimal point is a share of the prompt. Everything that can be wrong
with a spec is found without a model, so that a typing error does not cost the time of loading one.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from .. import codecs as codecs_package
from ..cache import KVCache
from ..caches import HeavyHitterCache, SlidingWindowCache, SnapKVCache
from ..codecs import KIVI, Codec, Float8, Rotated
from ..policies import HeavyHitter, Policy, SlidingWindow, SnapKV

# Arguments that count tokens, of whichever technique: these may be given as a share of the prompt.
SIZES = frozenset(
    "max_capacity_prompt window_size wide_window decode_budget heavy_size recent_size window_length "
    "residual_length".split()
)


@dataclass(frozen=True)
class Technique:
    """A policy or a codec that has a name.

    Attributes:
        name: what is typed.
        make: the class (or function) whose arguments are those of the spec; it raises `ValueError` for bad ones.
        cache: for a policy, the cache that takes the same arguments.
    """

    name: str
    make: Callable[..., Any]
    cache: Callable[..., KVCache] | None = None

    @property
    def kind(self) -> str:
        """`"policy"` or `"codec"`."""
        return "codec" if self.cache is None else "policy"

    @property
    def arguments(self) -> dict[str, bool]:
        """Names of the arguments, and whether each must be given."""
        found = inspect.signature(self.make).parameters.values()
        named = {p.name: p.default is p.empty for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        # Which layers are replaced is asked of the cache, not of the policy.
        return named if self.cache is None else named | {"scope": False}


_POLICIES = (
    Technique("kv", Policy, KVCache),
    Technique("snapkv", SnapKV, SnapKVCache),
    Technique("h2o", HeavyHitter, HeavyHitterCache),
    Technique("window", SlidingWindow, SlidingWindowCache),
)
_CODECS = (Technique("kivi", KIVI), Technique("rotated", Rotated), Technique("float8", Float8))


def policies() -> dict[str, Technique]:
    """The policies that have a name."""
    return {technique.name: technique for technique in _POLICIES}


def codecs() -> dict[str, Technique]:
    """The codecs that have a name, and the presets of `hf_kvcache.codecs`: functions that return a codec."""
    presets: Mapping[str, Callable[..., Codec]] = getattr(codecs_package, "PRESETS", {})
    found = {name: Technique(name, make) for name, make in presets.items()}
    return found | {technique.name: technique for technique in _CODECS}


@dataclass(frozen=True)
class Part:
    """One technique of a spec with its arguments as typed."""

    technique: Technique
    arguments: dict[str, Any] = field(default_factory=dict)

    def resolved(self, prompt_tokens: int) -> dict[str, Any]:
        """The arguments, shares of the prompt turned into tokens."""
        return {name: _tokens(name, value, prompt_tokens) for name, value in self.arguments.items()}

    def made(self, prompt_tokens: int) -> Any:
        """The policy or codec. Raises `ValueError` as its class does."""
        arguments = self.resolved(prompt_tokens)
        if self.technique.cache is not None:
            arguments.pop("scope", None)
        return self.technique.make(**arguments)


@dataclass(frozen=True)
class Spec:
    """A spec that was read: `policy` is `kv` where none was named, `codec` is None for full precision."""

    text: str
    policy: Part
    codec: Part | None

    def check(self, prompt_tokens: int) -> None:
        """Raise `ValueError` for arguments that no model could be given, for prompts of so many tokens."""
        for part in (self.policy, self.codec):
            if part is not None:
                try:
                    part.made(prompt_tokens)
                except (TypeError, ValueError) as error:
                    raise ValueError(f"{self.text}: {error}") from error
        scope = self.policy.arguments.get("scope", "full")
        if scope not in ("full", "all"):
            raise ValueError(f"{self.text}: `scope` must be 'full' or 'all', got {scope!r}")

    def build(self, model: PreTrainedModel, prompt_tokens: int) -> KVCache:
        """A new cache for this model, for prompts of so many tokens."""
        self.check(prompt_tokens)
        arguments = self.policy.resolved(prompt_tokens)
        if self.codec is not None:
            arguments["codec"] = self.codec.made(prompt_tokens)
        assert self.policy.technique.cache is not None
        return self.policy.technique.cache(model, **arguments)


def parse(text: str) -> Spec:
    """Read a spec. Raises `ValueError`, listing what there is, for names that do not exist."""
    known = codecs() | policies()
    found: dict[str, Part] = {}
    for piece in text.split("+"):
        part = _part(piece.strip(), known)
        kind = part.technique.kind
        if kind in found:
            raise ValueError(
                f"{text!r} names two {'codecs' if kind == 'codec' else 'policies'}, "
                f"{found[kind].technique.name} and {part.technique.name}: a cache has one"
            )
        found[kind] = part
    return Spec(text, found.get("policy", Part(policies()["kv"])), found.get("codec"))


def build(model: PreTrainedModel, spec: str, prompt_tokens: int) -> KVCache:
    """The cache that `spec` names, for prompts of `prompt_tokens` tokens (shares are shares of these).

    Raises:
        ValueError: names and arguments that do not exist or cannot be.
        NotImplementedError: models or combinations that the technique cannot serve, as the cache says.
    """
    return parse(spec).build(model, prompt_tokens)


def _part(piece: str, known: Mapping[str, Technique]) -> Part:
    name, _, rest = piece.partition(":")
    if name not in known:
        names = "policies: " + ", ".join(policies()) + "; codecs: " + ", ".join(codecs())
        raise ValueError(f"unknown cache {name!r}. There are {names}; one of each can be joined with +")
    technique = known[name]
    allowed = technique.arguments
    arguments: dict[str, Any] = {}
    for pair in filter(None, re.split(r",(?![^\[(]*[\])])", rest)):  # commas inside a list stay
        key, equals, value = (word.strip() for word in pair.partition("="))
        if not equals:
            raise ValueError(f"{name}: expected name=value, got {pair!r}")
        if key not in allowed:
            raise ValueError(f"{name} takes no argument {key!r}; it takes {', '.join(allowed) or 'none'}")
        if key in arguments:
            raise ValueError(f"{name}: {key!r} is given twice")
        arguments[key] = _literal(value)
    missing = [key for key, required in allowed.items() if required and key not in arguments]
    if missing:
        raise ValueError(f"{name} needs {', '.join(missing)}: {name}:{','.join(f'{key}=...' for key in missing)}")
    return Part(technique, arguments)


def _literal(text: str) -> Any:
    """A Python literal, or else the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _tokens(name: str, value: Any, prompt_tokens: int) -> Any:
    if name not in SIZES or not isinstance(value, float):
        return value
    if not 0 < value <= 1:
        raise ValueError(f"`{name}={value}` is a share of the prompt, which is above 0 and at most 1.0")
    return max(1, round(value * prompt_tokens))
