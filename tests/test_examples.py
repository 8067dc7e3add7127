"""Every example in a short form; those of prefixes and of healing are run by the tests of their parts."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import example_tools as tools

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run(name: str, *arguments: Any) -> Any:
    """What `main` of an example returns."""
    return importlib.import_module(name).main([str(argument) for argument in arguments])


def test_every_example_is_in_the_page_about_them() -> None:
    page = (EXAMPLES.parent / "docs" / "examples.md").read_text(encoding="utf-8")
    for path in EXAMPLES.glob("*.py"):
        if "__main__" in path.read_text(encoding="utf-8"):
            assert f"examples/{path.name}" in page, f"docs/examples.md does not name {path.name}"


def test_long_document(capsys, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "kept.png"
    options = ("--tiny", "--context-tokens", 300, "--budget", 0.3, "--max-new-tokens", 3)
    results = run("long_document", *options, "--plot-kept", picture)
    assert set(tools.CACHES) < set(results)  # none was refused, and the store is there too
    full = results["DynamicCache (transformers)"]
    for lossless in ("KVCache", "CPUOffloadedCache", "PrefixStore over KVCache"):
        assert results[lossless]["answers"] == full["answers"], lossless
    for small in ("SlidingWindowCache", "SnapKVCache", "HeavyHitterCache"):
        assert results[small]["nbytes"] < 0.4 * full["nbytes"], small
    assert picture.exists()
    out = capsys.readouterr().out
    assert all(name in out for name in tools.CACHES) and "refused" not in out


def test_long_document_says_whether_an_answer_is_right(smollm2, capsys) -> None:
    results = run("long_document", "--context-tokens", 260, "--caches", "KVCache", "--max-new-tokens", 6)
    assert len(results["KVCache"]["right"]) == 3
    assert "3 of 3" in capsys.readouterr().out


def test_multi_turn_chat(capsys, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    options = ("--tiny", "--max-new-tokens", 4, "--say", "one " * 20, "two", "three", "--plot", tmp_path / "memory.png")
    plain = run("multi_turn_chat", *options, "--cache", "KVCache")
    stock = run("multi_turn_chat", *options, "--cache", "DynamicCache")
    assert [turn["answer"] for turn in plain] == [turn["answer"] for turn in stock]
    small = run("multi_turn_chat", *options, "--cache", "HeavyHitterCache", "--budget", 32)
    assert [turn["row"].seen for turn in small] == [turn["row"].seen for turn in plain]
    assert all(turn["row"].seen == turn["tokens"] - 1 for turn in small)
    assert [turn["row"].kept for turn in small] == [32, 32, 32]
    assert (tmp_path / "memory.png").exists()


def test_the_end_of_an_answer_is_given_once() -> None:
    chat = importlib.import_module("multi_turn_chat")

    class Tokenizer(tools.ByteTokenizer):
        chat_template = "yes"

        def apply_chat_template(self, messages, **_: Any) -> str:
            return "".join(f"<{m['role']}>{m['content']}|\n" for m in messages) + "<assistant>"

    tokenizer: Any = Tokenizer()
    nothing = torch.empty(1, 0, dtype=torch.long)
    first = chat.turn_ids(tokenizer, "hello", nothing)
    assert tokenizer.decode(first[0]) == "<user>hello|\n<assistant>"
    cut = torch.cat([first, tools.encode(tokenizer, "well")], dim=1)
    ended = torch.cat([cut, tools.encode(tokenizer, "|")], dim=1)
    assert tokenizer.decode(chat.turn_ids(tokenizer, "so", cut)[0]) == "|\n<user>so|\n<assistant>"
    assert tokenizer.decode(chat.turn_ids(tokenizer, "so", ended)[0]) == "\n<user>so|\n<assistant>"


def test_endless_stream(capsys, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    options = ("--tokens", 400, "--window", 60, "--piece", 16, "--every", 100, "--plot", tmp_path / "memory.png")
    results = run("endless_stream", "--tiny", *options)
    assert [result["row"].seen for result in results] == [112, 208, 304, 400]
    assert {result["row"].kept for result in results} == {64}
    assert len({result["row"].nbytes for result in results}) == 1  # flat
    assert results[-1]["row"].full_bytes > 3.5 * results[0]["row"].full_bytes
    assert (tmp_path / "memory.png").exists()


@pytest.mark.parametrize("beams", [1, 3])
def test_batch_and_beams(beams, capsys) -> None:
    options = ("--lengths", 20, 50, 90, "--budget", 40, "--max-new-tokens", 5, "--beams", beams)
    results = run("batch_and_beams", "--tiny", *options)
    assert len(results) == len(tools.CACHES)  # without the shared one, with the pool
    assert all(result["equal"] == 3 for result in results.values()), results
    assert "NO" not in capsys.readouterr().out


def test_draft_decoding(capsys) -> None:
    results = run("draft_decoding", "--tiny", "--max-new-tokens", 12)
    assert {row["cache"] for row in results} == {
        "DynamicCache (transformers)",
        "KVCache",
        "SnapKVCache",
        "QuantizedKIVICache, 4 bits",
    }
    for row in results:
        assert row["equal"] or row["cache"] == "SnapKVCache", row
        assert row["passes"] == row["new"] or row["way"] != "plain"
        assert row["accepted"] >= 0
    assert any(row["accepted"] > 0 for row in results if row["way"] == "draft model")
    assert any(row["accepted"] > 0 for row in results if row["way"] == "prompt lookup")


def test_a_draft_that_is_the_model_is_always_right(capsys) -> None:
    module = importlib.import_module("draft_decoding")
    model, _ = tools.tiny()
    same = module.without_layers(model, [])
    ids = torch.arange(30)[None]
    assert torch.equal(model(ids).logits, same(ids).logits)
    shorter = module.without_layers(model, [1])
    assert shorter.config.num_hidden_layers == len(shorter.model.layers) == 3
    assert [layer.self_attn.layer_idx for layer in shorter.model.layers] == [0, 1, 2]
    assert not torch.equal(model(ids).logits, shorter(ids).logits)


def test_mla_conversion(capsys, tmp_path: Path) -> None:
    options = ("--tiny", "--windows", 2, "--window-tokens", 96, "--held-out", 1, "--max-new-tokens", 3)
    results = run("mla_conversion", *options, "--keep", 0.5)
    before, after, packed = (results[name][1] for name in ("as it came", "converted", "converted, codec latent-4"))
    assert abs(results["report"].kept - 0.5) < 0.05
    assert after < before and packed <= after
    assert "50.0% of the cached bytes" in capsys.readouterr().out


@pytest.mark.parametrize("policy", ["frames", "window"])
@pytest.mark.parametrize("kind", ["qwen2_vl", "smolvlm"])
def test_video_frames(kind, policy, capsys) -> None:
    results = run("video_frames", "--kind", kind, "--policy", policy, "--max-new-tokens", 3)
    assert [row["frames"] for row in results] == [2, 4, 6, 8]
    for row in results:
        assert row["masked"] < 1e-4, row  # what is kept is where it was
    assert results[-1]["full"] > 0.1  # and something was forgotten
    assert results[-1]["kept"] < 0.7 * results[-1]["seen"]
    counts_tokens = results[-1]["position"] == results[-1]["seen"]
    assert counts_tokens == (kind == "smolvlm")


def test_video_frames_of_a_model_on_disk(tmp_path: Path, capsys) -> None:
    """The way of a model of the user's, with a real image processor and tokenizer, on a tiny one."""
    image = pytest.importorskip("PIL.Image")
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import AutoImageProcessor, PreTrainedTokenizerFast, Qwen2VLConfig, Qwen2VLForConditionalGeneration

    try:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil as Processor
    except ImportError:
        pytest.skip("this transformers has no image processor without torchvision")
    torch.manual_seed(0)
    words = {word: n for n, word in enumerate(["<pad>", "<image>", "<start>", "<end>", "<unk>", "User", "What", "?"])}
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", unk_token="<unk>").save_pretrained(tmp_path)
    Processor(patch_size=4, merge_size=2, min_pixels=64, max_pixels=1024).save_pretrained(tmp_path)
    try:
        AutoImageProcessor.from_pretrained(tmp_path)
    except ImportError as error:
        pytest.skip(f"older transformers want torchvision for that: {error}")
    rope = dict(rope_type="default", rope_theta=10000.0, mrope_section=[1, 1, 2])
    text = dict(vocab_size=8, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    text |= dict(num_key_value_heads=2, rope_parameters=rope, initializer_range=0.3)
    eyes = dict(depth=1, embed_dim=16, hidden_size=32, num_heads=2, patch_size=4, mlp_ratio=2)
    special = dict(image_token_id=1, video_token_id=0, vision_start_token_id=2, vision_end_token_id=3)
    Qwen2VLForConditionalGeneration(
        Qwen2VLConfig(text_config=text, vision_config=eyes, **special)
    ).save_pretrained(tmp_path)  # fmt: skip
    (tmp_path / "frames").mkdir()
    for n in range(5):
        picture = image.new("RGB", (32, 24), (20, 40, 60))
        picture.paste((250, 250, 0), (4 * n, 4, 4 * n + 8, 12))
        picture.save(tmp_path / "frames" / f"{n}.png")
    options = ("--images", tmp_path / "frames", "--keep", 2, "--ask-every", 1, "--max-new-tokens", 2, "--compare")
    results = run("video_frames", "--model", tmp_path, *options)
    assert len(results) == 5 and all(row["masked"] < 1e-4 for row in results)
    assert "after frame 5:" in capsys.readouterr().out


def test_offload_to_disk(smollm2, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("offload_to_disk")
    monkeypatch.setattr("sys.argv", ["offload_to_disk.py", "--tokens", "200", "--new", "3"])
    module.main()
    out = capsys.readouterr().out
    assert out.count("the same tokens as DynamicCache") == 3 and "files left when the caches are gone: 0" in out


def test_wrong_arguments_end_with_a_line_that_helps(capsys) -> None:
    for name, *arguments in (
        ("long_document", "--tiny", "--budget", 2),
        ("mla_conversion", "--tiny", "--keep", 0),
        ("video_frames", "--model", "somewhere"),
        ("draft_decoding", "--tiny", "--skip", 99),
    ):
        with pytest.raises(SystemExit) as error:
            run(name, *arguments)
        assert error.value.code == 2
        assert re.search(r"error: (--budget|--keep|--model|--skip)", capsys.readouterr().err), name
    with pytest.raises(SystemExit, match="unknown cache 'SnapVK'"):
        run("multi_turn_chat", "--tiny", "--cache", "SnapVK")
