"""Every cache on every causal-LM type of the installed transformers: what works, what is refused, what is wrong.

Each type is built tiny (`shrink`), generates greedily with `DynamicCache`, and then with each cache of this library:

- With room for every token, two turns over a left-padded batch and one row alone must give `DynamicCache`'s tokens.
- With a small budget a cache that drops tokens must hold no more rows than the budget, and each padded row must give
  what that row gives alone.

Random models have close calls, and the caches add up in another order than transformers does. So where tokens differ,
both sides are fed the same tokens and their logits are compared at every step; within `TOLERANCE` they are equal.
"""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from ..attention import attach, detach, is_ours
from ..cache import KVCache, own_cache_reason
from ..caches import HeavyHitterCache, QuantizedKIVICache, SlidingWindowCache, SnapKVCache
from ..layer import KVLayer
from .shrink import ShrinkError, build, cache_argument, causal_lm_types, sample_inputs

ROWS = 3
PROMPT = 12
NEW_TOKENS = 12
# A second turn: the whole history again and a few tokens more.
FOLLOW_UP = 3
FOLLOW_UP_NEW_TOKENS = 4
# More than any sequence here, so that nothing is dropped.
ROOMY = 64
TOLERANCE = 1e-4
PACKAGE = Path(__file__).resolve().parent.parent

STATUSES = {
    "equal": "the tokens of `DynamicCache`",
    "materialized": "the same tokens, but the model reads its keys as tensors before it attends, so it is not faster",
    "native": "every layer is left to transformers: there are no full-attention keys and values to hold",
    "refused": "an error that names the reason, before any token is generated",
    "failed": "wrong tokens, or an error that is no refusal",
    "unbuilt": "the tiny model could not be built",
}
BAD = ("failed", "unbuilt")


@dataclass
class Result:
    """What one cache did on one model type."""

    type: str
    cache: str
    status: str  # a key of STATUSES
    reason: str = ""


@dataclass(frozen=True)
class Case:
    """How to make one cache: with room for everything, and with a budget of `budget` rows per KV head."""

    roomy: Callable[[PreTrainedModel], KVCache]
    small: Callable[[PreTrainedModel], KVCache] | None = None
    budget: int = 0


CASES: dict[str, Case] = {
    "KVCache": Case(KVCache),
    "QuantizedKIVICache": Case(lambda model: QuantizedKIVICache(model, nbits=4, residual_length=ROOMY)),
    "SlidingWindowCache": Case(
        lambda model: SlidingWindowCache(model, window_length=ROOMY, num_sink_tokens=2),
        lambda model: SlidingWindowCache(model, window_length=4, num_sink_tokens=2),
        budget=6,
    ),
    "SnapKVCache": Case(
        lambda model: SnapKVCache(model, max_capacity_prompt=ROOMY, window_size=4),
        # A kernel of 5 over so few tokens gives several of them the same score, which rounding would then decide.
        lambda model: SnapKVCache(model, max_capacity_prompt=6, window_size=4, kernel_size=3, decode_budget=2),
        budget=8,
    ),
    "HeavyHitterCache": Case(
        lambda model: HeavyHitterCache(model, heavy_size=ROOMY, recent_size=ROOMY),
        lambda model: HeavyHitterCache(model, heavy_size=3, recent_size=3),
        budget=6,
    ),
}


class _Failed(Exception):
    """A check did not hold."""


class _Refused(Exception):
    """This library refused the model, in time and with a reason."""


# ---------------------------------------------------------------------- generating


class _Force(LogitsProcessor):
    """Make generation take given tokens, whatever the logits say."""

    def __init__(self, tokens: torch.Tensor, start: int) -> None:
        self.tokens, self.start = tokens, start  # [B, start + new]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        wanted = self.tokens[:, input_ids.shape[1] : input_ids.shape[1] + 1]
        return torch.full_like(scores, float("-inf")).scatter_(1, wanted, 0.0)


def _inputs(model: PreTrainedModel, row: int | None = None) -> dict[str, torch.Tensor]:
    """The left-padded batch, or one of its rows without its padding."""
    inputs = sample_inputs(model, batch=ROWS, length=PROMPT)
    books = inputs["input_ids"].shape[0] // ROWS
    if books > 1:
        # Models of audio codes have a row of ids for each codebook, and feed them from the first column on with the
        # whole mask: what would be padding masks tokens that they generate.
        inputs["attention_mask"].fill_(1)
    if row is None:
        return inputs
    real = inputs["attention_mask"][row].bool()
    ids = inputs["input_ids"][row * books : (row + 1) * books, real]
    return {"input_ids": ids, "attention_mask": inputs["attention_mask"][row : row + 1, real]}


