"""Caches by name, as they are typed on a command line or in a YAML file.

A spec is one technique or several joined by `+`, one of a kind, in any order. Arguments follow a colon, as
`name=value,...`, and are those of the technique's own class:

    kv                                                     every token, full precision
    kivi:nbits=4,num_sink_tokens=4                         every token, 4-bit integers
    snapkv:max_capacity_prompt=0.25                        a quarter of the prompt
    snapkv:max_capacity_prompt=0.5+rotated-4               half of the prompt, in 4 bits
    kivi:nbits=4,residual_length=64+offload:resident_length=1024
    sharing:factor=2+paged:block_size=64

Where an argument counts tokens, a number with a decimal point is a share of the prompt. `str(spec)` is the spec again,
in one canonical form: equal specs have equal texts. Everything that can be wrong with a spec is found without a model,
so that a typing error does not cost the time of loading one, and the error points at it.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from . import codecs as codecs_package
from .cache import KVCache
from .caches import HeavyHitterCache, SlidingWindowCache, SnapKVCache
from .codecs import KIVI, Codec, Float8, Latent, Rotated
from .offload import Offload
from .paging import BlockPool
from .policies import HeavyHitter, Policy, SlidingWindow, SnapKV
from .sharing import Sharing

# Arguments that count tokens, of whichever technique: these may be given as a share of the prompt.
SIZES = frozenset(
    "max_capacity_prompt window_size wide_window decode_budget heavy_size recent_size window_length "
    "residual_length resident_length".split()
)
KINDS = ("policy", "codec", "sharing", "pool", "offload")  # in the order in which a spec is written
_PLURAL = {"policy": "policies", "codec": "codecs", "sharing": "sharings", "pool": "pools", "offload": "offloads"}
_BARE = re.compile(r"[\w./~-]+")
_LONGEST = 10_000


class SpecError(ValueError):
    """A spec that cannot be read or built. `token` is the part of `text` that is wrong, from `start` to `stop`."""

    def __init__(self, message: str, text: str, start: int, stop: int) -> None:
        shown = "".join(c if c.isprintable() else "?" for c in text)
        marks = " " * start + "^" * max(1, stop - start)
        super().__init__(f"{message}\n  {shown}\n  {marks}")
        self.message, self.text, self.start, self.stop = message, text, start, stop

    @property
    def token(self) -> str:
        return self.text[self.start : self.stop]

    def __reduce__(self) -> Any:
        return type(self), (self.message, self.text, self.start, self.stop)


def _sharing(factor: int | None = None, map: Mapping[int, int] | None = None, file: str | None = None) -> Any:
    """What `KVCache(sharing=...)` takes: a factor (2 if nothing is given), a map, or what a file of `Sharing` holds."""
    given = [name for name, value in (("factor", factor), ("map", map), ("file", file)) if value is not None]
    if len(given) > 1:
        raise ValueError(f"`{given[1]}` and `{given[0]}` say the same thing twice: give one of factor, map and file")
    if file is not None:
        try:
            return Sharing.load(file)
        except OSError as error:
            raise ValueError(f"`file` cannot be read: {error}") from error
    if map is not None and not isinstance(map, Mapping):
        raise ValueError(f"`map` must be a map of layers, as {{1: 0, 3: 2}}, got {map!r}")
    return (2 if factor is None else factor) if map is None else dict(map)


@dataclass(frozen=True)
class Technique:
    """Something that has a name.

    Attributes:
        name: what is typed.
        kind: one of `KINDS`; a spec has at most one technique of each.
        make: the class (or function) whose arguments are those of the spec; it raises `ValueError` for bad ones.
        cache: for a policy, the cache that takes the same arguments.
    """

    name: str
    kind: str
    make: Callable[..., Any]
    cache: Callable[..., KVCache] | None = None

    @property
    def arguments(self) -> dict[str, bool]:
        """Names of the arguments, and whether each must be given."""
        found = inspect.signature(self.make).parameters
        if any(p.kind is p.VAR_KEYWORD for p in found.values()):  # presets pass theirs on to a codec
            found = inspect.signature(type(self.make())).parameters
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        named = {p.name: p.default is p.empty for p in found.values() if p.kind in kinds}
        # Which layers are replaced is asked of the cache, not of the policy.
        return named if self.cache is None else named | {"scope": False}


_OWN = (
    Technique("kv", "policy", Policy, KVCache),
    Technique("snapkv", "policy", SnapKV, SnapKVCache),
    Technique("h2o", "policy", HeavyHitter, HeavyHitterCache),
    Technique("window", "policy", SlidingWindow, SlidingWindowCache),
    Technique("kivi", "codec", KIVI),
    Technique("rotated", "codec", Rotated),
    Technique("float8", "codec", Float8),
    Technique("latent", "codec", Latent),
    Technique("sharing", "sharing", _sharing),
    Technique("paged", "pool", BlockPool),
    Technique("offload", "offload", Offload),
)


def techniques() -> dict[str, Technique]:
    """Everything that has a name, and the presets of `hf_kvcache.codecs`."""
    presets: Mapping[str, Callable[..., Codec]] = getattr(codecs_package, "PRESETS", {})
    found = {name: Technique(name, "codec", make) for name, make in presets.items()}
    return found | {technique.name: technique for technique in _OWN}


def policies() -> dict[str, Technique]:
    """The policies that have a name."""
    return {name: technique for name, technique in techniques().items() if technique.kind == "policy"}


def codecs() -> dict[str, Technique]:
    """The codecs that have a name, presets (functions that return a codec) first."""
    return {name: technique for name, technique in techniques().items() if technique.kind == "codec"}


@dataclass(frozen=True, eq=False)
class Part:
    """One technique of a spec with its arguments. Raises `ValueError` for names and values that a spec cannot have."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    spans: Mapping[str, tuple[int, int]] = field(default_factory=dict, repr=False)  # in the text; "" is the whole part

    def __post_init__(self) -> None:
        allowed = _technique(self.name).arguments
        for key, value in self.arguments.items():
            _check_key(self.name, key, allowed)
            _check_value(key, value)
        missing = [key for key, required in allowed.items() if required and key not in self.arguments]
        if missing:
            raise ValueError(
                f"{self.name} needs {', '.join(missing)}: {self.name}:{','.join(f'{key}=...' for key in missing)}"
            )

    @property
    def technique(self) -> Technique:
        return _technique(self.name)

    def __str__(self) -> str:
        given = [f"{name}={_written(self.arguments[name])}" for name in self.technique.arguments if name in self]
        return f"{self.name}:{','.join(given)}" if given else self.name

    def __contains__(self, argument: str) -> bool:
        return argument in self.arguments

    def resolved(self, prompt_tokens: int | None) -> dict[str, Any]:
        """The arguments, shares of the prompt turned into tokens."""
        return {name: _tokens(name, value, prompt_tokens) for name, value in self.arguments.items()}

    def made(self, prompt_tokens: int | None) -> Any:
        """The policy, codec, pool, ... Raises `ValueError` as its class does."""
        arguments = self.resolved(prompt_tokens)
        if self.technique.cache is not None:
            scope = arguments.pop("scope", "full")
            if scope not in ("full", "all"):
                raise ValueError(f"`scope` must be 'full' or 'all', got {scope!r}")
        return self.technique.make(**arguments)

    def python(self, prompt_tokens: int | None) -> tuple[list[tuple[str, str]], str]:
        """What to import, as `(module, name)`, and the expression that makes it (of a policy: the arguments)."""
        given = ", ".join(f"{name}={value!r}" for name, value in self.resolved(prompt_tokens).items())
        kind, make = self.technique.kind, self.technique.make
        if kind == "policy":
            return [], given
        if kind == "sharing":
            if "file" in self:
                return [("hf_kvcache", "Sharing")], f"Sharing.load({self.arguments['file']!r})"
            return [], repr(self.made(prompt_tokens))
        if kind != "codec":
            return [("hf_kvcache", make.__name__)], f"{make.__name__}({given})"
        if isinstance(make, type) and make.__name__ in vars(codecs_package) and self.name not in codecs_package.PRESETS:
            return [("hf_kvcache.codecs", make.__name__)], f"{make.__name__}({given})"
        if not given:
            return [], repr(self.name)
        return [("hf_kvcache.codecs", "preset")], f"preset({self.name!r}, {given})"


