"""`convert_to_gqa`: the same architecture with fewer KV heads."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..mla.convert import MOMENT_BYTES, _batches
from ..mla.host import Host, attention_modules, inspect_hosts, watch
from ..mla.module import MLAAttention
from ..mla.moments import Moments, collect, run
from .attended import Attended, Refit
from .pool import METHODS, Pooled, candidates, gain_of


@dataclass
class GQALayerReport:
    """How one layer was converted.

    Attributes:
        groups: old KV heads of each new one.
        logit_energy, value_energy: share that the new keys and values carry (NaN without calibration; keys that are
            normalized have no energy to speak of).
        error: square of its output's error over the output's square, on a window of the calibration.
        bytes_before, bytes_after: cached bytes of a token, in the model's dtype.
    """

    name: str
    groups: list[list[int]]
    logit_energy: float
    value_energy: float
    error: float
    bytes_before: int
    bytes_after: int


@dataclass
class GQAReport:
    """How `convert_to_gqa` converted each layer; `print` it for a table."""

    layers: list[GQALayerReport]
    calibration_tokens: int
    method: str

    @property
    def kept(self) -> float:
        """Cached bytes of a token after the conversion, over those before."""
        return sum(layer.bytes_after for layer in self.layers) / sum(layer.bytes_before for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"kept": self.kept}

    def __str__(self) -> str:
        lines = ["layer                            bytes  logits  values  error   groups"]
        for x in self.layers:
            groups = " ".join("+".join(map(str, group)) for group in x.groups)
            lines.append(
                f"{x.name[-32:]:32s} {x.bytes_after:5d}  {x.logit_energy:6.4f}  {x.value_energy:6.4f}  "
                f"{x.error:.4f}  {groups}"
            )
        lines.append(f"{self.kept:.1%} of the bytes, {self.calibration_tokens} tokens of calibration")
        return "\n".join(lines)


@torch.no_grad()
def convert_to_gqa(
    model: PreTrainedModel,
    num_key_value_heads: int,
    calibration: Iterable[Any] | None = None,
    tokenizer: Any = None,
    *,
    method: str | None = None,
) -> tuple[PreTrainedModel, GQAReport]:
    """Pool the KV heads of every attention module, so that a token's cache has `num_key_value_heads` of them (GQA,
    arXiv 2305.13245; one head is multi-query attention).

    The result is a standard checkpoint of the same architecture: `save_pretrained` writes it, and transformers (or
    anything else that reads the original) loads it without this library. Lossless where heads are copies of each other,
    also permuted ones and ones turned by rotations that commute with the rotary embedding; otherwise lossy, and better
    trained on (see `docs/gqa.md` for what it costs before and after).

    Args:
        model: a decoder of transformers with plain `q_proj`, `k_proj`, `v_proj`, `o_proj` and rotary positions. It is
            changed in place, and returned.
        num_key_value_heads: for every layer; a divisor of the number there is.
        calibration: texts (with a tokenizer), or token ids: tensors or lists, `[T]` or `[B, T]`, without padding.
            Several windows as long as a typical context.
        tokenizer: for texts, which are joined and cut into windows of 1,024 tokens.
        method: "fit" (the default with calibration): maps of queries, keys and values that lose least, `o_proj`
            fitted to the result; "aligned": means of heads turned to lie as close together as can be; "mean" (the
            default without calibration): plain means of adjacent heads.

    Returns:
        The model and a `GQAReport`.

    Raises:
        ValueError: impossible numbers of heads, no calibration where the method needs it, or one that cannot be used.
        NotImplementedError: models with other attention, quantized or offloaded weights, adapters; see the message.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"expected a transformers model, got {type(model).__name__}")
    if any(isinstance(module, MLAAttention) for module in model.modules()):
        raise ValueError("this model attends in latents (convert_to_mla): it has no KV heads to pool")
    method = method or ("mean" if calibration is None else "fit")
    if method not in METHODS:
        raise ValueError(f"`method` must be {', '.join(map(repr, METHODS))}, got {method!r}")
    if calibration is None and method != "mean":
        raise ValueError(
            f"method={method!r} needs `calibration`: texts together with `tokenizer=`, or batches of token ids"
        )
    if model.config.get_text_config(decoder=True) is not model.config:
        raise NotImplementedError(
            f"{type(model).__name__} has its language model inside another one: load the language model alone "
            "(AutoModelForCausalLM of its text checkpoint)"
        )
    batches = [] if calibration is None else _batches(calibration, tokenizer, model)
    hosts = inspect_hosts(model, partial=True)
    _check(model, hosts, num_key_value_heads, method)
    shell = _shell(model, hosts, num_key_value_heads)
    # The last window is for the error that is reported, and for what is chosen by trial, where there is enough.
    trial = batches[-1] if batches else None
    seen = batches[:-1] if len(batches) > 4 else batches
    reports = []
    for group in _parts(hosts):
        chosen = _choose(model, group, seen, trial, num_key_value_heads, method)
        for host in group:
            pooled, error = chosen[host.name]
            size = 2 * host.head_dim * host.module.k_proj.weight.element_size()
            sizes = (host.kv_heads * size, num_key_value_heads * size)
            reports.append(GQALayerReport(host.name, pooled.groups, *pooled.kept, error, *sizes))
            _apply(host, pooled, shell.get_submodule(host.name))
    model.config.num_key_value_heads = num_key_value_heads
    return model, GQAReport(reports, sum(ids.numel() for ids in seen), method)