def _generate(
    model: PreTrainedModel,
    cache: Any,
    inputs: dict[str, torch.Tensor],
    turns: int,
    forced: Sequence[torch.Tensor] | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Sequences after each turn, and with `forced` sequences the logits `[B, V]` of every step."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    sequences: list[torch.Tensor] = []
    logits: list[torch.Tensor] = []
    for turn in range(turns):
        if turn:
            follow_up = torch.arange(20, 20 + FOLLOW_UP, device=ids.device).expand(ids.shape[0], -1)
            ids = torch.cat([sequences[-1], follow_up], dim=1)
            mask = torch.cat([mask, mask.new_ones(mask.shape[0], ids.shape[1] - mask.shape[1])], dim=1)
        new = FOLLOW_UP_NEW_TOKENS if turn else NEW_TOKENS
        options: dict[str, Any] = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
        if forced is not None:
            force = LogitsProcessorList([_Force(forced[turn], ids.shape[1])])
            options |= {"logits_processor": force, "output_logits": True, "return_dict_in_generate": True}
        options[cache_argument(model)] = cache
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            output = model.generate(input_ids=ids, attention_mask=mask, **options)
        if forced is not None:
            logits += [step.float() for step in output.logits]
            output = output.sequences
        sequences.append(output)
    return sequences, logits


@contextlib.contextmanager
def _stock(model: PreTrainedModel) -> Iterator[Any]:
    """A fresh `DynamicCache`, with the model as transformers made it."""
    ours = any(is_ours(m.config._attn_implementation) for m in model.modules() if isinstance(m, PreTrainedModel))
    detach(model)
    yield DynamicCache(config=model.config.get_text_config(decoder=True))
    if ours:
        attach(model)


@contextlib.contextmanager
def _refusals(model: PreTrainedModel | None = None) -> Iterator[None]:
    """Turn an error of this library into `_Refused`, if it came before a forward pass of `model` had ended."""
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    hook = model.register_forward_hook(count) if model is not None else None
    try:
        yield
    except (NotImplementedError, ValueError) as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        ours = trace is not None and PACKAGE in Path(trace.tb_frame.f_code.co_filename).resolve().parents
        if not ours:
            raise
        if passes:
            raise _Failed(f"refused only after {passes} forward passes: {error}") from error
        raise _Refused(str(error)) from error
    finally:
        if hook is not None:
            hook.remove()


@contextlib.contextmanager
def _reads() -> Iterator[list[int]]:
    """Indices of the layers whose keys or values a model reads as tensors while it runs."""
    read: list[int] = []
    original = KVLayer.materialize

    def materialize(self: KVLayer, which: str) -> torch.Tensor:
        if self.pending is not None:
            read.append(self.layer_idx)
        return original(self, which)

    KVLayer.materialize = materialize  # type: ignore[method-assign]
    try:
        yield read
    finally:
        KVLayer.materialize = original  # type: ignore[method-assign]


# ---------------------------------------------------------------------- checking


class _Reference:
    """What `DynamicCache` gives on one model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        # Models of audio codes return their codebooks in another shape than they take them.
        self.turns = 2 if getattr(model, "num_codebooks", 1) == 1 else 1
        self._padding_matters: dict[int, bool] = {}
        self.sequences: dict[int | None, list[torch.Tensor]] = {}
        for row in (None, 0):
            with _stock(model) as cache:
                try:
                    self.sequences[row] = _generate(model, cache, _inputs(model, row), self.turns)[0]
                except Exception:
                    if self.turns == 1:
                        raise
                    self.turns = 1  # a second turn is not possible with transformers' own cache either
            if row not in self.sequences:
                with _stock(model) as cache:
                    self.sequences[row] = _generate(model, cache, _inputs(model, row), 1)[0]

    def logits(self, row: int | None, forced: list[torch.Tensor]) -> list[torch.Tensor]:
        with _stock(self.model) as cache:
            return _generate(self.model, cache, _inputs(self.model, row), self.turns, forced)[1]

    def padding_matters(self, row: int) -> bool:
        """Whether a padded row differs from the row alone with `DynamicCache` too (positions that count padding)."""
        if row not in self._padding_matters:
            with _stock(self.model) as cache:
                alone = _generate(self.model, cache, _inputs(self.model, row), 1)[0]
            with _stock(self.model) as cache:
                mine = _generate(self.model, cache, _inputs(self.model, row), 1, alone)[1]
            batch = _forced_batch(self.sequences[None][0], alone[0], row)
            with _stock(self.model) as cache:
                theirs = _generate(self.model, cache, _inputs(self.model), 1, [batch])[1]
            self._padding_matters[row] = _close(mine, [_row(step, row) for step in theirs]) is not None
        return self._padding_matters[row]


def _row(batch: torch.Tensor, row: int) -> torch.Tensor:
    size = batch.shape[0] // ROWS
    return batch[row * size : (row + 1) * size]


def _same_tail(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    """Whether the generated ends are the same; the prompts may differ in padding."""
    return all(torch.equal(x[..., -NEW_TOKENS:], y[..., -NEW_TOKENS:]) for x, y in zip(a, b, strict=True))


def _forced_batch(sequences: torch.Tensor, alone: torch.Tensor, row: int) -> torch.Tensor:
    """The batch's sequences, with the generated tokens of one row replaced by those it gave alone."""
    batch = sequences.clone()
    _row(batch, row)[..., -NEW_TOKENS:] = alone[..., -NEW_TOKENS:]
    return batch


def _close(a: list[torch.Tensor], b: list[torch.Tensor]) -> str | None:
    """What is wrong between two lists of logits, or None where rounding explains all of it."""
    for step, (x, y) in enumerate(zip(a, b, strict=True)):
        difference = float((x - y).abs().max())
        if not difference <= TOLERANCE * max(1.0, float(x.abs().max())):
            return f"logits differ by {difference:.2g} at step {step}"
    return None


def _play(
    model: PreTrainedModel,
    make: Callable[[PreTrainedModel], KVCache],
    row: int | None,
    turns: int,
    forced: Sequence[torch.Tensor] | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor], KVCache]:
    """`_generate` with a new cache, which is handed back too."""
    with _refusals():
        cache = make(model)
    with _refusals(model):
        return *_generate(model, cache, _inputs(model, row), turns, forced), cache


