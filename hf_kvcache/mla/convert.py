"""`convert_to_mla`: multi-head latent attention in the place of grouped-query or multi-head attention."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .factor import BASELINES, Components, Factors, Recipe, choose_alike, choose_default, factorize
from .host import Host, inspect_hosts, watch
from .module import LayerDims, MLAAttention, attention_class
from .moments import Moments, collect, of_weights, run
from .plan import MLAPlan, allot, complete, grid
from .pre_rope import FORM as PRE_ROPE
from .pre_rope import PreRopeAttention, convert_to_pre_rope
from .progress import Advance, Tell, bar
from .saved import adopt
from .trial import Trial

# Moments of so many bytes are collected in one pass; a model with more takes several passes.
MOMENT_BYTES = 2 << 30
_LEAST_TOKENS = 16
_TEXT_WINDOW = 1024


@dataclass
class LayerReport:
    """How one layer was converted.

    Attributes:
        kv_lora_rank, qk_rope_head_dim: numbers of its latent and rotary key.
        rotary_energy: share of the logits' mean square that stays in the rotation or survives without it.
        latent_energy: share of the weighted second moments that the latent carries.
        error: square of its output's error over the output's square, on a window of the calibration.
        bytes_before, bytes_after: cached bytes of a token, in the model's dtype.
    """

    name: str
    kv_lora_rank: int
    qk_rope_head_dim: int
    rotary_energy: float
    latent_energy: float
    error: float
    bytes_before: int
    bytes_after: int


@dataclass
class MLAReport:
    """How `convert_to_mla` converted each layer; `print` it for a table."""

    layers: list[LayerReport]
    calibration_tokens: int
    method: str
    rotary: str
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def kept(self) -> float:
        """Cached bytes of a token after the conversion, over those before."""
        return sum(layer.bytes_after for layer in self.layers) / sum(layer.bytes_before for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"kept": self.kept}

    def __str__(self) -> str:
        lines = ["layer                            rank  rope  bytes  rotary  latent  error"]
        for x in self.layers:
            lines.append(
                f"{x.name[-32:]:32s} {x.kv_lora_rank:4d}  {x.qk_rope_head_dim:4d}  {x.bytes_after:5d}  "
                f"{x.rotary_energy:6.4f}  {x.latent_energy:6.4f}  {x.error:.4f}"
            )
        lines.append(f"{self.kept:.1%} of the bytes, {self.calibration_tokens} tokens of calibration")
        return "\n".join(lines)


def convert_to_mla(
    model: PreTrainedModel,
    kv_lora_rank: int | None = None,
    qk_rope_head_dim: int | None = None,
    kv_keep: float | None = None,
    calibration: Iterable[Any] | None = None,
    tokenizer: Any = None,
    *,
    rotary: str = "energy",
    method: str = "complex",
    form: str = "latent",
    progress: bool | Tell = True,
) -> tuple[PreTrainedModel, MLAReport]:
    """Put multi-head latent attention (arXiv 2405.04434, 2502.07864) in the place of every attention module of `model`.

    Each token is cached as one latent of `kv_lora_rank` numbers and one rotary key of `qk_rope_head_dim` for all heads,
    instead of a key and a value for each KV head. Without training: lossless at full sizes (rope = KV heads x head
    size, rank the same), the better the more is kept below. See `docs/mla_conversion.md` for how, and what it costs.

    Args:
        model: a decoder of transformers with plain `q_proj`, `k_proj`, `v_proj`, `o_proj` and rotary positions. It is
            changed in place, and returned.
        kv_lora_rank, qk_rope_head_dim: sizes for every layer. One alone, without `kv_keep`, is completed to all that is
            left (nothing is lost but the rotation of components outside of the rotary key).
        kv_keep: share of the cached bytes to keep, in (0, 1], instead of sizes: how a layer spends it on latent and
            rotary key is found by trial on the last window of the calibration. With one size given, the other follows.
        calibration: texts (with a tokenizer), or token ids: tensors or lists, `[T]` or `[B, T]`, without padding.
            Several windows as long as a typical context. Needed unless `method="svd"`.
        tokenizer: for texts, which are joined and cut into windows of 1,024 tokens.
        rotary: "energy" chooses the rotary components of each layer for itself; "uniform" the same frequencies and
            sizes for all layers, as formats without tables of their own need (`export_deepseek_v3` for transformers);
            "default" one component of each of evenly spaced frequencies, as those with default RoPE need (vLLM): a
            rotary key of the head size at most.
        method: "complex", or one of the baselines "transmla", "freqfold" and "svd" to compare with.
        form: "latent", or "pre_rope" for a form that loses nothing where the hidden size is less than two times KV
            heads times head size (multi-head attention: half of the bytes): the input of the key and value projections
            is cached instead of keys and values, which are made again of all of it at every step. It takes no sizes
            and no calibration, works with caches that keep every token, and decodes slower: memory is what it saves.
            See `docs/mla_export.md`.
        progress: show a bar on stderr if it takes longer than two seconds (where rich is installed), or call
            `progress(stage, done, total)` instead.

    Returns:
        The model and an `MLAReport`.

    Raises:
        ValueError: impossible sizes, no calibration or one that cannot be used, a model that is converted already.
        NotImplementedError: models with other attention, quantized or offloaded weights, adapters; see the message.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"expected a transformers model, got {type(model).__name__}")
    if any(isinstance(module, (MLAAttention, PreRopeAttention)) for module in model.modules()):
        raise ValueError("this model is converted already: load the original again to convert it otherwise")
    if form == PRE_ROPE:
        given = (kv_lora_rank, qk_rope_head_dim, kv_keep, calibration, tokenizer)
        if any(x is not None for x in given) or (rotary, method) != ("energy", "complex"):
            raise ValueError("form='pre_rope' takes no sizes, calibration, `rotary` or `method`: it is always lossless")
        return _pre_rope(model)
    if form != "latent":
        raise ValueError(f"`form` must be 'latent' or 'pre_rope', got {form!r}")
    if method != "complex" and method not in BASELINES:
        raise ValueError(f"`method` must be 'complex', {', '.join(map(repr, BASELINES))}, got {method!r}")
    if rotary not in ("energy", "uniform", "default"):
        raise ValueError(f"`rotary` must be 'energy', 'uniform' or 'default', got {rotary!r}")
    recipe = BASELINES.get(method, Recipe())
    if calibration is None and recipe.data:
        raise ValueError(
            "convert_to_mla needs `calibration`: texts together with `tokenizer=`, or batches of token ids; without "
            "any, the result is of no use (method='svd' shows it)"
        )
    _check_alone(model)
    batches = [] if calibration is None else _batches(calibration, tokenizer, model)
    hosts = inspect_hosts(model)
    plan = _plan(hosts, kv_lora_rank, qk_rope_head_dim, kv_keep, rotary)
    # Sizes are tried on a part of the calibration that the moments have not seen, where there is enough of it.
    trial = batches[-1] if batches else None
    seen = batches[:-1] if len(batches) > 4 else batches
    reports: list[LayerReport] = []
    dims: list[dict[str, Any]] = []
    groups = list(_groups(hosts, None if rotary == "energy" else 1))
    passes = len(seen) if recipe.data else 0
    layered = (2 if plan.searched and trial is not None else 1) * len(hosts)
    with bar(progress, passes * len(groups) + layered, "converting:") as advance:
        for group in groups:
            moments = _moments(model, group, _counted(seen, advance), recipe)
            chosen = _choose(model, group, moments, plan, recipe, rotary, trial, advance)
            for host, (factors, error) in zip(group, chosen, strict=True):
                module = _build(host, factors[0], factors[1])
                _replace(model, host, module)
                dims.append({"name": host.name, "layer_idx": module.layer_idx, **module.dims.to_dict()})
                size = host.module.k_proj.weight.element_size()
                sizes = (module.dims.elements_before * size, module.dims.elements * size)
                report = LayerReport(host.name, factors[0].rank, factors[0].rope, *factors[0].kept, error, *sizes)
                reports.append(report)
    adopt(model, dims)
    tokens = sum(ids.numel() for ids in seen)
    return model, MLAReport(reports, tokens, method, rotary, {"kv_keep": kv_keep})


