"""What the healing examples share: packed text, perplexity, and a training loop that can be stopped and resumed.

Nothing here knows what was done to the model: `compare` heals any model with the adapters of `prepare_for_healing`,
heals the original in the same way as a control, and gives the perplexity of both. Checkpoints are safetensors and JSON,
with a SHA-256 of each file; a resumed run takes the steps that the uninterrupted one would have taken.

Needs peft, bitsandbytes and accelerate: `pip install "hf-kvcache[train]"`.
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import importlib.util
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hf_kvcache import prepare_for_healing
from hf_kvcache.evaluate.texts import topics


@dataclass(frozen=True)
class Plan:
    """The steps of a run. `rate` rises over the first `warmup` of them and falls to zero along a cosine."""

    steps: int = 200
    batch: int = 1  # windows in a forward pass
    accumulate: int = 1  # forward passes in a step
    rate: float = 1e-3
    warmup: float = 0.05
    clip: float = 1.0
    weight_decay: float = 0.0
    seed: int = 0

    def rate_at(self, step: int) -> float:
        rising = max(1, round(self.warmup * self.steps))
        if step < rising:
            return self.rate * (step + 1) / rising
        done = (step - rising) / max(1, self.steps - rising)
        return self.rate * 0.5 * (1 + math.cos(math.pi * done))


# ---------------------------------------------------------------------- texts


def library_texts(names: Iterable[str] = sys.stdlib_module_names) -> list[str]:
    """The docstrings of each module of the standard library. `pydoc_data`, which has the held-out text, is no part."""
    texts = []
    for name in sorted(set(names) - {"pydoc_data", "idlelib", "this", "antigravity", "lib2to3"}):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            continue
        folder = Path(spec.origin).parent
        files = sorted(folder.rglob("*.py")) if spec.submodule_search_locations else [Path(spec.origin)]
        for file in files:
            if {"test", "tests", "site-packages"} & set(file.parts):
                continue
            tree = ast.parse(file.read_text(encoding="utf-8"))
            kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
            text = "\n\n".join(text for text in found if text)
            if len(text) > 1000:
                texts.append(text)
    return texts


def packed(tokenizer: Any, texts: Iterable[str], tokens: int) -> torch.Tensor:
    """`[N, tokens]` ids: the texts one after the other with the end-of-text token between them, cut without padding."""
    ids: list[int] = []
    for text in texts:
        ids += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] + [tokenizer.eos_token_id]
    count = len(ids) // tokens
    if count == 0:
        raise ValueError(f"the texts have only {len(ids)} tokens, less than one window of {tokens}")
    return torch.tensor(ids[: count * tokens]).view(count, tokens)


def held_out(tokenizer: Any, count: int, tokens: int) -> list[torch.Tensor]:
    """`count` windows `[1, tokens]` of the language reference, which start at character 5,000 + 30,000 w."""
    text = topics()
    parts = (text[5_000 + 30_000 * w :][: 12 * tokens] for w in range(count))
    return [tokenizer(part, return_tensors="pt").input_ids[:, :tokens] for part in parts]


@torch.no_grad()
def perplexity(model: Any, texts: Sequence[torch.Tensor]) -> float:
    """Of whole windows `[1, T]`, teacher-forced; the model's mode is left as it was."""
    was_training = model.training
    model.eval()
    nats = 0.0
    for ids in texts:
        ids = ids.to(model.device)
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
        nats += float(nn.functional.cross_entropy(logits.float(), ids[0, 1:], reduction="sum"))
    model.train(was_training)
    return math.exp(nats / sum(ids.shape[1] - 1 for ids in texts))


# ---------------------------------------------------------------------- training


