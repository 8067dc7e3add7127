"""Fidelity of caches that quantize: the table of the README.

Windows start at character 5,000 + 30,000 * w of two texts; 1,024 tokens go through the cache in one call, then 64
tokens are fed one at a time, in float32. See `hf_kvcache.evaluate` for the figures. The same on a model of yours:
`python -m hf_kvcache eval --model ... --text topics docstrings`.

    python tests/bench/quantized.py
    python tests/bench/quantized.py --caches kivi:nbits=4 rotated:nbits=4 --json quantized.json --plot quantized.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from common import demo_model

from hf_kvcache.evaluate import TEXTS, evaluate, plot
from hf_kvcache.evaluate.report import headline, markdown, rows
from hf_kvcache.evaluate.run import show_progress
from hf_kvcache.specs import parse_spec

CACHES = [
    "kv",
    "float8",
    *(f"kivi:nbits={bits}" for bits in (8, 4, 3, 2)),
    *(f"kivi:nbits={bits},num_sink_tokens=4" for bits in (8, 4, 3, 2)),
    "kivi:key_bits=4,value_bits=2,num_sink_tokens=4",
    "kivi:key_bits=2,value_bits=4,num_sink_tokens=4",
    "kivi:key_bits=3,value_bits=2,num_sink_tokens=4",
    *(f"rotated:nbits={bits}" for bits in (4, 3, 2)),
    *(f"rotated:nbits={bits},levels=lloyd-max" for bits in (4, 3, 2)),
    "rotated:key_bits=4,value_bits=3",
    "rotated:key_bits=4,value_bits=2",
    "rotated:key_bits=3,value_bits=2",
    "rotated:key_bits=2,value_bits=4",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hub id or folder; the demo model if not given")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--windows", type=int, default=4, help="windows of each text")
    parser.add_argument("--needles", type=int, default=0, help="prompts with a planted code")
    parser.add_argument("--texts", nargs="+", choices=list(TEXTS), default=list(TEXTS))
    parser.add_argument("--caches", nargs="+", default=CACHES, help="specs, as of `python -m hf_kvcache eval`")
    parser.add_argument("--separate", action="store_true", help="a prompt pass for each cache (slow, same figures)")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    for spec in args.caches:
        parse_spec(spec).check(args.prompt)
    model, tokenizer, label = demo_model.load(args.model)
    texts = {name: TEXTS[name]() for name in args.texts}
    sizes = dict(prompt=args.prompt, tokens=args.tokens, windows=args.windows, needles=args.needles)
    with show_progress() as progress:
        shared = not args.separate
        result = evaluate(model, tokenizer, texts, args.caches, progress=progress, shared_prompt=shared, **sizes)
    result["model"]["name"] = label
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.plot:
        plot.pareto(result, args.plot)
    print(headline(result))
    print()
    print(markdown(rows(result)))


if __name__ == "__main__":
    main()
