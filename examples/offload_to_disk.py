"""A prompt whose keys and values live in host memory and on disk: where the bytes are, and that the text is the same.

python examples/offload_to_disk.py
python examples/offload_to_disk.py --tokens 200 --new 8
"""

from __future__ import annotations

import argparse
import os
import tempfile

import torch
from transformers import DynamicCache

import demo_model
from hf_kvcache import CPUOffloadedCache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hub id or folder; the demo model if not given")
    parser.add_argument("--tokens", type=int, default=1500, help="tokens of the prompt")
    parser.add_argument("--new", type=int, default=24, help="tokens to generate")
    parser.add_argument("--resident", type=int, default=128, help="newest tokens that stay on the device")
    args = parser.parse_args()
    model, tokenizer, label = demo_model.load(args.model, torch.float32)
    text = " ".join(f"Room {n} is {('red', 'green', 'blue')[n % 3]}." for n in range(args.tokens))
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : args.tokens].to(model.device)
    arguments = dict(attention_mask=torch.ones_like(ids), max_new_tokens=args.new, do_sample=False, pad_token_id=0)
    expected = model.generate(ids, past_key_values=DynamicCache(config=model.config), **arguments)
    print(f"{label}: {args.tokens} tokens")
    with tempfile.TemporaryDirectory() as folder:
        ways = {
            "host memory, fetched": dict(attend="fetch"),
            "host memory, attended where it lies": dict(attend="compute"),
            "disk, fetched": dict(attend="fetch", disk=folder, host_bytes=0),
        }
        for name, way in ways.items():
            cache = CPUOffloadedCache(model, resident_length=args.resident, **way)
            same = torch.equal(model.generate(ids, past_key_values=cache, **arguments), expected)
            tiers = ", ".join(f"{tier} {size / 1e6:.2f} MB" for tier, size in cache.nbytes_by_tier().items())
            print(f"  {name}: {tiers}; {'the same tokens' if same else 'OTHER TOKENS'} as DynamicCache")
            del cache
        print(f"  files left when the caches are gone: {len(os.listdir(folder))}")
    print("  " + tokenizer.decode(expected[0, ids.shape[1] :]).strip().replace("\n", " "))


if __name__ == "__main__":
    main()
