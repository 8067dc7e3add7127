"""KL and bytes of packed latents on a converted model: prompts of 1,024 tokens, then 48 fed one at a time, float32.

python tests/bench/latent_fidelity.py FOLDER    # of a model that convert_to_mla made
"""

from __future__ import annotations

import argparse

import torch
from common import forward, load_model, table, topics_text
from transformers import AutoModelForCausalLM

from hf_kvcache import KVCache, enable_absorb
from hf_kvcache.codecs import Latent

CODECS = {
    "latent-4": Latent(4),
    "latent-8": Latent(8),
    "rope_bits=7.0": Latent(4, rope_bits=7.0),
    "rope_bits=4": Latent(4, rope_bits=4),
}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--windows", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = load_model(None, torch.float32)[1]
    ids = tokenizer(topics_text(), return_tensors="pt").input_ids[0]
    model = AutoModelForCausalLM.from_pretrained(args.folder).eval()
    enable_absorb(model)
    found: dict[str, list[float]] = {name: [] for name in CODECS}
    for window in range(args.windows):
        text = ids[20000 * window + 3000 :][None, : 1024 + 48]
        logits = {}
        for name, codec in {"full": None, **CODECS}.items():
            cache = KVCache(model, codec=codec)
            forward(model, text[:, :1024], cache)
            steps = [forward(model, text[:, t : t + 1], cache)[:, -1] for t in range(1024, text.shape[1])]
            logits[name] = torch.cat(steps).float().log_softmax(-1)
        full = logits["full"]
        for name in CODECS:
            found[name].append(float((full.exp() * (full - logits[name])).sum(-1).mean()))
    model = model.bfloat16()
    numbers = sum(m.kv_lora_rank + m.dims.qk_rope_head_dim for m in model.modules() if hasattr(m, "kv_lora_rank"))
    rows = []
    for name, codec in CODECS.items():
        cache = KVCache(model, codec=codec)
        sizes = [cache.expected_bytes(model.config, 1, tokens) for tokens in (4096, 8192)]
        share = (sizes[1] - sizes[0]) / 4096 / (2 * numbers)
        rows.append({"codec": name, "KL": f"{sum(found[name]) / args.windows:.4f}", "bytes of a token": f"{share:.3f}"})
    print(table(rows))


if __name__ == "__main__":
    main()