@dataclass(frozen=True, eq=False)
class CacheSpec:
    """A spec: at most one part of each kind. `str` gives its canonical text, by which specs are equal.

    Attributes:
        parts: techniques with their arguments, at least one; without a policy every token is kept.
        text: what was typed, if it was.
    """

    parts: tuple[Part, ...]
    text: str = ""

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("a spec needs at least one technique; 'kv' keeps every token in full precision")
        seen: dict[str, Part] = {}
        for part in self.parts:
            _check_new(part.technique, seen)
            seen[part.technique.kind] = part

    def part(self, kind: str) -> Part | None:
        """The part of this kind."""
        return next((part for part in self.parts if part.technique.kind == kind), None)

    @property
    def policy(self) -> Part:
        return self.part("policy") or Part("kv")

    @property
    def codec(self) -> Part | None:
        return self.part("codec")

    @property
    def offload(self) -> Part | None:
        return self.part("offload")

    @property
    def lossless(self) -> bool:
        """Whether tokens equal those of the full cache: nothing dropped, rounded or shared between layers."""
        chosen = self.offload is not None and self.offload.arguments.get("top_pages") is not None
        return self.policy.name == "kv" and self.codec is None and self.part("sharing") is None and not chosen

    def __str__(self) -> str:
        ordered = sorted(self.parts, key=lambda part: KINDS.index(part.technique.kind))
        plain = [part for part in ordered if part.name != "kv" or part.arguments]
        return "+".join(map(str, plain)) or "kv"

    def __eq__(self, other: object) -> bool:
        return str(self) == str(other) if isinstance(other, CacheSpec) else NotImplemented

    def __hash__(self) -> int:
        return hash(str(self))

    def check(self, prompt_tokens: int | None = None) -> None:
        """Raise `SpecError` for arguments that no model could be given, for prompts of so many tokens."""
        for part in self.parts:
            try:
                part.made(prompt_tokens)
            except (TypeError, ValueError, ArithmeticError, OSError) as error:
                raise self._error(part, error) from error

    def _error(self, part: Part, error: Exception) -> SpecError:
        text = self.text if part.spans else str(part)
        named = [name for name in re.findall(r"`(\w+)", str(error)) if name in part.spans]
        start, stop = part.spans.get(named[0] if named else "", (0, len(text)))
        return SpecError(f"{part}: {error}", text, start, stop)

    def build(self, model: PreTrainedModel, prompt_tokens: int | None = None) -> KVCache:
        """A new cache for this model (or config, where no policy needs the model); see `from_spec`."""
        self.check(prompt_tokens)
        arguments = self.policy.resolved(prompt_tokens)
        for part in self.parts:
            if part.technique.kind != "policy":
                arguments[part.technique.kind] = part.made(prompt_tokens)
        assert self.policy.technique.cache is not None
        return self.policy.technique.cache(model, **arguments)

    def python(self, prompt_tokens: int | None = None) -> str:
        """The Python that builds the same cache for a `model`: lines of imports, then one that sets `cache`."""
        maker = self.policy.technique.cache
        assert isinstance(maker, type)
        imports: list[tuple[str, str]] = [("hf_kvcache", maker.__name__)]
        words = ["model"]
        for part in sorted(self.parts, key=lambda part: KINDS.index(part.technique.kind)):
            needed, expression = part.python(prompt_tokens)
            imports += needed
            if part.technique.kind != "policy":
                expression = f"{part.technique.kind}={expression}"
            words += [expression] if expression else []
        modules = sorted({module for module, _ in imports})
        lines = [f"from {m} import {', '.join(sorted({n for mod, n in imports if mod == m}))}" for m in modules]
        return "\n".join([*lines, f"cache = {maker.__name__}({', '.join(words)})"])


