"""Many questions about one long text: the text is read once.

python examples/prefix_questions.py --context-tokens 1500
python examples/prefix_questions.py --path /tmp/prefixes    # twice: the second time it is not read at all
python examples/prefix_questions.py --tiny                  # a model of random weights, for a test
"""

from __future__ import annotations

import argparse
import time
import warnings
from pydoc_data.topics import topics
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_kvcache import PrefixStore

QUESTIONS = [
    "What is this text about?",
    "Which statement assigns a name to an object?",
    "How does one write a literal string?",
    "What does a try statement do?",
]


def tiny() -> tuple[Any, Any]:
    """A small random model, and a tokenizer of bytes."""
    torch.manual_seed(0)
    sizes = dict(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=4096, **sizes)).eval()
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model, None


def encode(tokenizer: Any, text: str) -> torch.Tensor:
    if tokenizer is None:
        return torch.tensor([list(text.encode())])
    return tokenizer(text, return_tensors="pt").input_ids


def main(arguments: list[str] | None = None) -> PrefixStore:
    """Ask every question with and without the store, then all of them as one batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hub id or folder; the demo model if not given")
    parser.add_argument("--context-tokens", type=int, default=1000)
    parser.add_argument("--max-new-tokens", type=int, default=12)
    parser.add_argument("--path", help="a folder, or an fsspec URL, that keeps the text between runs")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", message="`past_key_values` is deprecated", category=FutureWarning)
    if args.tiny:
        model, tokenizer = tiny()
    else:
        from demo_model import load

        model, tokenizer, _ = load(args.model)
    text = encode(tokenizer, "\n".join(topics.values())[5000 : 5000 + 12 * args.context_tokens])
    text = text[:, : args.context_tokens]
    store = PrefixStore(max_bytes=1 << 32, path=args.path)
    store.warm(model, text)
    print(f"read {text.shape[1]} tokens once: {store.nbytes:,} bytes\n")

    settings = dict(max_new_tokens=args.max_new_tokens, do_sample=False)
    prompts = [torch.cat([text, encode(tokenizer, f"\n\nQuestion: {q}\nAnswer:")], dim=1) for q in QUESTIONS]
    for question, ids in zip(QUESTIONS, prompts, strict=True):
        began = time.perf_counter()
        plain = model.generate(ids, **settings)
        between = time.perf_counter()
        shared = store.generate(model, ids, **settings)
        ended = time.perf_counter()
        answer = shared[0, ids.shape[1] :].tolist()
        words = tokenizer.decode(answer).strip() if tokenizer is not None else answer
        same = "the same answer" if torch.equal(plain, shared) else "another answer"
        print(f"{question}\n  {words!r}")
        print(f"  {between - began:.2f} s without the store, {ended - between:.2f} s with it ({same})")

    # Rows of different lengths are padded on the left, as ever; the text is held once for all of them.
    width = max(ids.shape[1] for ids in prompts)
    batch = torch.full((len(prompts), width), model.generation_config.pad_token_id or 0)
    mask = torch.zeros_like(batch)
    for row, ids in enumerate(prompts):
        batch[row, width - ids.shape[1] :] = ids
        mask[row, width - ids.shape[1] :] = 1
    began = time.perf_counter()
    store.generate(model, {"input_ids": batch, "attention_mask": mask}, **settings)
    print(f"\nall {len(prompts)} at once: {time.perf_counter() - began:.2f} s")
    print(store)
    return store


if __name__ == "__main__":
    main()