def _pre_rope(model: PreTrainedModel) -> tuple[PreTrainedModel, MLAReport]:
    _check_alone(model)
    entries = convert_to_pre_rope(model)
    adopt(model, entries)
    reports = []
    for entry in entries:
        hidden = entry["kv_lora_rank"] + entry["qk_rope_head_dim"]
        size = next(model.get_submodule(entry["name"]).parameters()).element_size()
        before = entry["elements_before"] * size
        reports.append(LayerReport(entry["name"], hidden, 0, 1.0, 1.0, 0.0, before, hidden * size))
    return model, MLAReport(reports, 0, PRE_ROPE, "none")


def _check_alone(model: PreTrainedModel) -> None:
    if model.config.get_text_config(decoder=True) is not model.config:
        raise NotImplementedError(
            f"{type(model).__name__} has its language model inside another one: load the language model alone "
            "(AutoModelForCausalLM of its text checkpoint)"
        )


# ---------------------------------------------------------------------- calibration


def _batches(calibration: Iterable[Any], tokenizer: Any, model: PreTrainedModel) -> list[torch.Tensor]:
    """Token ids `[B, T]` of whatever was given."""
    if isinstance(calibration, (str, torch.Tensor)):
        calibration = [calibration]
    items = list(calibration)
    if not items:
        raise ValueError("`calibration` is empty")
    if all(isinstance(item, str) for item in items):
        if tokenizer is None:
            raise ValueError("`calibration` is text: give its tokenizer too, `tokenizer=...`")
        ids = torch.tensor([i for text in items for i in tokenizer(text, verbose=False)["input_ids"]])
        limit = getattr(model.config, "max_position_embeddings", None) or _TEXT_WINDOW
        window = min(_TEXT_WINDOW, limit, len(ids))
        batches = [ids[start : start + window][None] for start in range(0, len(ids) - window + 1, max(1, window))]
    else:
        batches = []
        for item in items:
            if isinstance(item, dict) or hasattr(item, "keys"):
                mask = item.get("attention_mask")
                if mask is not None and not bool(torch.as_tensor(mask).all()):
                    raise ValueError("`calibration` has padding: give rows of one length, or one row at a time")
                item = item["input_ids"]
            tensor = torch.as_tensor(item)
            if tensor.is_floating_point() or tensor.ndim not in (1, 2):
                raise ValueError(
                    "`calibration` must be texts or token ids [T] or [B, T], got "
                    f"{tuple(tensor.shape)} of {tensor.dtype}"
                )
            batches.append(tensor[None] if tensor.ndim == 1 else tensor)
    vocabulary = model.config.vocab_size
    for ids in batches:
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= vocabulary):
            raise ValueError(f"`calibration` has token ids outside of the model's vocabulary of {vocabulary}")
        if ids.shape[1] < _LEAST_TOKENS:
            raise ValueError(f"`calibration` has windows of {ids.shape[1]} tokens: at least {_LEAST_TOKENS} are needed")
    return batches