def parse_spec(text: str) -> CacheSpec:
    """Read a spec. Names are checked here, values by `check` (and by `from_spec`).

    Raises `SpecError`, pointing at the token, for what cannot be read and for names that do not exist.
    """
    if not isinstance(text, str):
        raise ValueError(f"a spec is a text, as 'kivi:nbits=4', got {type(text).__name__}")
    if len(text) > _LONGEST:
        raise SpecError(f"a spec has at most {_LONGEST:,} characters, this one {len(text):,}", text[:60] + "...", 0, 60)
    found: dict[str, Part] = {}
    for start, stop in _split(text, 0, len(text), "+"):
        start, stop = _stripped(text, start, stop)
        part = _part(text, start, stop)
        with _pointing(text, start, stop):
            _check_new(part.technique, found)
        found[part.technique.kind] = part
    return CacheSpec(tuple(found.values()), text)


def from_spec(model: PreTrainedModel, spec: str | CacheSpec, prompt_tokens: int | None = None) -> KVCache:
    """The cache that a text names: `from_spec(model, "snapkv:max_capacity_prompt=1024+rotated-4")`.

    Args:
        model: the model (it is attached).
        spec: techniques joined by `+`, see `hf_kvcache.specs`; or what `parse_spec` returned.
        prompt_tokens: tokens of the prompt, where a size in the spec is a share of it (`max_capacity_prompt=0.25`).

    Raises:
        SpecError: (a `ValueError`) names and arguments that do not exist or cannot be; it points at the token.
        NotImplementedError: models or combinations that the technique cannot serve, as the cache says.
    """
    return (spec if isinstance(spec, CacheSpec) else parse_spec(spec)).build(model, prompt_tokens)


# ---------------------------------------------------------------------- reading


class _pointing:
    """Turns a `ValueError` inside into a `SpecError` that points at a span of the text."""

    def __init__(self, text: str, start: int, stop: int) -> None:
        self.where = (text, start, stop)

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, ValueError) and not isinstance(error, SpecError):
            raise SpecError(str(error), *self.where) from error


