"""`distill_layers`: train converted attention, one layer at a time, to give what the original's gave."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..storage import fingerprint
from .captured import (
    Live,
    Stored,
    names_of,
    read_json,
    read_tensors,
    windows_of,
    write_json,
    write_tensors,
)
from .chain import Chain
from .module import MLAAttention
from .progress import Tell, bar
from .student import Example, Student, write

_VERSION = 1
_STATE = "distill.json"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_EXACT = 1e-9  # a layer with a smaller error has nothing to learn


@dataclass
class DistilledLayer:
    """One layer: square of its output's error over the output's square on the held-out windows, before and after.

    `changed` is False where training did not lower it; the layer has its old weights then.
    """

    name: str
    error_before: float
    error_after: float
    changed: bool


@dataclass
class DistillReport:
    """What `distill_layers` did to each layer; `print` it for a table."""

    layers: list[DistilledLayer]
    tokens: int
    held_out_tokens: int
    cpu_seconds: float
    arguments: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = ["layer                             before    after"]
        for x in self.layers:
            lines.append(
                f"{x.name[-32:]:32s}  {x.error_before:.5f}  {x.error_after:.5f}{'' if x.changed else '  (kept)'}"
            )
        before, after = (sum(getattr(x, f"error_{when}") for x in self.layers) for when in ("before", "after"))
        count = max(1, len(self.layers))
        lines.append(
            f"mean {before / count:.5f} -> {after / count:.5f} on {self.held_out_tokens} held-out tokens, trained on "
            f"{self.tokens} tokens in {self.cpu_seconds:.0f} s of CPU time"
        )
        return "\n".join(lines)


def distill_layers(
    model: PreTrainedModel,
    teacher: PreTrainedModel | str | os.PathLike[str],
    calibration: Iterable[Any] | None = None,
    tokenizer: Any = None,
    *,
    inputs: str = "student",
    compensate: float = 1.0,
    steps: int = 128,
    learning_rate: float = 2e-3,
    rows: int = 256,
    held_out: int = 1,
    seed: int = 0,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool | Tell = True,
) -> tuple[PreTrainedModel, DistillReport]:
    """Train each attention module that `convert_to_mla` made to give what the original's gave, layer after layer.

    Nothing but one layer's attention is differentiated at a time (no language-model loss), in float32 whatever the
    model's dtype, from the converted weights on. In memory are the models, a few hidden states of each window, and one
    layer's optimizer. Interrupted, the layers that were finished are trained and the others are as they were.

    Args:
        model: converted by `convert_to_mla`. It is changed in place, and returned.
        teacher: the original model, or a folder that `capture_layers` wrote (then without `calibration`).
        calibration, tokenizer: as for `convert_to_mla`; the same windows will do, more are better.
        inputs: "teacher" trains on what the original hands to each layer, "student" on what the layers before, which
            are trained by then, hand to it.
        compensate: for "student": how much of the difference between the original's hidden state and the converted
            model's the attention is to make up for, in [0, 1].
        steps: of Adam, for each layer; one window each.
        learning_rate: relative to the root mean square of each parameter.
        rows: query rows of a window that a step looks at. Fewer where attention would take too much memory.
        held_out: so many windows at the end are not trained on: errors are measured on them, and a layer that is not
            better on them keeps its old weights.
        seed: of the order of windows and rows.
        checkpoint: a folder for finished layers. With the same arguments and models, a run continues from it and gives
            what an uninterrupted one gives. Safetensors and JSON.
        progress: show a bar on stderr if it takes longer than two seconds (where rich is installed), or call
            `progress(stage, done, total)` instead.

    Returns:
        The model and a `DistillReport`.

    Raises:
        ValueError: a model that is not converted; a teacher that is converted, of other sizes, or shares the weights
            that would be trained; arguments out of range; a checkpoint of another run or one that was altered.
        NotImplementedError: quantized or offloaded weights, adapters, and models whose layers do not form a chain.
    """
    began = time.process_time()
    modules = _modules(model)
    arguments = _checked(inputs, compensate, steps, learning_rate, rows, held_out, seed)
    stored = None if isinstance(teacher, nn.Module) else Stored(teacher)
    if stored is None:
        windows = _windows(calibration, tokenizer, teacher)
        _check_teacher(modules, teacher)
    else:
        if calibration is not None:
            raise ValueError("captured layers come with their windows: leave `calibration` out")
        windows = stored.windows
        _check_stored(modules, stored, model)
    if len(windows) <= held_out:
        raise ValueError(
            f"`calibration` has {len(windows)} windows and `held_out` is {held_out}: nothing is left to train on"
        )
    names = list(modules)
    of_teacher = fingerprint(teacher) if isinstance(teacher, PreTrainedModel) else stored.files if stored else []
    saved = _Checkpoint(checkpoint, modules, arguments, model, of_teacher, windows)
    layers: list[DistilledLayer] = []
    modes = [(each, each.training) for each in (model, teacher) if isinstance(each, PreTrainedModel)]
    for each, _ in modes:
        each.eval()
    try:
        with bar(progress, len(names), "distilling") as advance:
            chain = Chain(model, names)
            with torch.no_grad():
                states = [chain.start(ids) for ids in windows]
                source: Live | Stored = stored or Live(teacher, names, windows)  # type: ignore[arg-type]
            for index, name in enumerate(names):
                with torch.no_grad():
                    seen = source.layer(index)
                    examples: list[Example] = [(window.hidden, window.output) for window in seen]
                    if inputs == "student":
                        share = compensate if chain.adds[index] else 0.0
                        examples = [
                            (chain.input(index, state), window.output + share * (window.residual.to(state) - state[0]))
                            for window, state in zip(seen, states, strict=True)
                        ]
                entry = saved.finished.get(name)
                if entry is None:
                    entry, state_dict = _train(name, modules[name], examples, chain.tables(index), index, arguments)
                    saved.keep(index, entry, state_dict)
                else:
                    state_dict = saved.read(index, entry)
                write(modules[name], state_dict)
                layers.append(entry)
                if inputs == "student":
                    with torch.no_grad():
                        states = [chain.run(index, state) for state in states]
                advance(name)
    finally:
        for each, mode in modes:
            each.train(mode)
    tokens = sum(ids.numel() for ids in windows)
    tested = sum(ids.numel() for ids in windows[len(windows) - held_out :])
    return model, DistillReport(layers, tokens - tested, tested, time.process_time() - began, arguments)


def _train(
    name: str, module: MLAAttention, examples: list[Example], tables: Any, index: int, arguments: dict[str, Any]
) -> tuple[DistilledLayer, dict[str, torch.Tensor]]:
    cut = len(examples) - arguments["held_out"]
    student = Student(module)
    before = student.error(examples[cut:], tables, arguments["rows"])
    after = before
    if before > _EXACT:
        generator = torch.Generator().manual_seed(arguments["seed"] * 100_003 + index)
        with torch.enable_grad():
            student.train(
                examples[:cut], tables, arguments["steps"], arguments["learning_rate"], arguments["rows"], generator
            )
        after = student.error(examples[cut:], tables, arguments["rows"])
    changed = after < before
    return DistilledLayer(name, before, after if changed else before, changed), student.state() if changed else {}


# ---------------------------------------------------------------------- checks


def _modules(model: Any) -> dict[str, MLAAttention]:
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"expected a converted transformers model, got {type(model).__name__}")
    modules = {name: module for name, module in model.named_modules() if isinstance(module, MLAAttention)}
    if not modules:
        raise ValueError(f"{type(model).__name__} is not converted: call `convert_to_mla` first")
    for name, module in modules.items():
        for part, linear in module.named_children():
            if "norm" in part:
                continue
            if type(linear) is not nn.Linear or linear.weight.dtype not in _DTYPES:
                raise NotImplementedError(
                    f"{name}.{part} is a {type(linear).__name__}, not a plain nn.Linear of floating point: load the "
                    "model without quantization and merge its adapters (`merge_and_unload`) before distilling it"
                )
            if linear.weight.is_meta:
                raise NotImplementedError(
                    f"{name}.{part} is not in memory (offloaded by `device_map`): load the model where all of it fits"
                )
    return modules


def _checked(
    inputs: str, compensate: float, steps: int, learning_rate: float, rows: int, held_out: int, seed: int
) -> dict[str, Any]:
    if inputs not in ("teacher", "student"):
        raise ValueError(f"`inputs` must be 'teacher' or 'student', got {inputs!r}")
    for name, number, least in (("steps", steps, 1), ("rows", rows, 1), ("held_out", held_out, 1), ("seed", seed, 0)):
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise ValueError(f"`{name}` must be a whole number of at least {least}, got {number!r}")
    if not 0 <= compensate <= 1:
        raise ValueError(f"`compensate` must be in [0, 1], got {compensate}")
    if not (math.isfinite(learning_rate) and learning_rate > 0):
        raise ValueError(f"`learning_rate` must be positive, got {learning_rate}")
    return {
        "inputs": inputs,
        "compensate": float(compensate),
        "steps": steps,
        "learning_rate": float(learning_rate),
        "rows": rows,
        "held_out": held_out,
        "seed": seed,
    }


def _windows(calibration: Iterable[Any] | None, tokenizer: Any, teacher: Any) -> list[torch.Tensor]:
    names_of(teacher)
    if calibration is None:
        raise ValueError(
            "distill_layers needs `calibration`: texts together with `tokenizer=`, or batches of token ids (or a "
            "folder of `capture_layers` as the teacher)"
        )
    return windows_of(calibration, tokenizer, teacher)


def _check_teacher(modules: dict[str, MLAAttention], teacher: Any) -> None:
    known = dict(teacher.named_modules())
    mine = {id(parameter) for module in modules.values() for parameter in module.parameters()}
    for name, module in modules.items():
        other, kind = known.get(name), getattr(type(module), "host", None)
        if other is None or kind is None or not isinstance(other, kind):
            raise ValueError(
                f"the teacher has no {getattr(kind, '__name__', 'attention')} at {name}: is it the original?"
            )
        dims = module.dims
        sizes = (other.q_proj.out_features, other.k_proj.out_features, other.o_proj.out_features)
        wanted = (dims.num_heads * dims.head_dim, dims.num_kv_heads * dims.head_dim, dims.hidden_size)
        if sizes != wanted:
            raise ValueError(
                f"the teacher's {name} has queries, keys and outputs of {sizes} numbers, the converted model was made "
                f"from {wanted}"
            )
        if any(id(parameter) in mine for parameter in other.parameters()):
            raise ValueError(
                f"the teacher shares weights of {name} with the converted model, which training would change: load the "
                "original once more, or convert a deep copy"
            )


def _check_stored(modules: dict[str, MLAAttention], stored: Stored, model: Any) -> None:
    if stored.names != list(modules) or any(m.dims.hidden_size != stored.size for m in modules.values()):
        raise ValueError(f"{stored.folder} was captured from a model with other layers or sizes")
    if max(int(ids.max()) for ids in stored.windows) >= model.config.vocab_size:
        raise ValueError(f"{stored.folder} has token ids outside of the model's vocabulary")


# ---------------------------------------------------------------------- checkpoints


class _Checkpoint:
    """Finished layers in a folder: one safetensors file each, and their errors and checksums in JSON."""

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        modules: dict[str, MLAAttention],
        arguments: dict[str, Any],
        model: PreTrainedModel,
        teacher: Any,
        windows: list[torch.Tensor],
    ) -> None:
        self.folder = None if path is None else Path(path)
        self.modules, self.finished, self.files = modules, {}, {}  # type: ignore[var-annotated]
        if self.folder is None:
            return
        parts = [arguments, fingerprint(model), teacher, [ids.tolist() for ids in windows]]
        self.run = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        if not (self.folder / _STATE).exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            return
        content = read_json(self.folder / _STATE, "")
        if content.get("format_version") != _VERSION or not isinstance(content.get("layers"), dict):
            raise ValueError(f"{self.folder / _STATE} is not understood (format version {_VERSION} is read)")
        if content.get("run") != self.run:
            raise ValueError(
                f"{self.folder} holds another run: other arguments, windows or models. To continue it, load the "
                "converted model as it was when the run began; else name another folder"
            )
        for name, entry in content["layers"].items():
            try:
                digest, before, after, changed = (entry[k] for k in ("sha256", "before", "after", "changed"))
                good = name in modules and isinstance(digest, str) and type(changed) is bool
                good = good and math.isfinite(before) and math.isfinite(after)
            except (KeyError, TypeError) as error:
                raise ValueError(f"{self.folder / _STATE}: {name!r} is not understood ({error})") from error
            if not good:
                raise ValueError(f"{self.folder / _STATE}: {name!r} is not understood")
            self.finished[name] = DistilledLayer(name, before, after, changed)
            self.files[name] = digest

    def _path(self, index: int) -> Path:
        assert self.folder is not None
        return self.folder / f"layer-{index:05d}.safetensors"

    def keep(self, index: int, entry: DistilledLayer, state: dict[str, torch.Tensor]) -> None:
        if self.folder is None:
            return
        self.files[entry.name] = write_tensors(self._path(index), state)
        self.finished[entry.name] = entry
        layers = {
            name: {"sha256": self.files[name], "before": x.error_before, "after": x.error_after, "changed": x.changed}
            for name, x in self.finished.items()
        }
        write_json(self.folder / _STATE, {"format_version": _VERSION, "run": self.run, "layers": layers})

    def read(self, index: int, entry: DistilledLayer) -> dict[str, torch.Tensor]:
        path = self._path(index)
        state = read_tensors(path, self.files[entry.name])
        own = dict(self.modules[entry.name].named_parameters())
        wanted = {name for name in own if "norm" not in name} if entry.changed else set()
        if set(state) != wanted or any(
            value.shape != own[name].shape or value.dtype != own[name].dtype for name, value in state.items()
        ):
            raise ValueError(f"{path} holds other tensors than the layer has")
        return state