def _check(model: PreTrainedModel, hosts: list[Host], heads: int, method: str) -> None:
    held = sorted({host.kv_heads for host in hosts})
    if len(held) > 1 or getattr(model.config, "num_key_value_heads", None) not in (None, held[0]):
        raise NotImplementedError(
            f"the layers of this {type(model).__name__} have {', '.join(map(str, held))} KV heads, and its config has "
            "one number for all: it cannot be converted"
        )
    if isinstance(heads, bool) or not isinstance(heads, int) or not 0 < heads < held[0] or held[0] % heads:
        fitting = [n for n in range(1, held[0]) if held[0] % n == 0]
        raise ValueError(
            f"`num_key_value_heads` must be one of {fitting} for this model of {held[0]} KV heads, got {heads!r}"
            if fitting
            else "this model has one KV head already"
        )
    seen: dict[int, str] = {}
    for host in hosts:
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            other = seen.setdefault(id(getattr(host.module, part).weight), f"{host.name}.{part}")
            if other != f"{host.name}.{part}":
                raise NotImplementedError(f"{other} and {host.name}.{part} are one weight, so it cannot be converted")
        for part in ("q_norm", "k_norm"):
            norm = getattr(host.module, part, None)
            if norm is not None and method != "mean" and gain_of(norm, host.head_dim) is None:
                raise NotImplementedError(
                    f"{host.name}.{part} ({type(norm).__name__}) is not an RMS norm over a head with a weight, and "
                    "what can be turned before it is not known: use method='mean'"
                )


def _shell(model: PreTrainedModel, hosts: list[Host], heads: int) -> nn.Module:
    """The model as its class builds it with so many KV heads, without weights; raises if it does not fit."""
    config = copy.deepcopy(model.config)
    config.num_key_value_heads = heads
    with torch.device("meta"):
        shell = type(model)(config)
    for name, module in attention_modules(shell):
        host = next((host for host in hosts if host.name == name), None)
        size = None if host is None else (heads * host.head_dim, host.module.k_proj.weight.shape[1])
        if size is None or any(tuple(getattr(module, part).weight.shape) != size for part in ("k_proj", "v_proj")):
            raise NotImplementedError(
                f"{type(model).__name__} does not take its KV heads from `config.num_key_value_heads` ({name}), so it "
                "cannot be converted"
            )
    return shell


def _parts(hosts: list[Host]) -> Iterable[list[Host]]:
    """Layers whose moments fit together into `MOMENT_BYTES`."""
    part: list[Host] = []
    held = 0
    for host in hosts:
        size = max(Moments.nbytes(host), Refit.nbytes(host))
        if part and held + size > MOMENT_BYTES:
            yield part
            part, held = [], 0
        part.append(host)
        held += size
    yield part