def _split(text: str, start: int, stop: int, mark: str) -> Iterator[tuple[int, int]]:
    """Spans between the marks that lie outside of quotes and brackets."""
    opened: list[int] = []
    quote, begin, at = -1, start, start
    while at < stop:
        letter = text[at]
        if quote >= 0:
            at += letter == "\\"
            quote = -1 if letter == text[quote] else quote
        elif letter in "'\"":
            quote = at
        elif letter in "([{":
            opened.append(at)
        elif letter in ")]}":
            if not opened or "([{".index(text[opened.pop()]) != ")]}".index(letter):
                raise SpecError(f"{letter!r} closes nothing", text, at, at + 1)
        elif letter == mark and not opened:
            yield begin, at
            begin = at + 1
        at += 1
    if quote >= 0:
        raise SpecError(f"the quote {text[quote]} is never closed", text, quote, quote + 1)
    if opened:
        raise SpecError(f"the bracket {text[opened[-1]]} is never closed", text, opened[-1], opened[-1] + 1)
    yield begin, stop


def _stripped(text: str, start: int, stop: int) -> tuple[int, int]:
    piece = text[start:stop]
    if not piece.strip():
        return start, stop
    return start + len(piece) - len(piece.lstrip()), stop - len(piece) + len(piece.rstrip())


def _part(text: str, start: int, stop: int) -> Part:
    colon = text.find(":", start, stop)
    end = stop if colon < 0 else colon
    name = text[start:end].strip()
    with _pointing(text, *_stripped(text, start, end)):
        allowed = _technique(name).arguments
    arguments: dict[str, Any] = {}
    spans = {"": (start, stop)}
    pairs = [] if colon < 0 else [_stripped(text, *span) for span in _split(text, colon + 1, stop, ",")]
    for first, last in pairs:
        if not text[first:last].strip():
            if len(pairs) == 1:
                continue  # `kivi:` is `kivi`
            raise SpecError(f"{name}: expected name=value between the commas", text, first, last)
        equals = text.find("=", first, last)
        if equals < 0:
            raise SpecError(f"{name}: expected name=value, got {text[first:last]!r}", text, first, last)
        key = text[first:equals].strip()
        with _pointing(text, *_stripped(text, first, equals)):
            _check_key(name, key, allowed)
            if key in arguments:
                raise ValueError(f"{name}: {key!r} is given twice")
        span = _stripped(text, equals + 1, last)
        with _pointing(text, *span):
            value = text[slice(*span)].strip()
            if not value:
                raise ValueError(f"{name}: {key!r} has no value after the =")
            arguments[key] = _literal(value)
            _check_value(key, arguments[key])
        spans[key] = (first, last)
    with _pointing(text, start, stop):
        return Part(name, arguments, spans)


def _technique(name: str) -> Technique:
    known = techniques()
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    names = f"policies: {', '.join(policies())}; codecs: {', '.join(codecs())}; and sharing, paged, offload"
    raise ValueError(f"unknown cache {name!r}.{hint} There are {names}; one of each kind can be joined with +")


def _check_key(name: str, key: str, allowed: Mapping[str, bool]) -> None:
    if key not in allowed:
        near = difflib.get_close_matches(str(key), allowed, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"{name} takes no argument {key!r}; it takes {', '.join(allowed) or 'none'}{hint}")


def _check_value(key: str, value: Any) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{key!r} must be finite, got {value!r}")
    if isinstance(value, dict):
        for item in (*value.keys(), *value.values()):
            _check_value(key, item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_value(key, item)
    elif value is not None and not isinstance(value, (bool, int, float, str)):
        raise ValueError(f"{key!r} must be a number, a text, a list or a map, got {type(value).__name__} {value!r}")


def _check_new(technique: Technique, found: Mapping[str, Part]) -> None:
    if technique.kind in found:
        raise ValueError(
            f"the spec names two {_PLURAL[technique.kind]}, {found[technique.kind].name} and {technique.name}: a cache "
            "has one"
        )


def _literal(text: str) -> Any:
    """A Python literal, or else the text itself."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def _written(value: Any) -> str:
    """The text that `_literal` reads as this value."""
    if isinstance(value, str):
        bare = _BARE.fullmatch(value) is not None and isinstance(_literal(value), str)
        return value if bare else repr(value)
    # A + would end the part.
    return repr(value).replace("e+", "e") if isinstance(value, float) else repr(value)


def _tokens(name: str, value: Any, prompt_tokens: int | None) -> Any:
    if name not in SIZES or not isinstance(value, float):
        return value
    if not 0 < value <= 1:
        raise ValueError(f"`{name}={value}` is a share of the prompt, which is above 0 and at most 1.0")
    if prompt_tokens is None:
        raise ValueError(
            f"`{name}={value}` is a share of the prompt: say how long that is (`prompt_tokens`), or give a whole number"
        )
    return max(1, round(value * prompt_tokens))