def _groups(hosts: list[Host], whole: int | None) -> Iterable[list[Host]]:
    """Layers whose moments fit together into `MOMENT_BYTES`."""
    group: list[Host] = []
    held = 0
    for host in hosts:
        size = Moments.nbytes(host)
        if group and held + size > MOMENT_BYTES and not whole:
            yield group
            group, held = [], 0
        group.append(host)
        held += size
    yield group


def _counted(batches: Iterable[torch.Tensor], advance: Advance) -> Iterator[torch.Tensor]:
    for ids in batches:
        yield ids
        advance("moments")


def _moments(model: Any, hosts: list[Host], batches: Iterable[torch.Tensor], recipe: Recipe) -> dict[str, Moments]:
    if not recipe.data:
        return {host.name: of_weights(host) for host in hosts}
    return collect(model, hosts, batches, recipe.by_attention)


# ---------------------------------------------------------------------- sizes


def _plan(hosts: list[Host], rank: int | None, rope: int | None, keep: float | None, rotary: str) -> MLAPlan:
    n = {host.width for host in hosts}
    if len(n) > 1 and (rank is not None or rope is not None):
        raise ValueError("the layers of this model differ in size: give `kv_keep` instead of sizes for all of them")
    return complete(min(n), rank, rope, keep, widest=_widest(hosts[0], rotary))


