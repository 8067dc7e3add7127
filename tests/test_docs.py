"""Every Python block of the README and of docs/ runs, commands have the options shown, and links lead somewhere.

The blocks of a page run in order, in one namespace that holds what a reader is taken to have: `model`, `tokenizer`,
`inputs` (a tokenized prompt), `texts`, `name` (what the model is loaded from), and the folder `scratch`. A block that
cannot run here has a comment before it: `<!-- no-run: the reason -->`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import io
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from hf_kvcache import BlockPool, KVCache, Offload, PrefixStore
from hf_kvcache.codecs import KIVI, Float8, Rotated
from hf_kvcache.policies import HeavyHitter, SlidingWindow, SnapKV

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
FENCE = re.compile(r"(?:<!-- no-run: (?P<why>[^\n]+?) -->\n\n?)?^```(?P<kind>\w*)\n(?P<code>.*?)^```$", re.M | re.S)
COMMAND = re.compile(r"^(?:\$ )?(?:python -m hf_kvcache|hf-kvcache) +(?P<name>[a-z][\w-]*)(?P<rest>[^\n]*)", re.M)
SCRIPT = re.compile(r"python ((?:examples|tests/bench)/\w+\.py)((?: +[^`\n#|]+)?)")
OPTION = re.compile(r"(?<!\S)(--[a-z][\w-]*)")
MOST_NOT_RUN = 4


@dataclass
class Block:
    """A block of Python on a page. `line` is that of its first statement, and `why` the reason not to run it."""

    code: str
    line: int
    why: str | None


def python_blocks(text: str) -> list[Block]:
    blocks = []
    for found in FENCE.finditer(text):
        if found["kind"] in ("python", "py"):
            blocks.append(Block(found["code"], text[: found.start("code")].count("\n") + 1, found["why"]))
    return blocks


def run_page(text: str, name: str, namespace: dict[str, Any]) -> None:
    """Run the blocks of a page in the current folder; an error names the line of the page."""
    for block in python_blocks(text):
        if block.why is None:
            exec(compile("\n" * (block.line - 1) + block.code, name, "exec"), namespace)


# ---------------------------------------------------------------------- what the blocks are run with

SIZES: dict[str, Any] = dict(
    vocab_size=260,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=6,
    num_attention_heads=4,
    max_position_embeddings=4096,
    initializer_range=0.2,
    pad_token_id=256,
    bos_token_id=257,
    eos_token_id=258,
)
TEXTS = [
    "The cache of a layer is an ordered list of segments, and attention over it is merged from them. " * 6,
    "A policy says which rows stay; a codec says how they are written; a segment says where they lie. " * 6,
    "Two lengths are kept apart: the tokens that were ever seen, and the rows that are still held. " * 6,
]


@functools.cache
def tokenizer_of_bytes() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = alphabet + ["<pad>", "<s>", "</s>"]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


@functools.cache
def built(kind: str) -> PreTrainedModel:
    torch.manual_seed(3)
    if kind == "mla":
        config: Any = DeepseekV3Config(
            **SIZES | dict(num_hidden_layers=2),
            num_key_value_heads=4,
            kv_lora_rank=64,
            q_lora_rank=None,
            qk_nope_head_dim=16,
            qk_rope_head_dim=16,
            v_head_dim=16,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            num_experts_per_tok=4,
            moe_intermediate_size=16,
            n_shared_experts=1,
        )
    else:
        layers = 2 if kind == "short" else SIZES["num_hidden_layers"]
        config = LlamaConfig(**SIZES | dict(num_hidden_layers=layers), num_key_value_heads=2, head_dim=32)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    model.generation_config.max_new_tokens = 8
    return model


def namespace_for(page: str) -> dict[str, Any]:
    """Fresh for each page: some attach the model, others convert it."""
    tokenizer = copy.deepcopy(tokenizer_of_bytes())
    tokenizer.padding_side = "left"
    kind = {"docs/mla.md": "mla", "docs/mla_conversion.md": "short"}.get(page, "llama")
    return {
        "__name__": "page",
        "model": copy.deepcopy(built(kind)),
        "tokenizer": tokenizer,
        "inputs": tokenizer(TEXTS[0], return_tensors="pt", return_token_type_ids=False),
        "texts": TEXTS * (2 if kind == "short" else 1),  # some windows of 1,024 tokens
    }


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """For tiny models a pool of threads costs more than it computes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder with the subfolder that pages write to; `patches/` is where it is once installed."""
    if importlib.util.find_spec("hf_kvcache.patches") is None:  # a bare checkout
        import patches

        monkeypatch.setitem(sys.modules, "hf_kvcache.patches", patches)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scratch").mkdir()
    return tmp_path


# ---------------------------------------------------------------------- code


@pytest.mark.parametrize("name", [n for n, p in zip(NAMES, PAGES, strict=True) if python_blocks(p.read_text("utf-8"))])
def test_the_blocks_of_a_page_run(name: str, folder: Path) -> None:
    text, namespace = (ROOT / name).read_text(encoding="utf-8"), namespace_for(name)
    if "from_pretrained(name)" in text:
        namespace["model"].save_pretrained("saved")
        namespace["name"] = str(folder / "saved")
    run_page(text, name, namespace)


@pytest.mark.parametrize("name", NAMES)
def test_no_block_is_overlooked(name: str) -> None:
    """One that is indented, or marked in a way of its own, would not be run."""
    text = (ROOT / name).read_text(encoding="utf-8")
    assert len(re.findall(r"^\s*(?:```|~~~)+ *\{?\.?py", text, re.MULTILINE)) == len(python_blocks(text))
    assert text.count("no-run") == sum(block.why is not None for block in python_blocks(text))


def test_few_blocks_are_left_out() -> None:
    left_out = [
        (name, block.line, block.why)
        for name, page in zip(NAMES, PAGES, strict=True)
        for block in python_blocks(page.read_text(encoding="utf-8"))
        if block.why is not None
    ]
    assert len(left_out) <= MOST_NOT_RUN, left_out


def test_a_block_that_fails_is_found(folder: Path) -> None:
    text = "# Page\n\n```python\na = 1\n```\n\n<!-- no-run: needs a GPU -->\n```python\nnowhere\n```\n"
    text += "\n```py\nassert a == 2\n```\n"
    assert [(block.line, block.why) for block in python_blocks(text)] == [(4, None), (9, "needs a GPU"), (13, None)]
    with pytest.raises(AssertionError) as caught:
        run_page(text, "page", {})
    assert caught.traceback[-1].lineno == 12  # counted from zero


# ---------------------------------------------------------------------- the policy and the codec of docs/extending.md


@pytest.fixture(scope="module")
def own() -> SimpleNamespace:
    """The classes that docs/extending.md defines."""
    page = "docs/extending.md"
    namespace = namespace_for(page)
    for block in python_blocks((ROOT / page).read_text(encoding="utf-8")):
        if "class " in block.code:
            exec(compile(block.code, page, "exec"), namespace)
    return SimpleNamespace(**namespace)


def own_caches(own: SimpleNamespace, model: PreTrainedModel) -> dict[str, KVCache]:
    return {
        "policy": KVCache(model, policy=own.KeyNorm(budget=160, recent=32)),
        "codec": KVCache(model, codec=own.FP4(residual_length=64)),
        "both": KVCache(model, policy=own.KeyNorm(budget=160, recent=32), codec=own.FP4(residual_length=64)),
    }


@pytest.mark.parametrize("what", ["policy", "codec", "both"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_what_a_reader_writes_in_30_lines(what: str, attention: str, own: SimpleNamespace) -> None:
    """Bytes by the formula, padded rows as alone, beams, a second turn with the whole history."""
    model = copy.deepcopy(built("llama"))
    model.set_attn_implementation(attention)
    ids = torch.randint(0, 256, (2, 400), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[1, :41] = 0
    kwargs: dict[str, Any] = dict(do_sample=False, max_new_tokens=12, min_new_tokens=12)

    cache = own_caches(own, model)[what]
    assert cache.kept_length() == 0
    with torch.no_grad():
        model(input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=cache)
    assert cache.nbytes == cache.expected_bytes(model.config, 2, 400, torch.float32)
    full = KVCache(model).expected_bytes(model.config, 2, 400, torch.float32)
    assert cache.nbytes < (0.75 if what == "codec" else 0.55) * full
    assert cache.get_seq_length() == 400
    assert what == "codec" or cache.kept_length() < 400

    cache = own_caches(own, model)[what]
    together = model.generate(input_ids=ids, attention_mask=mask, past_key_values=cache, **kwargs)
    alone = own_caches(own, model)[what]
    single = model.generate(input_ids=ids[1:, 41:], attention_mask=mask[1:, 41:], past_key_values=alone, **kwargs)
    assert torch.equal(together[1, 400:], single[0, 359:])

    longer = torch.cat([together, ids[:, :20]], dim=1)
    longer_mask = torch.cat([mask, torch.ones(2, 32, dtype=mask.dtype)], dim=1)
    again = model.generate(input_ids=longer, attention_mask=longer_mask, past_key_values=cache, **kwargs)
    assert again.shape[1] == 444 and cache.get_seq_length() == 443

    beams = model.generate(
        input_ids=ids[:1],
        attention_mask=torch.ones_like(ids[:1]),
        past_key_values=own_caches(own, model)[what],
        num_beams=3,
        **kwargs,
    )
    assert beams.shape == (1, 412)


def test_they_are_about_30_lines() -> None:
    text = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    for name in ("KeyNorm", "FP4"):
        code = next(b.code for b in python_blocks(text) if f"class {name}(" in b.code)
        lines = [line for line in code.splitlines() if line.strip()]
        assert len(lines) <= 36, (name, len(lines))


# ---------------------------------------------------------------------- the table of docs/composition.md

PARTS: dict[str, list[Callable[[], dict[str, Any]]]] = {
    "keep all": [lambda: {}],
    "`SlidingWindow`": [lambda: {"policy": SlidingWindow(250, 4)}],
    "`SnapKV`": [lambda: {"policy": SnapKV(256)}],
    "`SnapKV(adaptive_heads=True)`": [lambda: {"policy": SnapKV(256, adaptive_heads=True)}],
    "`SnapKV(decode_budget=...)`": [lambda: {"policy": SnapKV(256, decode_budget=64)}],
    "`HeavyHitter`": [lambda: {"policy": HeavyHitter(128, 128)}],
    "codec `KIVI`, `Float8`": [lambda: {"codec": KIVI(4)}, lambda: {"codec": Float8()}],
    "codec `Rotated`": [lambda: {"codec": Rotated(4)}],
    "offload": [lambda: {"offload": Offload(64)}],
    "pool": [lambda: {"pool": BlockPool()}],
    "sharing": [lambda: {"sharing": 2}],
    "prefix": [lambda: {"prefix": True}],
}


def composition_table() -> list[tuple[str, str, str]]:
    """(row, column, what the cell says) of every cell that says something."""
    text = (ROOT / "docs" / "composition.md").read_text(encoding="utf-8")
    lines = text.partition("## Which pairs")[2].strip().splitlines()
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    rows = rows[: next(i for i, row in enumerate(rows) if row[0] == "sharing") + 1]
    said = [(row[0], column, cell) for row in rows for column, cell in zip(head[1:], row[1:], strict=True) if cell]
    return [(row.partition(" (`KVCache`)")[0], column, cell) for row, column, cell in said]


@pytest.mark.parametrize(("row", "column", "cell"), composition_table())
def test_the_table_of_pairs_says_what_the_code_does(row: str, column: str, cell: str) -> None:
    model = copy.deepcopy(built("llama"))
    for left, right in itertools.product(PARTS[row], PARTS[column]):
        if cell == "yes":
            assert composed(model, left() | right()).get_seq_length() == 0
        else:
            assert re.fullmatch(r"no \(\d\)", cell)
            with pytest.raises((ValueError, NotImplementedError)):
                composed(model, left() | right())


def composed(model: PreTrainedModel, parts: dict[str, Any]) -> KVCache:
    """A cache of these parts; with a prefix one that a store would begin with."""
    if not parts.pop("prefix", False):
        return KVCache(model, **parts)
    return PrefixStore(max_bytes=1 << 20, cache=lambda inner: KVCache(inner, **parts)).new_cache(model)


def test_the_table_of_pairs_is_whole() -> None:
    names = list(PARTS)
    order = {frozenset((row, column)) for row, column, _ in composition_table()}
    policies, others = names[:6], names[6:]
    expected = {frozenset((a, b)) for a in policies for b in others} | {
        frozenset(p) for p in itertools.combinations(others, 2)
    }
    codecs = frozenset(names[6:8])
    assert order == expected - {codecs}


# ---------------------------------------------------------------------- commands, files, links


@functools.cache
def help_of(command: str) -> str:
    """What `hf-kvcache COMMAND --help` prints, on a wide terminal without colours."""
    from hf_kvcache.__main__ import main

    wide = {"COLUMNS": "200", "TERMINAL_WIDTH": "200", "TERM": "dumb", "NO_COLOR": "1"}
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        for name, value in wide.items():
            patch.setenv(name, value)
        assert main([command, "--help"]) == 0
    return out.getvalue()


def commands() -> dict[str, set[str]]:
    """Subcommand -> the options it is shown with, on any page (in blocks, and inside of backticks)."""
    found: dict[str, set[str]] = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        text = re.sub(r"\\\n\s*", " ", text)
        shown = [match["code"] for match in FENCE.finditer(text) if match["kind"] in ("", "console", "bash", "sh")]
        shown += re.findall(r"^ {4}((?:python -m hf_kvcache|hf-kvcache) .+)$", text, re.MULTILINE)
        shown += re.findall(r"(?<!`)`((?:python -m hf_kvcache|hf-kvcache) [^`]+)`", text)
        for match in COMMAND.finditer("\n".join(shown)):
            options = OPTION.findall(match["rest"].partition(" #")[0])
            found.setdefault(match["name"], set()).update(options)
    return found


@pytest.mark.parametrize("command", sorted(commands()))
def test_commands_have_the_options_they_are_shown_with(command: str) -> None:
    pytest.importorskip("typer", reason="pip install 'hf-kvcache[cli]' brings the command")
    text = help_of(command)
    missing = sorted(option for option in commands()[command] if not re.search(rf"(?<![\w-]){option}(?![\w-])", text))
    assert not missing, f"{command} --help does not know {', '.join(missing)}"


@pytest.mark.parametrize("name", NAMES)
def test_scripts_have_the_options_they_are_shown_with(name: str) -> None:
    text = re.sub(r"\\\n\s*", " ", (ROOT / name).read_text(encoding="utf-8"))
    for script, rest in SCRIPT.findall(text):
        file = ROOT / script
        code = file.read_text(encoding="utf-8")
        # Its own options may be added by a module beside it, or by the command of the same name.
        siblings = [file.parent / f"{name}.py" for name in re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE)]
        siblings += (ROOT / "hf_kvcache" / "bench").glob("*.py") if "hf_kvcache.bench" in code else []
        code += "".join(other.read_text(encoding="utf-8") for other in siblings if other.exists())
        for option in OPTION.findall(rest):
            assert f'"{option}"' in code, f"{name}: {script} has no {option}"


@pytest.mark.parametrize("name", NAMES)
def test_files_that_are_named_exist(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    named = re.findall(r"(?<![\w/.-])((?:tests|examples|docs|hf_kvcache|patches|requirements)/[\w/.-]+\.\w+)", text)
    missing = sorted({path for path in named if not (ROOT / path).exists()})
    assert not missing, f"{name} names {', '.join(missing)}"


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = page if not path else page.parent / path
        assert target.exists(), f"{name} links to {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target.read_text(encoding="utf-8")), f"{name} links to {link}"


def anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.replace("`", "")).strip().lower().replace(" ", "-") for title in titles}


def test_every_page_is_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = set(re.findall(r"^ *- (?:[^#\n]*: )?([\w/.-]+\.md)$", nav, re.MULTILINE))
    pages = {page.name for page in (ROOT / "docs").glob("*.md")}
    assert listed == pages, f"missing: {sorted(pages - listed)}, not there: {sorted(listed - pages)}"


def test_pictures_can_be_drawn_from_the_tables(tmp_path: Path) -> None:
    """Whoever changes a table that a picture is drawn from learns it here."""
    pytest.importorskip("matplotlib")
    found = importlib.util.spec_from_file_location("figures", ROOT / "docs" / "figures.py")
    assert found is not None and found.loader is not None
    figures = importlib.util.module_from_spec(found)
    found.loader.exec_module(figures)
    shown = {name for page in PAGES for name in re.findall(r"\(img/(\w+)\.png\)", page.read_text(encoding="utf-8"))}
    assert shown == set(figures.FIGURES)
    for name in figures.FIGURES:
        assert figures.draw(name, tmp_path).stat().st_size < 100_000
        assert (ROOT / "docs" / "img" / f"{name}.png").stat().st_size < 100_000
    with pytest.raises(ValueError, match="0 tables"):
        figures.table("measured.md", "no such head")


def test_the_docs_build_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="pip install 'hf-kvcache[docs]' builds the docs")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    made = tmp_path / "site"
    assert (made / "index.html").exists() and not (made / "figures.py").exists()
    for page in (made / "index.html", *made.glob("*/index.html")):
        sources = re.findall(
            r"<(?:script|link|img)\b[^>]*\b(?:src|href)=\"?(https?:[^\"\s>]+)", page.read_text("utf-8")
        )
        assert not sources, f"{page.parent.name} loads {sources} from elsewhere"