def heal(
    model: Any,
    windows: torch.Tensor,
    plan: Plan,
    *,
    teacher: Any = None,
    folder: str | Path | None = None,
    every: int = 50,
    accelerator: Any = None,
    track: Any = lambda items, description: items,
) -> list[float]:
    """Train the adapters of `model` (from `prepare_for_healing`) on windows `[N, T]`; returns the loss of each step.

    The loss is that of predicting the text, or with a `teacher` the divergence from what it predicts, in nats a token.
    Each process of `accelerate launch` takes windows of its own. With a `folder`, a checkpoint is written there every
    so many steps, and one that is found there is resumed.

    Raises `ValueError` for a checkpoint of another run or one that was altered, `FloatingPointError` for a loss that is
    no number.
    """
    from accelerate import Accelerator

    accelerator = accelerator or Accelerator()
    world, rank = accelerator.num_processes, accelerator.process_index
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(parameters.values(), lr=plan.rate, weight_decay=plan.weight_decay)
    run = asdict(plan) | {
        "processes": world,
        "loss": "text" if teacher is None else "teacher",
        "windows": _digest([windows]),
        "model": _digest(p for p in model.parameters() if not p.requires_grad),
        "adapters": {name: list(p.shape) for name, p in parameters.items()},
    }
    losses: list[float] = []
    if folder is not None:
        losses = load_checkpoint(Path(folder), model, parameters, optimizer, run)
    # Placed by whoever loaded it, over several devices perhaps; this wraps it where there are several processes.
    wrapped = accelerator.prepare_model(model, device_placement=False)
    wrapped.train()
    share = plan.accumulate * plan.batch
    for step in track(range(len(losses), plan.steps), "healing"):
        # Whatever is random in a step follows from its number, so that a resumed run goes on as if it had not stopped.
        torch.manual_seed(plan.seed + 7919 * (step * world + rank))
        for group in optimizer.param_groups:
            group["lr"] = plan.rate_at(step)
        total = torch.zeros((), device=accelerator.device)
        for part in range(plan.accumulate):
            first = (step * world + rank) * share + part * plan.batch
            ids = torch.stack([_window(windows, first + n, plan.seed) for n in range(plan.batch)]).to(model.device)
            last = part == plan.accumulate - 1
            with nullcontext() if last else accelerator.no_sync(wrapped):
                loss = _loss(wrapped, ids, teacher) / plan.accumulate
                accelerator.backward(loss)
            total += loss.detach().to(total.device)
        value = float(accelerator.reduce(total, reduction="mean"))
        if not math.isfinite(value):
            raise FloatingPointError(f"the loss of step {step} is {value}: lower the learning rate ({plan.rate})")
        nn.utils.clip_grad_norm_(parameters.values(), plan.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value)
        if folder is not None and (len(losses) % every == 0 or len(losses) == plan.steps):
            if accelerator.is_main_process:
                save_checkpoint(Path(folder), model, parameters, optimizer, run, losses)
            accelerator.wait_for_everyone()
    return losses


def _window(windows: torch.Tensor, n: int, seed: int) -> torch.Tensor:
    """The n-th window of a walk that sees each once in an order of its own before any again."""
    count = windows.shape[0]
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed + n // count))
    return windows[order[n % count]]


def _loss(model: Any, ids: torch.Tensor, teacher: Any) -> torch.Tensor:
    logits = model(input_ids=ids, use_cache=False).logits.float()
    if teacher is None:
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten().to(logits.device))
    with torch.no_grad():
        wanted = teacher(input_ids=ids.to(teacher.device), use_cache=False).logits.float().log_softmax(-1)
    got = logits.log_softmax(-1)
    wanted = wanted.to(got.device)
    return nn.functional.kl_div(got, wanted, reduction="none", log_target=True).sum(-1).mean()


# ---------------------------------------------------------------------- checkpoints

_FILES = ("adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors")
_MOMENTS = ("exp_avg", "exp_avg_sq")