def _choose(
    model: Any, hosts: list[Host], seen: list[torch.Tensor], trial: torch.Tensor | None, heads: int, method: str
) -> dict[str, tuple[Pooled, float]]:
    """Each layer's maps, and the error of its output on the trial window."""
    if trial is None:
        return {host.name: (candidates(host, None, heads, method)[0], float("nan")) for host in hosts}
    moments = collect(model, hosts, seen)
    # As they are used up, not all at once.
    ways = {host.name: candidates(host, moments.pop(host.name), heads, method) for host in hosts}
    chosen: dict[str, tuple[Pooled, float]] = {}

    def compare(host: Host, hidden: torch.Tensor, table: Any) -> None:
        attended = Attended(host, hidden, table)
        exact = attended.output(attended.exact(), host.module.o_proj.weight.detach())
        for pooled in ways[host.name]:
            off = attended.output(attended.pooled(pooled), pooled.output_weight(host)) - exact
            if pooled.out_bias is not None:
                off += (pooled.out_bias.to(off) - host.module.o_proj.bias).to(off)
            error = float(off.square().sum() / exact.square().sum().clamp(min=1e-30))
            if host.name not in chosen or error < chosen[host.name][1]:
                chosen[host.name] = pooled, error

    def look(batches: Iterable[torch.Tensor], found: Any) -> None:
        was_training = model.training
        model.eval()
        try:
            with watch(hosts, found):
                for ids in batches:
                    run(model, ids)
        finally:
            model.train(was_training)

    look([trial[:1]], compare)
    if method == "fit":
        refits = {host.name: Refit(host, chosen[host.name][0]) for host in hosts}
        look(seen, lambda host, hidden, table: refits[host.name].add(hidden, table))
        for name in ways:
            ways[name] = []

        def finish(host: Host, hidden: torch.Tensor, table: Any) -> None:
            ways[host.name] = [refits.pop(host.name).finish(hidden, table)]
            chosen.pop(host.name)
            compare(host, hidden, table)

        look([trial[:1]], finish)
    return chosen


# ---------------------------------------------------------------------- weights


def _apply(host: Host, pooled: Pooled, like: Any) -> None:
    """The new weights in the host's module, on its device and in its dtype; numbers of heads as in `like`."""
    module = host.module
    order = pooled.order(host)
    heads, size = host.heads, host.head_dim

    def turned(tensor: torch.Tensor) -> torch.Tensor:
        wide = tensor.detach().double().cpu()
        return (pooled.query @ wide.view(heads, size, -1))[order].flatten(0, 1).view(tensor.shape)

    _set(module.q_proj, turned(module.q_proj.weight), _each(turned, module.q_proj.bias))
    out = pooled.output_weight(host).view(-1, heads, size)[:, order].flatten(1)
    _set(module.o_proj, out, module.o_proj.bias if pooled.out_bias is None else pooled.out_bias)
    for linear, maps in ((module.k_proj, pooled.key), (module.v_proj, pooled.value)):
        flat = maps.flatten(0, 1)
        bias = _each(lambda bias, flat=flat: flat @ bias.detach().double().cpu(), linear.bias)
        _set(linear, flat @ linear.weight.detach().double().cpu(), bias)
    if pooled.gains is not None:
        for part, gain in zip(("q_norm", "k_norm"), pooled.gains, strict=True):
            norm = getattr(module, part, None)
            found = None if norm is None else gain_of(norm, size)
            if norm is not None and found is not None:
                norm.weight.copy_((gain - found[1]).to(norm.weight))
    for name, value in vars(like).items():
        if type(value) is int and getattr(module, name, None) != value:
            setattr(module, name, value)


def _each(function: Any, bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else function(bias)


def _set(linear: nn.Linear, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    for name, new in (("weight", weight), ("bias", bias)):
        old = getattr(linear, name)
        if new is None or old is None:
            continue
        setattr(linear, name, nn.Parameter(new.detach().to(old), requires_grad=old.requires_grad))
    linear.out_features = weight.shape[0]
