"""Every cache on every causal-LM type of the installed transformers: equal, or refused in time, never wrong."""

from __future__ import annotations

import json

import pytest
import torch

from hf_kvcache import KVCache
from hf_kvcache.__main__ import main
from hf_kvcache.compat import run, shrink


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("model_type", shrink.causal_lm_types())
def test_no_cache_fails(model_type: str):
    results = run.run([model_type])
    assert [result.cache for result in results] == list(run.CASES)
    assert [result for result in results if result.status in run.BAD] == []
    assert all(result.reason for result in results if result.status == "refused")


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "deepseek_v3", "jamba"])
def test_eager_attention(model_type: str):
    assert [r for r in run.run([model_type], attn="eager") if r.status not in ("equal", "materialized")] == []


def test_types_that_must_not_be_lost():
    """The families that the library is for are served by every cache, and not by way of a refusal."""
    for model_type in ("llama", "qwen3", "gemma2", "gpt_oss", "mixtral", "phi3"):
        assert {result.status for result in run.run([model_type])} == {"equal"}, model_type


def test_a_wrong_cache_is_found(monkeypatch: pytest.MonkeyPatch):
    class Forgetful(KVCache):
        def update(self, key_states, value_states, layer_idx, *args, **kwargs):
            return super().update(key_states, value_states * 1.01, layer_idx, *args, **kwargs)

    monkeypatch.setitem(run.CASES, "Forgetful", run.Case(Forgetful))
    (result,) = run.run(["llama"], ["Forgetful"])
    assert result.status == "failed" and "logits differ" in result.reason


def test_a_budget_that_is_not_held_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(run.CASES, "Greedy", run.Case(KVCache, KVCache, budget=6))
    (result,) = run.run(["llama"], ["Greedy"])
    assert result.status == "failed" and "more than its budget of 6" in result.reason


def test_a_late_refusal_is_a_failure(monkeypatch: pytest.MonkeyPatch):
    from hf_kvcache.layer import KVLayer

    original = KVLayer.get_mask_sizes

    def refuse_later(self, query_length):
        if self.get_seq_length():
            # As if it came from this package: the traceback must end in one of its files.
            self.batch_repeat_interleave(0)
        return original(self, query_length)

    monkeypatch.setattr(KVLayer, "get_mask_sizes", refuse_later)
    (result,) = run.run(["llama"], ["KVCache"])
    assert result.status == "failed" and "only after" in result.reason


def test_the_command_writes_what_it_found(tmp_path, capsys: pytest.CaptureFixture[str]):
    page, data = tmp_path / "compat.md", tmp_path / "compat.json"
    options = ["compat", "--types", "llama,bloom", "--caches", "KVCache,SnapKVCache"]
    assert main([*options, "--markdown", str(page), "--json", str(data)]) == 0
    captured = capsys.readouterr()
    assert "SnapKVCache: 1 equal, 1 refused" in captured.out and "[2/2] bloom" in captured.err
    text = page.read_text()
    assert "| `llama` | equal | equal |" in text and "| `bloom` | materialized | refused |" in text
    assert "attention code of its own" in text
    results = json.loads(data.read_text())["results"]
    assert [(r["type"], r["status"]) for r in results][:2] == [("llama", "equal"), ("llama", "equal")]


def test_the_command_fails_when_something_failed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setitem(run.CASES, "Greedy", run.Case(KVCache, KVCache, budget=6))
    assert main(["compat", "--types", "llama", "--caches", "Greedy"]) == 1
    assert "failed: llama, Greedy" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv", [[], ["compat", "--types", "no_such_type"], ["compat", "--caches", "Nope"], ["compat", "--types", ""]]
)
def test_wrong_arguments_end_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    assert exit_.value.code == 2
    assert "error:" in capsys.readouterr().err