def save_checkpoint(
    folder: Path, model: Any, parameters: dict[str, Any], optimizer: Any, run: dict[str, Any], losses: list[float]
) -> Path:
    """Write `step-N` into the folder, whole or not at all, and delete the ones before the last two."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"step-{len(losses):07d}"
    scratch = Path(tempfile.mkdtemp(prefix=".writing-", dir=folder))
    try:
        model.save_pretrained(scratch, save_embedding_layers=False)
        tensors = {
            f"{name}.{kind}": optimizer.state[p][kind].cpu() for name, p in parameters.items() for kind in _MOMENTS
        }
        save_file(tensors, scratch / "optimizer.safetensors")
        state = {"run": run, "losses": losses, "sha256": {name: _sha256(scratch / name) for name in _FILES}}
        (scratch / "state.json").write_text(json.dumps(state, indent=1))
        if target.exists():
            shutil.rmtree(target)
        os.rename(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    for old in _checkpoints(folder)[:-2]:
        shutil.rmtree(old)
    return target


def load_checkpoint(
    folder: Path, model: Any, parameters: dict[str, Any], optimizer: Any, run: dict[str, Any]
) -> list[float]:
    """Take up the last checkpoint of the folder, adapters and moments. Returns its losses; none without one."""
    from peft import set_peft_model_state_dict

    found = _checkpoints(folder)
    if not found:
        return []
    last = found[-1]
    state = json.loads((last / "state.json").read_text())
    other = [key for key in run if state["run"].get(key) != run[key]]
    if other:
        raise ValueError(f"{last} is of a run with other {', '.join(other)}: use another folder, or the same arguments")
    for name in _FILES:
        if _sha256(last / name) != state["sha256"].get(name):
            raise ValueError(f"{last / name} was altered after it was written: delete {last} to resume before it")
    losses = [float(loss) for loss in state["losses"]]
    set_peft_model_state_dict(model, load_file(last / "adapter_model.safetensors"))
    moments = load_file(last / "optimizer.safetensors")
    for name, p in parameters.items():
        optimizer.state[p] = {"step": torch.tensor(float(len(losses)))} | {
            kind: moments[f"{name}.{kind}"].to(p.device) for kind in _MOMENTS
        }
    return losses


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if (path / "state.json").is_file())


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    """Of the sizes and the first values of tensors: enough to tell one model or text from another."""
    digest = hashlib.sha256()
    for tensor in tensors:
        first = tensor.detach().flatten()[:4096].contiguous().view(torch.uint8).cpu()
        digest.update(str(tuple(tensor.shape)).encode() + first.numpy().tobytes())
    return digest.hexdigest()


# ---------------------------------------------------------------------- the whole comparison


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=512, help="of a training window")
    parser.add_argument("--batch", type=int, default=1, help="windows in a forward pass of each process")
    parser.add_argument("--accumulate", type=int, default=1, help="forward passes in a step")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument(
        "--targets", nargs="+", help="names of the layers to adapt; the attention's projections without"
    )
    parser.add_argument("--distill", action="store_true", help="learn what the original predicts instead of the text")
    parser.add_argument("--text", nargs="+", help="files to train on; docstrings of the standard library without")
    parser.add_argument(
        "--no-checkpointing", action="store_true", help="keep activations instead of computing them again"
    )
    parser.add_argument("--no-control", action="store_true", help="do not heal the original in the same way")
    parser.add_argument("--windows", type=int, default=9, help="held-out windows of 1,024 tokens")
    parser.add_argument("--window-tokens", type=int, default=1024)
    parser.add_argument("--checkpoints", help="a folder; a run that was stopped is resumed from there")
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")


def compare(
    model: Any, original: Any, tokenizer: Any, args: argparse.Namespace, accelerator: Any, targets: Any = None
) -> tuple[Any, dict[str, Any]]:
    """Heal `model`, and a copy of `original` in the same way; returns the healed model and the perplexities.

    `original` is in full precision and stays so. `targets` are those of the model; the original takes its own defaults.
    """
    texts = [Path(path).read_text(encoding="utf-8") for path in args.text] if args.text else library_texts()
    windows = packed(tokenizer, texts, args.tokens)
    evaluation = held_out(tokenizer, args.windows, args.window_tokens)
    plan = Plan(steps=args.steps, batch=args.batch, accumulate=args.accumulate, rate=args.rate)
    say = accelerator.print
    result: dict[str, Any] = {"plan": asdict(plan), "tokens": args.steps * args.batch * args.accumulate * args.tokens}
    result["original"] = perplexity(original, evaluation)
    result["converted"] = perplexity(model, evaluation)
    say(f"perplexity in full precision: original {result['original']:.3f}, converted {result['converted']:.3f}")
    healed = None
    for name in ("model", "control")[: 1 if args.no_control else 2]:
        torch.manual_seed(plan.seed)  # the same random halves of the adapters in every process
        prepared = prepare_for_healing(
            model if name == "model" else copy.deepcopy(original),
            targets if name == "model" else None,
            rank=args.rank,
            gradient_checkpointing=not args.no_checkpointing,
        )
        before = perplexity(prepared, evaluation)
        folder = Path(args.checkpoints) / name if args.checkpoints else None
        began = time.process_time()
        losses = heal(
            prepared,
            windows,
            plan,
            teacher=original if args.distill else None,
            folder=folder,
            every=args.every,
            accelerator=accelerator,
            track=_track if accelerator.is_main_process else lambda items, description: items,
        )
        minutes = (time.process_time() - began) / 60
        after = perplexity(prepared, evaluation)
        count = sum(p.numel() for p in prepared.parameters() if p.requires_grad)
        result[name] = {"before": before, "after": after, "cpu_minutes": minutes, "adapted": count, "losses": losses}
        say(f"{name}: perplexity {before:.3f} in 4 bits, {after:.3f} healed ({minutes:.1f} CPU minutes)")
        healed = healed or prepared
        accelerator.free_memory()
    if not args.no_control:
        for when in ("before", "after"):
            result[f"ratio_{when}"] = result["model"][when] / result["control"][when]
        say(f"ratio to the control: {result['ratio_before']:.4f} before, {result['ratio_after']:.4f} after")
    return healed, result


def _track(items: Iterable[Any], description: str) -> Iterable[Any]:
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        return items
    return track(items, description=description, console=Console(stderr=True), transient=True)
