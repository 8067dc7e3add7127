"""An endless stream in constant memory: sinks and a window, beside the same window without sinks.

    python examples/endless_stream.py
    python examples/endless_stream.py --tokens 20000 --window 1020 --plot memory.png
    python examples/endless_stream.py --model <a model of yours> --text notes.txt

Text goes through a `SlidingWindowCache` in small pieces. The bytes are the same after any number of tokens, and so is
the perplexity (StreamingLLM, arXiv 2309.17453); without the first tokens it breaks as soon as they leave the window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import example_tools as tools
from hf_kvcache import SlidingWindowCache
from hf_kvcache.evaluate.texts import read
from hf_kvcache.pictures import MemoryRecorder, plot_memory


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = tools.arguments_of(__doc__ or "")
    parser.add_argument("--tokens", type=int, default=3000, help="length of the stream (default: 3000)")
    parser.add_argument("--window", type=int, default=508, help="newest tokens that are kept (default: 508)")
    parser.add_argument("--sinks", type=int, default=4, help="first tokens that are kept (default: 4)")
    parser.add_argument("--piece", type=int, default=64, help="tokens fed at once (default: 64)")
    parser.add_argument("--every", type=int, default=500, help="tokens between two lines (default: 500)")
    parser.add_argument("--text", help="a file (default: the topics of pydoc)")
    parser.add_argument("--plot", metavar="PNG", help="draw the memory over the stream")
    args = parser.parse_args(arguments)
    model, tokenizer, label = tools.load(args)
    if args.text is None:
        ids = tools.text_ids(tokenizer, args.tokens + 1)
    else:
        ids = tools.encode(tokenizer, read(args.text))[:, : args.tokens + 1]
    ids = ids.to(model.device)
    ways = {
        f"{args.sinks} sinks + {args.window}": SlidingWindowCache(model, args.window, num_sink_tokens=args.sinks),
        f"{args.window + args.sinks} without sinks": SlidingWindowCache(
            model, args.window + args.sinks, num_sink_tokens=0
        ),
    }
    recorders = {name: MemoryRecorder(cache) for name, cache in ways.items()}
    nats = {name: [0.0] for name in ways}  # the sum since the last line
    results: list[dict[str, Any]] = []
    counted = 0
    length = ids.shape[1] - 1
    with tools.progress(length) as advance, torch.no_grad():
        for start in range(0, length, args.piece):
            piece = ids[:, start : min(start + args.piece, length)]
            following = ids[0, start + 1 : start + 1 + piece.shape[1]]
            for name, cache in ways.items():
                logits = model(piece, past_key_values=cache, use_cache=True).logits[0].float()
                nats[name][0] += float(nn.functional.cross_entropy(logits, following, reduction="sum"))
                recorders[name].record()
            counted += piece.shape[1]
            advance(piece.shape[1])
            end = start + piece.shape[1]
            if end // args.every > start // args.every or end == length:
                perplexities = {name: math.exp(total[0] / counted) for name, total in nats.items()}
                results.append(dict(row=recorders[next(iter(ways))].rows[-1], perplexities=perplexities))
                nats, counted = {name: [0.0] for name in ways}, 0
    print(f"{label}: a stream of {length:,} tokens, {args.piece} at a time\n")
    rows = []
    for result in results:
        row = result["row"]
        figures = [f"{value:.2f}" for value in result["perplexities"].values()]
        rows.append([f"{row.seen:,}", row.kept, f"{row.nbytes:,}", f"{row.full_bytes:,}", *figures])
    tools.show(["seen", "kept", "bytes held", "full cache", *(f"perplexity: {name}" for name in ways)], rows)
    if args.plot:
        plot_memory({name: recorder for name, recorder in list(recorders.items())[:1]}, args.plot)
    return results


if __name__ == "__main__":
    main()