def _only_with_one_codebook(model: PreTrainedModel) -> None:
    if getattr(model, "num_codebooks", 1) > 1:
        # What they return is not what they were fed (a delay pattern is undone), so tokens cannot be forced on them.
        raise _Failed("other tokens")


def _check_lossless(model: PreTrainedModel, case: Case, reference: _Reference) -> KVCache:
    for row in (None, 0):
        wanted = reference.sequences[row][: reference.turns]
        got, _, cache = _play(model, case.roomy, row, reference.turns)
        if all(torch.equal(x, y) for x, y in zip(got, wanted, strict=True)):
            continue
        _only_with_one_codebook(model)
        mine = _play(model, case.roomy, row, reference.turns, wanted)[1]
        difference = _close(reference.logits(row, wanted), mine)
        if difference is not None:
            raise _Failed(f"{'padded batch' if row is None else 'one row'}, nothing dropped: {difference}")
    return cache


def _check_small(model: PreTrainedModel, case: Case, reference: _Reference) -> None:
    assert case.small is not None
    (together,), _, cache = _play(model, case.small, None, 1)
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, KVLayer) or not layer.get_seq_length():
            continue
        if layer.kept > case.budget:
            raise _Failed(f"layer {index} holds {layer.kept} rows, more than its budget of {case.budget}")
    for row in range(ROWS):
        alone = _play(model, case.small, row, 1)[0]
        if _same_tail([_row(together, row)], alone):
            continue
        _only_with_one_codebook(model)
        mine = _play(model, case.small, row, 1, alone)[1]
        theirs = _play(model, case.small, None, 1, [_forced_batch(together, alone[0], row)])[1]
        difference = _close(mine, [_row(step, row) for step in theirs])
        if difference is not None and not (row and reference.padding_matters(row)):
            raise _Failed(f"row {row} of a padded batch does not give what it gives alone: {difference}")


