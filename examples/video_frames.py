"""A vision-language model watches a stream frame by frame, and its cache keeps the text and the newest frames.

    python examples/video_frames.py
    python examples/video_frames.py --kind smolvlm --frames 12 --keep 3
    python examples/video_frames.py --policy window
    python examples/video_frames.py --model Qwen/Qwen2.5-VL-3B-Instruct --images folder/ --ask "What changed?"

Each frame is fed once and its tokens lie in the cache; of the older frames nothing is left. `FrameWindow`, a policy of
thirty lines, drops whole frames and remembers what was said in between; `--policy window` does it with sinks and a
window of tokens instead (`SlidingWindowCache`, which then forgets old text too).

Qwen2-VL counts positions over images on a grid (M-RoPE): a frame of 3 x 4 tokens advances them by 4, not by 12. Here
they are computed piece by piece and continue where the last piece ended, so they are those of one pass over everything.
The last columns of the table hold the answers' logits against two other streams: of a full cache whose dropped tokens
are masked (no difference: nothing that is kept has moved), and of a full cache (what forgetting changes).

Without `--model` it is a tiny model of random weights, so its answers mean nothing. With one: Qwen2-VL and its
relatives (models whose images come with a grid), and `--images`, a folder of frames in the order of their names (needs
pillow).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DynamicCache,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

import example_tools as tools
from hf_kvcache import KVCache, SlidingWindowCache
from hf_kvcache.pictures import full_bytes, kept_rows
from hf_kvcache.policies import LayerPolicy, Policy
from hf_kvcache.policies.base import Keep, Step, select

IMAGE, START, END = 60, 61, 62  # tokens of the tiny models
MARK = "@@@"


class FrameWindow(Policy):
    """Keep all text and the last `frames` frames; `note` says which tokens are a frame. Lossy."""

    name = "newest frames"
    drops = needs_model = True

    def __init__(self, frames: int) -> None:
        if frames < 1:
            raise ValueError(f"`frames` must be at least 1, got {frames}")
        self.frames = frames
        self.spans: list[tuple[int, int]] = []  # first token and the one after the last, of each frame so far

    def note(self, start: int, stop: int) -> None:
        """The tokens from `start` to `stop`, which are given next, are a frame."""
        self.spans.append((start, stop))

    def for_layer(self, layer: int, layers: int, window: int | None) -> LayerPolicy:
        return FrameWindowLayer(self)


class FrameWindowLayer(LayerPolicy):
    drops = True

    def __init__(self, policy: FrameWindow) -> None:
        self.policy = policy

    def keep(self, step: Step) -> Keep | None:
        positions = step.rows.positions  # [B, 1, N], counted in tokens
        wanted = step.valid()
        for start, stop in self.policy.spans[: -self.policy.frames]:
            wanted = wanted & ~((positions >= start) & (positions < stop))
        count = int(wanted.sum(-1).max())
        if count == positions.shape[-1]:
            return None
        return select(torch.where(wanted, positions.double(), float("-inf")), count)


class Stream:
    """Feeds pieces of text and single frames to a model through a cache.

    Positions continue from piece to piece: those of text count tokens, those of a frame are what the model gives it.
    """

    def __init__(self, model: Any, cache: Any, policy: FrameWindow | None = None) -> None:
        self.model, self.cache, self.policy = model, cache, policy
        self.position = 0  # of the next token, as the model counts
        self.mask: torch.Tensor | None = None  # [1, seen] where a stock cache shall not see everything

    def positions(self, ids: torch.Tensor, grid: torch.Tensor | None) -> torch.Tensor:
        """`[1, T]`, or `[3, 1, T]` (time, height, width) for models with M-RoPE."""
        inner = self.model.model
        plain = torch.arange(ids.shape[1], device=ids.device)[None]
        if not hasattr(inner, "get_rope_index"):
            return self.position + plain
        if grid is None:
            return self.position + plain.expand(3, 1, -1)
        kinds = (ids == self.model.config.image_token_id).int()
        return self.position + inner.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=grid)[0]

    @torch.no_grad()
    def feed(self, ids: torch.Tensor, **frame: torch.Tensor) -> torch.Tensor:
        """The logits `[1, vocabulary]` after `ids [1, T]`; `frame` is what the model takes for an image."""
        seen = int(self.cache.get_seq_length())
        if frame and self.policy is not None:
            self.policy.note(seen, seen + ids.shape[1])
        positions = self.positions(ids, frame.get("image_grid_thw"))
        self.position = int(positions.max()) + 1
        extra = {} if self.mask is None else {"attention_mask": torch.cat([self.mask, torch.ones_like(ids)], dim=1)}
        output = self.model(input_ids=ids, position_ids=positions, past_key_values=self.cache, **extra, **frame)
        return output.logits[:, -1].float()


class Watcher:
    """A stream, and where asked for two others to compare it with, which are fed the same in step."""

    def __init__(self, model: Any, cache: Any, policy: FrameWindow | None, compare: bool) -> None:
        self.ours = Stream(model, cache, policy)
        self.others = {n: Stream(model, DynamicCache(config=model.config)) for n in ("masked", "full") if compare}

    def feed(self, ids: torch.Tensor, **frame: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        """Logits `[1, vocabulary]`, and how far those of the other streams are from them."""
        for name, stream in self.others.items():
            if name == "masked":  # what the cache has dropped by now
                kept = self.ours.cache.kept_positions(0).flatten().long()
                stream.mask = ids.new_zeros(1, int(self.ours.cache.get_seq_length()))
                stream.mask[0, kept[kept >= 0]] = 1
        logits = self.ours.feed(ids, **frame)
        others = {name: stream.feed(ids, **frame) for name, stream in self.others.items()}
        return logits, {name: float((other - logits).abs().max()) for name, other in others.items()}

    def answer(self, question: torch.Tensor, count: int) -> tuple[torch.Tensor, dict[str, float]]:
        """Greedy tokens `[count]` after a question, and the largest distances of their logits."""
        logits, furthest = self.feed(question)
        tokens = [logits.argmax(-1)]
        while len(tokens) < count:
            logits, far = self.feed(tokens[-1][:, None])
            tokens.append(logits.argmax(-1))
            furthest = {name: max(value, far[name]) for name, value in furthest.items()}
        self.feed(tokens[-1][:, None])  # the conversation goes on after it
        return torch.cat(tokens), furthest


class TinyScene:
    """A random model of one of two kinds, and frames of noise."""

    def __init__(self, kind: str, frames: int, device: str) -> None:
        torch.manual_seed(0)
        self.count, self.device = frames, device
        self.label = f"a tiny {kind} of random weights"
        sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
        text: dict[str, Any] = sizes | dict(num_key_value_heads=2, initializer_range=0.3, pad_token_id=0)
        special = dict(image_token_id=IMAGE)
        if kind == "qwen2_vl":
            rope = dict(rope_type="default", rope_theta=10000.0, mrope_section=[1, 1, 2])
            eyes = dict(depth=1, embed_dim=16, hidden_size=32, num_heads=2, patch_size=4, mlp_ratio=2)
            special |= dict(video_token_id=59, vision_start_token_id=START, vision_end_token_id=END)
            config: Any = Qwen2VLConfig(text_config=text | {"rope_parameters": rope}, vision_config=eyes, **special)
            self.model: Any = Qwen2VLForConditionalGeneration(config)
            # Patches of 4 x 4 x 2 x 3 numbers, 2 x 2 of them a token: 3 x 4 tokens.
            self.tokens, shape = 12, (48, 96)
            self.extra = {"image_grid_thw": torch.tensor([[1, 6, 8]], device=device)}
        else:
            eyes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
            eyes |= dict(image_size=32, patch_size=8)
            text |= dict(model_type="llama")
            self.model = SmolVLMForConditionalGeneration(
                SmolVLMConfig(text_config=text, vision_config=eyes, scale_factor=2, **special)
            )
            self.tokens, shape = 4, (1, 1, 3, 32, 32)  # 4 x 4 patches, 2 x 2 of them a token
            self.extra = {}
        self.model = self.model.eval().to(device)
        generator = torch.Generator().manual_seed(1)
        self.pixels = [torch.randn(shape, generator=generator).to(device) for _ in range(frames)]

    def words(self, count: int, start: int) -> torch.Tensor:
        return (torch.arange(count, device=self.device) * 7 + start)[None] % 58

    def opening(self) -> torch.Tensor:
        return self.words(6, 1)

    def question(self, text: str) -> torch.Tensor:
        return self.words(1 + len(text.split()), len(text))

    def frames(self) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        ids = torch.tensor([[START, *[IMAGE] * self.tokens, END]], device=self.device)
        for pixels in self.pixels:
            yield ids, self.extra | {"pixel_values": pixels}

    def text(self, tokens: torch.Tensor) -> str:
        return " ".join(map(str, tokens.tolist()))


class RealScene:
    """A model of the user's whose images come with a grid (Qwen2-VL and its relatives), and a folder of frames."""

    def __init__(self, name: str, folder: Path, frames: int, device: str) -> None:
        from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(name)
        self.processor = AutoImageProcessor.from_pretrained(name)
        self.model = AutoModelForImageTextToText.from_pretrained(name, dtype="auto").eval().to(device)
        if not hasattr(self.model.model, "get_rope_index"):
            raise SystemExit(f"{type(self.model).__name__} gives its images no grid: take one like Qwen2-VL")
        self.paths = sorted(path for path in folder.iterdir() if path.is_file())[:frames]
        if not self.paths:
            raise SystemExit(f"{folder} holds no frames")
        self.label, self.device = name, device
        if not self.tokenizer.chat_template:
            self.before, self.after = "User: ", "\nAssistant:"
        else:
            said = [{"role": "user", "content": MARK}]
            whole = self.tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
            self.before, _, self.after = whole.partition(MARK)

    def opening(self) -> torch.Tensor:
        return tools.encode(self.tokenizer, self.before, self.device)

    def question(self, text: str) -> torch.Tensor:
        return tools.encode(self.tokenizer, f"\n{text}{self.after}", self.device)

    def frames(self) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        from PIL import Image

        config = self.model.config
        for path in self.paths:
            made = self.processor(images=[Image.open(path).convert("RGB")], return_tensors="pt").to(self.device)
            count = int(made["image_grid_thw"].prod()) // config.vision_config.spatial_merge_size**2
            ids = [config.vision_start_token_id, *[config.image_token_id] * count, config.vision_end_token_id]
            yield torch.tensor([ids], device=self.device), dict(made)

    def text(self, tokens: torch.Tensor) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = tools.arguments_of(__doc__ or "")
    parser.add_argument("--kind", choices=["qwen2_vl", "smolvlm"], default="qwen2_vl", help="the tiny model")
    parser.add_argument("--frames", type=int, default=8, help="frames to watch (default: 8)")
    parser.add_argument("--keep", type=int, default=3, help="frames that are kept (default: 3)")
    parser.add_argument("--policy", choices=["frames", "window"], default="frames")
    parser.add_argument("--ask", default="What do you see?")
    parser.add_argument("--ask-every", type=int, default=2, help="frames between two questions (default: 2)")
    parser.add_argument("--max-new-tokens", type=int, default=6)
    parser.add_argument("--images", type=Path, metavar="FOLDER", help="frames for --model")
    parser.add_argument("--compare", action="store_true", help="with --model: compare too (three times the work)")
    args = parser.parse_args(arguments)
    tools.be_quiet()
    scene: TinyScene | RealScene
    if args.model is None:
        scene = TinyScene(args.kind, args.frames, args.device)
    elif args.images is None:
        parser.error("--model needs --images, a folder of frames")
    else:
        scene = RealScene(args.model, args.images, args.frames, args.device)
    opening = scene.opening()
    policy = FrameWindow(args.keep) if args.policy == "frames" else None
    watcher: Watcher | None = None
    results: list[dict[str, Any]] = []
    with tools.progress(args.frames) as advance:
        for number, (ids, frame) in enumerate(scene.frames(), start=1):
            if watcher is None:
                if policy is not None:
                    cache: KVCache = KVCache(scene.model, policy=policy)
                else:
                    window, sinks = args.keep * ids.shape[1], opening.shape[1]
                    cache = SlidingWindowCache(scene.model, window, num_sink_tokens=sinks, move_sinks=False)
                watcher = Watcher(scene.model, cache, policy, args.model is None or args.compare)
                watcher.feed(opening)
            watcher.feed(ids, **frame)
            advance()
            if number % args.ask_every == 0:
                held, kept = cache.nbytes, kept_rows(cache)
                seen, position = cache.get_seq_length(), watcher.ours.position
                full = full_bytes(cache)
                tokens, far = watcher.answer(scene.question(args.ask), args.max_new_tokens)
                results.append(
                    dict(frames=number, seen=seen, position=position, kept=kept, nbytes=held, full_bytes=full)
                    | far
                    | dict(answer=scene.text(tokens))
                )
    print(f"{scene.label}: frames of {ids.shape[1]} tokens, the last {args.keep} kept (--policy {args.policy})\n")
    rows = [
        [row["frames"], row["seen"], row["position"], row["kept"], f"{row['nbytes']:,}", f"{row['full_bytes']:,}"]
        + [f"{row[name]:.1e}" for name in (watcher.others if watcher else ())]
        for row in results
    ]
    head = ["after frame", "tokens", "position", "kept", "bytes held", "full cache"]
    tools.show([*head, *(f"to {name}" for name in (watcher.others if watcher else ()))], rows)
    if args.model is not None:
        print()
        for row in results:
            print(f"after frame {row['frames']}: {tools.shorten(row['answer'], 100)}")
    return results


if __name__ == "__main__":
    main()
