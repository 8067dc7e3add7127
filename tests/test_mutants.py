"""Known ways to get a cache wrong, each written into a copy of the library: the directed tests must fail on it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# name -> (file, what stands there, what the mutant has instead, the test that must fail)
MUTANTS = {
    "evict before returning": (
        "layer.py",
        "        if written:\n            self.segments.append(rows)\n",
        "        if written:\n"
        "            if self.policy.drops and held > 7:\n"
        "                self.segments.replace(self.segments.rows.map(lambda t: t[:, :, 1:].clone()), 1)\n"
        "                held = self.segments.length\n"
        "            self.segments.append(rows)\n",
        "test_prompt_then_decode",
    ),
    "physical length reported": (
        "layer.py",
        "    def get_seq_length(self) -> int:\n        return self._seen\n",
        "    def get_seq_length(self) -> int:\n        return self.segments.length\n",
        "test_prompt_then_decode",
    ),
    "padding ignored": (
        "layer.py",
        "        if real is None:\n            return\n        self._has_empty = True\n",
        "        return\n",
        "test_prompt_then_decode",
    ),
    "scores of one query head, not of the group": (
        "ops/column_sums/reference.py",
        "probs.mean(dim=2)",
        "probs[:, :, 0]",
        "test_prompt_then_decode",
    ),
    "crop off by one": (
        "layer.py",
        "        self.segments.crop(n, self._seen - n)\n        self._seen -= n\n",
        "        self.segments.crop(n - 1, self._seen - n)\n        self._seen -= n\n",
        "test_crop_without_recording_is_exact_or_refused",
    ),
    "reorder of keys only": (
        "segments/dense.py",
        "        if self._table is not None:\n            self._table = self._table.map(fn)\n",
        "        if self._table is not None:\n            self._table.keys = fn(self._table.keys)\n",
        "test_beams",
    ),
    "stale scores after overwrite": (
        "segments/dense.py",
        "        for tensor in self._table.tensors().values():\n            wide = slot",
        "        for name, tensor in self._table.tensors().items():\n"
        "            if name == 'scores':\n"
        "                continue\n"
        "            wide = slot",
        "test_prompt_then_decode",
    ),
    "rollback forgets the draft's scores": (
        "layer.py",
        "            self._remove(n)\n            if step.new > n:\n",
        "            self._remove(n)\n            if False:\n",
        "test_drafts_are_rolled_back",
    ),
    "sinks are not moved": (
        "policies/window.py",
        "        if self.rotation is None or not sinks or rows.length < sinks:\n",
        "        if True:\n",
        "test_prompt_then_decode",
    ),
}
CODEC_MUTANTS = {
    "the exact window is one short": (
        "cache.py",
        "    made = codec.for_layer(layer, layers, key_dim, value_dim)\n",
        "    made = codec.for_layer(layer, layers, key_dim, value_dim)\n"
        "    made = replace(made, residual_length=max(0, made.residual_length - 1))\n",
        "test_both_ends_are_exact and kivi4",
    ),
    "blocks of a padded row begin at its padding": (
        "segments/packed.py",
        "            live = (rows.positions[:, 0] != EMPTY).sum(-1).tolist()\n            order",
        "            live = [n] * batch\n            order",
        "test_a_padded_row_is_written and kivi4",
    ),
    "a block is coded from decoded rows": (
        "segments/packed.py",
        "        stop = start + count\n        keys = rows.keys[:, :, start:stop].float()\n",
        "        stop = start + count\n        keys = rows.keys[:, :, start:stop].float().round(decimals=1)\n",
        "test_packed_rows_are and kivi4-llama-sdpa-1",
    ),
    "reorder of codes, not of scales": (
        "segments/side.py",
        "self.packed = Packed(fn(codes), fn(scale), None if zero is None else fn(zero))",
        "self.packed = Packed(fn(codes), scale[: fn(codes).shape[0]], zero)",
        "test_batch_operations and rotated3",
    ),
    "a half-filled tile is overwritten": (
        "segments/side.py",
        "self.packed.codes[(*index, first)] |= new.codes",
        "self.packed.codes[(*index, first)] = new.codes",
        "test_packed_rows_are and kivi4-llama-sdpa-1",
    ),
    "a draft sees its block exact": (
        "attention.py",
        "    cuts = store.due(new) if draft and query.shape[0] == 1 and not layer.has_empty else []\n",
        "    cuts = []\n",
        "test_a_draft_that_crosses and kivi4",
    ),
    "the turn of values is not undone": (
        "ops/decode_attention/dispatch.py",
        "output = torch.matmul(output, packed.value_turn.float().transpose(-1, -2))",
        "output = torch.matmul(output, packed.value_turn.float())",
        "test_packed_rows_are and rotated3-llama-sdpa-1",
    ),
}
SHARING_MUTANTS = {
    "a source drops before its followers have read": (
        "layer.py",
        "        return self.pending.readers >= 0\n",
        "        return False\n",
        "test_what_is_dropped and h2o-pairs-sdpa",
    ),
    "only the source decides what is dropped": (
        "layer.py",
        "step = join(pending.step, step) if self.policy.needs_queries else pending.step",
        "step = pending.step",
        "test_what_is_dropped and h2o-pairs-sdpa",
    ),
    "a follower reads the keys that the model computed for it": (
        "sharing/follower.py",
        "        return source.handles(pending)\n",
        "        return key_states, value_states\n",
        "test_logits_of_a_model and llama-sdpa-3",
    ),
    "a follower counts tokens it has not been given": (
        "sharing/follower.py",
        "        return self.source.get_seq_length() if pending is None else pending.start\n",
        "        return self.source.get_seq_length()\n",
        "test_a_follower_without_its_source",
    ),
}
# On a model with absorbed attention.
ABSORB_MUTANTS = {
    "the rotary part is left out": (
        "ops/latent_attention/cpu.py",
        "    s = s + _product(q_rope.flatten(1, 2), rope.transpose(1, 2))\n",
        "",
        "test_absorbed_equals_expanded and minicpm3 and eager",
    ),
    "values come from the half of the keys": (
        "mla/weights.py",
        "self.weight[:, self.key_size :].transpose(1, 2))",
        "self.weight[:, : -self.key_size].transpose(1, 2))",
        "test_absorbed_equals_expanded and minicpm3 and eager",
    ),
    "moved sinks are not attended to": (
        "mla/attention.py",
        "    if moved is not None:\n        which, sinks = moved\n        first",
        "    if False:\n        which, sinks = moved\n        first",
        "test_policies_choose_alike and SlidingWindow",
    ),
    "scores of latents alone": (
        "policies/base.py",
        "return torch.cat([self.rows.keys, self.rows.values], dim=-1)",
        "return torch.cat([self.rows.keys, self.rows.values * 0], dim=-1)",
        "test_policies_choose_alike and SnapKV and always",
    ),
}
PAGED_MUTANTS = {
    "a shared block is written in place": (
        "paging/arena.py",
        "        return ~stays\n",
        "        return stays & ~stays\n",
        "test_a_fork_and_its_origin",
    ),
    "a copy of the table counts no references": (
        "segments/paged.py",
        "                mine.arena.hold(mine.ids)\n",
        "",
        "test_forks_and_batch_operations",
    ),
    "blocks without a row are kept": (
        "segments/paged.py",
        "                table.arena.release(table.ids[:, keep:])\n"
        "            table.ids = table.ids[:, :keep].copy()\n",
        "                pass\n",
        "test_rolled_back_blocks",
    ),
    "queries of beams are taken apart in the wrong order": (
        "paging/attend.py",
        "    return x.view(groups, heads, fold, m // fold, n)",
        "    return x.view(groups, heads, m // fold, fold, n).transpose(2, 3)",
        "test_attention_over_blocks and shared",
    ),
    "rows of a run are read from the wrong block": (
        "paging/arena.py",
        "        return buffer.as_strided(shape, strides, base * row)\n",
        "        return buffer.as_strided(shape, strides, 0)\n",
        "test_attention_over_blocks and rows",
    ),
    "garbage is given back in the middle of an operation": (
        "paging/pool.py",
        "weakref.finalize(owner, self._gone.append, table)",
        "weakref.finalize(owner, table.drop)",
        "test_garbage_collected",
    ),
}
# Of shared prefixes.
PREFIX_MUTANTS = {
    "queries of a batch mixed up over a shared row": (
        "attention.py",
        "    folded = query.transpose(0, 1).reshape(1, heads, rows * new, dim)\n",
        "    folded = query.reshape(1, heads, rows * new, dim)\n",
        "test_shared_rows_equal_copies and None-full-sdpa",
    ),
    "later rows are packed around another mean": (
        "segments/sealed.py",
        "            self.mean = self.mean.clone()\n",
        "            self.mean = None\n",
        "test_shared_rows_equal_copies and rotated3-full-sdpa",
    ),
    "later rows are packed with scales of another base": (
        "segments/sealed.py",
        "            if mine is not None and mine.base is not None and older:\n",
        "            if False:\n",
        "test_shared_rows_equal_copies and rotated3-full-sdpa",
    ),
    "the second half of a run begins where the first did": (
        "prefix/tree.py",
        "node.tokens, node.start, node.parent = node.tokens[length:], node.start + length, upper",
        "node.tokens, node.start, node.parent = node.tokens[length:], node.start, upper",
        "test_later_questions and llama-sdpa or test_get_never",
    ),
    "images are not part of the key": (
        "prefix/keys.py",
        "{name: content_hash(content[name]) for name in sorted(content)}",
        "sorted(content)",
        "test_equal_placeholders",
    ),
    "adapters are known by a sample": (
        "prefix/keys.py",
        '"adapters": adapters_of(model),',
        '"adapters": None,',
        "test_adapters",
    ),
    "checksums of rows are not looked at": (
        "prefix/files.py",
        "        if _sha256(tensor) != sums[key]:\n",
        "        if False:\n",
        "test_a_damaged_file and plain-flip",
    ),
    "an evicted run is freed only in part": (
        "prefix/tree.py",
        "        self._compact(block)\n\n    def filed",
        "\n    def filed",
        "test_a_part_of_a_run",
    ),
}


PREFIX_TESTS = ("test_prefix.py", "test_prefix_files.py", "test_storage.py", "test_hybrid.py")
OFFLOAD_MUTANTS = {
    "pages that changed after they were prefetched": (
        "offload/transfer.py",
        "owner is store and self.away == owner.away_version",
        "owner is store",
        "test_the_next_layer_is_there",
    ),
    "the newest rows are not copied behind the pages": (
        "offload/transfer.py",
        "        if slot.version != store.version:\n",
        "        if slot.version == -1:\n",
        "test_hybrid_models",
    ),
    "a page with the rows of another beam": (
        "offload/host.py",
        "rows = index if self.rows is None else tuple(self.rows[i] for i in index)\n        twin = self.part",
        "rows = index\n        twin = self.part",
        "test_operations_equal and twice and host and None",
    ),
    "a third staging buffer": (
        "offload/transfer.py",
        "            self.buffer = None  # before its successor is there: two buffers, never three\n",
        "            self.old = self.buffer\n",
        "test_two_layers_of_staging",
    ),
    "packed pages shifted by those on disk": (
        "segments/offloaded_packed.py",
        "super().write(part, slot - self.gone, new, first_rows)",
        "super().write(part, slot, new, first_rows)",
        "test_packed_pages and disk",
    ),
}
CATCHING = "tests/test_directed.py"
# Which tests know of a mutant's subject, where those above do not.
CATCHING_OF = {
    **dict.fromkeys([n for n, m in PREFIX_MUTANTS.items() if m[0].startswith("prefix/")], "tests/test_prefix.py"),
    **dict.fromkeys(
        [n for n, m in PREFIX_MUTANTS.items() if m[0] in ("attention.py", "segments/sealed.py")],
        "tests/contract/test_shared_rows.py",
    ),
    "checksums of rows are not looked at": "tests/test_prefix_files.py",
    **dict.fromkeys(CODEC_MUTANTS, "tests/contract/test_codecs.py"),
    **dict.fromkeys(SHARING_MUTANTS, "tests/contract/test_sharing.py"),
    **dict.fromkeys(ABSORB_MUTANTS, "tests/test_absorb.py"),
    **dict.fromkeys(PAGED_MUTANTS, "tests/test_paging.py"),
    **dict.fromkeys(OFFLOAD_MUTANTS, "tests/test_offload.py"),
}
EVERY = {
    **MUTANTS,
    **CODEC_MUTANTS,
    **SHARING_MUTANTS,
    **ABSORB_MUTANTS,
    **PAGED_MUTANTS,
    **PREFIX_MUTANTS,
    **OFFLOAD_MUTANTS,
}


def run_tests(folder: Path, test: str, file: str = CATCHING) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        file,
        "-k",
        test,
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mutants")
    shutil.copytree(ROOT / "hf_kvcache", folder / "hf_kvcache", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "patches", folder / "patches", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "tests").mkdir()
    names = ("test_directed.py", "test_state_machine.py", "test_absorb.py", "test_paging.py", "test_offload.py")
    for name in (*names, *PREFIX_TESTS):
        shutil.copy(ROOT / "tests" / name, folder / "tests" / name)
    shutil.copytree(ROOT / "tests" / "contract", folder / "tests" / "contract")
    return folder


def test_the_copy_passes(tree: Path) -> None:
    result = run_tests(tree, "test")
    assert result.returncode == 0, result.stdout[-2000:]


# Shown only where a thread was as fast as it mostly is: a busy machine may need another run.
TIMED = {"the newest rows are not copied behind the pages"}


@pytest.mark.parametrize("name", EVERY)
def test_mutant_is_caught(tree: Path, name: str) -> None:
    file, old, new, test = EVERY[name]
    path = tree / "hf_kvcache" / file
    source = path.read_text()
    assert source.count(old) == 1, f"{file} no longer holds the text that this mutant changes"
    path.write_text(source.replace(old, new))
    try:
        for _ in range(5 if name in TIMED else 1):
            result = run_tests(tree, test, CATCHING_OF.get(name, CATCHING))
            if result.returncode:
                break
    finally:
        path.write_text(source)
    assert result.returncode == 1, f"the mutant survived: {result.stdout[-500:]}{result.stderr[-500:]}"
    assert "failed" in result.stdout