def _check_other_caches(model: PreTrainedModel, reference: _Reference) -> None:
    """A model that is attached must serve transformers' own cache as before."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    got = _generate(model, cache, _inputs(model), 1)[0]
    if not torch.equal(got[0], reference.sequences[None][0]):
        wanted = reference.sequences[None][:1]
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        mine = _generate(model, cache, _inputs(model), 1, wanted)[1]
        with _stock(model) as stock:
            difference = _close(mine, _generate(model, stock, _inputs(model), 1, wanted)[1])
        if difference is not None:
            raise _Failed(f"DynamicCache on the attached model: {difference}")


def _check(model: PreTrainedModel, name: str, reference: _Reference) -> tuple[str, str]:
    """Status and reason of one cache on one model."""
    case = CASES[name]
    try:
        with _reads() as read:
            cache = _check_lossless(model, case, reference)
        if case.small is not None:
            _check_small(model, case, reference)
        if any(isinstance(layer, KVLayer) for layer in cache.layers):
            _check_other_caches(model, reference)
    except _Refused as refusal:
        return "refused", str(refusal)
    except _Failed as failure:
        return "failed", str(failure)
    except Exception as error:
        return "failed", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    finally:
        detach(model)
    ours, layers = len(cache.kv_layers), len(cache.layers)
    if not ours:
        return "native", f"its layers: {', '.join(sorted({type(layer).__name__ for layer in cache.layers}))}"
    note = "" if ours == layers else f"{ours} of {layers} layers, the others left to transformers"
    if read:
        own = not cache.kv_layers[0].attached
        latent = cache.kv_layers[0].expanded
        why = (
            "attention code of its own"
            if own
            else "expands its latents to all heads (MLA)"
            if latent
            else "reads its keys before it attends"
        )
        return "materialized", "; ".join(filter(None, (why, note)))
    return "equal", note


def _build(model_type: str, attn: str | None) -> PreTrainedModel:
    model = build(model_type, attn_implementation=attn)
    for name, parameter in model.named_parameters():
        if name.endswith(".temp") and not parameter.any():
            # Zaya multiplies its keys by this: at zero, attention is uniform and its rows are all worth the same.
            torch.nn.init.ones_(parameter)
    return model


def _refusal(model: PreTrainedModel, case: Case) -> tuple[str, str]:
    try:
        with _refusals():
            case.roomy(model)
    except _Refused as refusal:
        return "refused", str(refusal)
    except Exception as error:
        return "failed", f"{type(error).__name__}: {error}"
    return "failed", f"is not refused, though the model cannot use it: {own_cache_reason(model)}"


def run_type(model_type: str, caches: Iterable[str] | None = None, attn: str | None = None) -> list[Result]:
    """The results of one model type; `attn` is the attention implementation, None for transformers' choice."""
    names = list(CASES if caches is None else caches)

    def all_of(status: str, reason: str) -> list[Result]:
        return [Result(model_type, name, status, reason) for name in names]

    try:
        model = _build(model_type, None if attn == "sdpa" else attn)
    except ShrinkError as error:
        return all_of("unbuilt", str(error))
    if own_cache_reason(model) is not None:
        # There is nothing to compare with; what counts is that each cache says so by itself.
        return [Result(model_type, name, *_refusal(model, CASES[name])) for name in names]
    try:
        reference = _Reference(model)
    except Exception as error:
        return all_of("unbuilt", f"does not generate with DynamicCache: {type(error).__name__}: {error}")
    return [Result(model_type, name, *_check(model, name, reference)) for name in names]


def run(
    types: Iterable[str] | None = None,
    caches: Iterable[str] | None = None,
    attn: str | None = None,
    progress: Callable[[str], None] = lambda model_type: None,
    results: list[Result] | None = None,
) -> list[Result]:
    """Check `caches` (names in `CASES`; None: all) on `types` (None: all), and say what each did.

    `progress` is called with each type before it is run. `attn` is `"sdpa"` (where a model has it) or `"eager"`.
    Results are added to `results`, where one is given, as they come.
    """
    results = [] if results is None else results
    for model_type in causal_lm_types() if types is None else types:
        progress(model_type)
        results += run_type(model_type, caches, attn)
    return results


# ---------------------------------------------------------------------- reporting


def counts(results: Iterable[Result]) -> dict[str, Counter[str]]:
    """How many types have each status, for each cache."""
    found: dict[str, Counter[str]] = {}
    for result in results:
        found.setdefault(result.cache, Counter())[result.status] += 1
    return found