def _widest(host: Host, rotary: str) -> int | None:
    """The largest rotary key, where it is not all of the keys."""
    return host.head_dim if rotary == "default" else None


def _choose(
    model: Any,
    hosts: list[Host],
    moments: dict[str, Moments],
    plan: MLAPlan,
    recipe: Recipe,
    rotary: str,
    trial: torch.Tensor | None,
    advance: Advance = lambda what: None,
) -> list[tuple[tuple[Factors, float], float]]:
    """For each layer its factors with the root mean square of their latents, and the error on the trial window."""
    components = {host.name: Components(host, moments[host.name], recipe) for host in hosts}

    def make(host: Host, rope: int) -> Factors:
        if rotary == "uniform":
            kept = choose_alike(list(components.values()), rope // 2)
        elif rotary == "default":
            kept = choose_default(list(components.values()), rope // 2)
        else:
            kept = components[host.name].choose(rope // 2)
        return factorize(host, moments[host.name], components[host.name], kept, recipe, _centered(host))

    sizes = {host.name: (plan.kv_lora_rank, plan.qk_rope_head_dim) for host in hosts}
    if plan.searched and trial is not None:
        curves: dict[str, dict[tuple[int, int], float]] = {}

        def found(host: Host, hidden: torch.Tensor, table: Any) -> None:
            tried = Trial(host, hidden, table)
            curve = curves.setdefault(host.name, {})
            for rope, ranks in grid(host.width, plan, rotary == "energy", _widest(host, rotary)):
                factors = make(host, rope)
                for rank in ranks:
                    curve[rope, rank] = tried.error(factors.at(rank))
            advance(f"sizes of {host.name}")

        _pass(model, hosts, trial, found)
        sizes = allot(curves, plan, rotary == "energy")
    chosen: dict[str, tuple[tuple[Factors, float], float]] = {}

    def finish(host: Host, hidden: torch.Tensor | None, table: Any) -> None:
        rank, rope = sizes[host.name]
        factors = make(host, rope).at(rank)
        advance(host.name)
        if hidden is None:
            chosen[host.name] = ((factors, 1.0), float("nan"))
            return
        tried = Trial(host, hidden, table)
        chosen[host.name] = ((factors, tried.latent_rms(factors)), tried.error(factors))

    if trial is None:
        for host in hosts:
            finish(host, None, None)
    else:
        _pass(model, hosts, trial, finish)
    return [chosen[host.name] for host in hosts]


@torch.no_grad()
def _pass(model: Any, hosts: list[Host], ids: torch.Tensor, found: Any) -> None:
    was_training = model.training
    model.eval()
    try:
        with watch(hosts, found):
            run(model, ids[:1])
    finally:
        model.train(was_training)


def _centered(host: Host) -> bool:
    # A soft cap sees constants of the logits; without biases there is little to centre and nowhere to put it.
    return host.module.k_proj.bias is not None and not host.extras.get("softcap")


# ---------------------------------------------------------------------- modules


@torch.no_grad()
def _build(host: Host, factors: Factors, rms: float) -> MLAAttention:
    """The module with these factors, on the device and in the dtype of the host's."""
    old = host.module
    q_norm, k_norm = hasattr(old, "q_norm"), hasattr(old, "k_norm")
    dims = LayerDims(
        kv_lora_rank=factors.rank,
        qk_rope_head_dim=factors.rope,
        num_heads=host.heads,
        num_kv_heads=host.kv_heads,
        head_dim=host.head_dim,
        hidden_size=old.o_proj.weight.shape[0],
        q_norm=q_norm,
        k_norm=k_norm,
        q_bias=old.q_proj.bias is not None,
        kv_bias=old.k_proj.bias is not None or old.v_proj.bias is not None,
        o_bias=old.o_proj.bias is not None or factors.offset is not None,
        scaling=host.scaling,
        extras=host.extras,
    )
    kind: Any = type(old)
    with torch.device("meta"):
        new = attention_class(kind)(old.config, old.layer_idx, dims)
    new.to_empty(device=old.k_proj.weight.device)
    new.to(old.k_proj.weight.dtype)
    rms = rms if rms > 0 else 1.0
    n = host.width
    to_query = torch.cat([factors.nope_query, factors.rope_query], dim=1)  # [H, D + P, D]
    if q_norm:
        new.q_proj, new.q_norm = old.q_proj, old.q_norm
        new.q_up.copy_(to_query)
    else:
        weight = old.q_proj.weight.detach().double().cpu().view(host.heads, host.head_dim, -1)
        new.q_proj.weight.copy_((to_query @ weight).flatten(0, 1))
        if dims.q_bias:
            bias = old.q_proj.bias.detach().double().cpu().view(host.heads, host.head_dim, 1)
            new.q_proj.bias.copy_((to_query @ bias).flatten())
    rope_key = torch.cat([factors.rope_key, torch.zeros_like(factors.rope_key)], dim=1)
    down = torch.cat([factors.encode / rms, rope_key])  # [R + P, 2n]
    if k_norm:
        new.k_proj, new.v_proj, new.k_norm = old.k_proj, old.v_proj, old.k_norm
        new.kv_a_proj_with_mqa.weight.copy_(down)
    else:
        rows = torch.cat([old.k_proj.weight, old.v_proj.weight]).detach().double().cpu()
        new.kv_a_proj_with_mqa.weight.copy_(down @ rows)
        if dims.kv_bias:
            parts = [
                torch.zeros(n) if linear.bias is None else linear.bias.detach() for linear in (old.k_proj, old.v_proj)
            ]
            bias = torch.cat([part.double().cpu() for part in parts])
            new.kv_a_proj_with_mqa.bias.copy_(down @ bias)
    both = torch.cat([factors.keys, factors.values], dim=1) * rms  # [H, 2D, R]
    new.kv_b_proj.weight.copy_(both.flatten(0, 1))
    if factors.offset is None:
        new.o_proj = old.o_proj
    else:
        new.o_proj.weight = old.o_proj.weight
        shift = old.o_proj.weight.detach().double().cpu() @ factors.offset.flatten()
        if old.o_proj.bias is not None:
            shift = shift + old.o_proj.bias.detach().double().cpu()
        new.o_proj.bias.copy_(shift)
    new.frequencies.copy_(factors.frequencies)
    new.requires_grad_(any(parameter.requires_grad for parameter in old.parameters()))
    return new.train(old.training)


def _replace(model: nn.Module, host: Host, module: MLAAttention) -> None:
    hook = getattr(host.module, "_hf_hook", None)
    if hook is not None:
        from accelerate.hooks import add_hook_to_module

        add_hook_to_module(module, hook)
    parent, _, name = host.name.rpartition(".")
    setattr(model.get_submodule(parent), name, module)