def table(results: Sequence[Result]) -> str:
    """Markdown: the counts, one row per type with one column per cache, and the reasons behind the table."""
    caches = list(dict.fromkeys(result.cache for result in results))
    cells: dict[str, dict[str, Result]] = {}
    for result in results:
        cells.setdefault(result.type, {})[result.cache] = result
    number = counts(results)
    lines = [
        _line("", *caches),
        _line(*["---"] * (1 + len(caches))),
        *(_line(status, *(str(number[name][status]) for name in caches)) for status in STATUSES),
        "",
        *(f"- **{status}**: {meaning}." for status, meaning in STATUSES.items()),
        "",
        _line("model type", *caches),
        _line(*["---"] * (1 + len(caches))),
    ]
    for model_type, row in cells.items():
        lines.append(_line(f"`{model_type}`", *(row[name].status if name in row else "" for name in caches)))
    reasons: dict[tuple[str, str], list[str]] = {}
    for result in results:
        if result.reason:
            names = reasons.setdefault((result.status, result.reason), [])
            names.append(f"`{result.type}`" + (f" ({result.cache})" if result.status in BAD else ""))
    for status in STATUSES:
        mine = {reason: names for (its, reason), names in reasons.items() if its == status}
        if mine:
            lines += ["", f"## Notes: {status}", ""]
            lines += [f"- {', '.join(dict.fromkeys(names))}: {reason}" for reason, names in mine.items()]
    return "\n".join(lines) + "\n"


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _document(results: Sequence[Result], command: str, attn: str) -> str:
    """The published page: `table` under a header that says how it was measured."""
    from .. import __version__

    head = [
        "# Compatibility, measured",
        "",
        f"Every causal-LM model type of transformers {transformers.__version__}, as a tiny random model in float32 on "
        f"the CPU with attention `{attn}` (where a type has it); hf_kvcache {__version__}, torch "
        f"{torch.__version__.split('+')[0]}. Written by",
        "",
        "```",
        command,
        "```",
        "",
        f"Every cache generates greedily: {NEW_TOKENS} tokens for a left-padded batch of {ROWS} and for one row, then "
        "a second turn with the whole history. With room for everything the tokens must be those of `DynamicCache`; "
        "with a small budget the cache must hold no more rows than the budget, and each padded row must give what it "
        "gives alone.",
        "",
    ]
    return "\n".join([*head, table(results)])


# ---------------------------------------------------------------------- the command


def check(
    types: list[str] | None, caches: list[str] | None, attn: str, json_path: Path | None, page: Path | None
) -> tuple[bool, bool]:
    """Run the check as asked, write and print it: whether something failed, and whether it ran to its end.

    Ctrl-C keeps the types that were checked. Raises `ValueError` for names that do not exist.
    """
    known = causal_lm_types()
    for given, allowed, what in ((types, known, "model types"), (caches, list(CASES), "caches")):
        unknown = [name for name in given or [] if name not in allowed]
        if unknown or given == []:
            hint = f": {', '.join(allowed)}" if allowed is not known else " (the causal-LM types of transformers)"
            raise ValueError(f"unknown {what}: {', '.join(unknown) or 'none given'}; choose from those there are{hint}")
    wanted = types or known
    transformers.logging.set_verbosity_error()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with tensors this small, threads only wait for each other
    results: list[Result] = []
    whole = True
    try:
        with _progress(len(wanted)) as progress:
            run(wanted, caches, attn, progress, results)
    except KeyboardInterrupt:
        whole = False
        print("interrupted: what follows is what was checked until then", file=sys.stderr)
    finally:
        torch.set_num_threads(threads)
    if json_path is not None:
        found: dict[str, Any] = {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "attn": attn,
            "results": [asdict(result) for result in results],
        }
        found |= {} if whole else {"interrupted": True}
        json_path.write_text(json.dumps(found, indent=1) + "\n")
    if page is not None and whole:
        words = ["python -m hf_kvcache compat"]
        words += [f"--types {','.join(types)}"] if types else []
        words += [f"--caches {','.join(caches)}"] if caches else []
        words += [f"--attn {attn}"] if attn != "sdpa" else []
        words += [f"--markdown {page}"]
        page.write_text(_document(results, " ".join(words), attn))
    for name, number in counts(results).items():
        print(f"{name}: " + ", ".join(f"{number[status]} {status}" for status in STATUSES if number[status]))
    bad = [result for result in results if result.status in BAD]
    for result in bad:
        print(f"{result.status}: {result.type}, {result.cache}: {result.reason}")
    return bool(bad), whole


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar on stderr if rich is installed and stderr is a terminal, else a line for each type."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        rich = False
    else:
        rich = sys.stderr.isatty()
    if not rich:
        done = 0

        def line(model_type: str) -> None:
            nonlocal done
            done += 1
            print(f"[{done}/{total}] {model_type}", file=sys.stderr, flush=True)

        yield line
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)
        started = False

        def step(model_type: str) -> None:
            nonlocal started
            bar.update(task, description=model_type, advance=int(started))
            started = True

        yield step
        bar.update(task, description="", completed=total)
