"""Random sequences of operations, applied to a cache and to a dense oracle; attention outputs must agree.

The oracle keeps every batch row and KV head as a plain list of tokens in float64 and follows the definition of each
technique one query at a time. It shares no code with the library.
"""

from __future__ import annotations

import copy
import math
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from transformers import LlamaConfig, LlamaForCausalLM

from hf_kvcache import BlockPool, HeavyHitterCache, KVCache, SlidingWindowCache, SnapKVCache
from hf_kvcache.attention import attention_forward

HEADS, GROUP, DIM, SCALE = 2, 2, 8, 0.5
CONFIG = dict(
    vocab_size=32,
    hidden_size=HEADS * GROUP * DIM,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=HEADS * GROUP,
    num_key_value_heads=HEADS,
    max_position_embeddings=512,
)


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**CONFIG)).eval()


MODEL = model()
POOL = BlockPool(2)


@dataclass
class Token:
    position: int
    key: torch.Tensor
    value: torch.Tensor
    score: float = 0.0


@dataclass
class Row:
    """One batch row: its padding and, for each KV head, the tokens held."""

    padding: int = 0
    heads: list[list[Token]] = field(default_factory=lambda: [[] for _ in range(HEADS)])


def rotate(key: torch.Tensor, distance: int) -> torch.Tensor:
    half = DIM // 2
    angle = torch.tensor([distance * 10000.0 ** (-2 * i / DIM) for i in range(half)], dtype=torch.float64)
    a, b = key[:half], key[half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()])


class Oracle:
    """A technique by its definition. `kind` is one of identity, window, h2o, snapkv."""

    def __init__(self, kind: str, **sizes: int) -> None:
        self.kind, self.sizes = kind, sizes
        self.rows: list[Row] = []
        self.seen = 0

    def keys_seen(self, tokens: list[Token], held: int, start: int) -> list[torch.Tensor]:
        keys = [t.key for t in tokens]
        if self.kind == "window" and held and self.sizes.get("dropped"):
            sinks = min(self.sizes["sinks"], held)
            gap = max(0, start - self.sizes["window"] - max(t.position for t in tokens[:sinks]) - 1) if sinks else 0
            keys = [rotate(k, gap) if i < sinks else k for i, k in enumerate(keys)]
        return keys

    def step(self, q, k, v, real, prompt: bool) -> torch.Tensor:
        """Output `[B, Hq, n, D]` of a block, then drop. Padding queries give zeros."""
        batch, n = q.shape[0], q.shape[2]
        out = torch.zeros_like(q)
        start = self.seen
        for b in range(batch):
            row = self.rows[b]
            row.padding += sum(1 for i in range(n) if not real[b][i])
            work = []
            for h in range(HEADS):
                held = list(row.heads[h])
                new = [Token(start + i, k[b, h, i], v[b, h, i]) for i in range(n)]
                probabilities = []
                for i in range(n):
                    if not real[b][i]:
                        probabilities.append(None)
                        continue
                    sees = held + [t for j, t in enumerate(new[: i + 1]) if real[b][j]]
                    keys = torch.stack(self.keys_seen(sees, len(held), start))
                    values = torch.stack([t.value for t in sees])
                    p = []
                    for g in range(GROUP):
                        weight = torch.softmax(keys @ q[b, h * GROUP + g, i] * SCALE, dim=0)
                        out[b, h * GROUP + g, i] = weight @ values
                        p.append(weight)
                    probabilities.append((sees, torch.stack(p).mean(0)))
                new = [t for j, t in enumerate(new) if real[b][j]]
                work.append((held, new, probabilities))
            if "floor" in self.sizes:
                row.heads = self.drop_across_heads(work, start + n, prompt)
            else:
                row.heads = [self.drop(*parts, start + n, prompt) for parts in work]
        self.seen += n
        return out

    def drop(self, held, new, probabilities, end, prompt) -> list[Token]:
        s, tokens = self.sizes, held + new
        if self.kind == "identity":
            return tokens
        if self.kind == "window":
            kept = tokens[: s["sinks"]] + tokens[s["sinks"] :][-s["window"] :]
            return kept
        if self.kind == "h2o":
            for entry in probabilities:
                if entry is not None:
                    for token, p in zip(*entry, strict=True):
                        token.score += float(p)
            old = [t for t in tokens if t.position < end - s["recent"]]
            recent = [t for t in tokens if t.position >= end - s["recent"]]
            room = s["heavy"] + s["recent"] - len(recent)
            mean = s.get("mean")
            best = sorted(old, key=lambda t: -t.score / (end - t.position if mean else 1))[:room]
            return sorted(best, key=lambda t: t.position) + recent
        # snapkv
        limit = s["capacity"] if prompt else (s["capacity"] + s["decode"] if s["decode"] else math.inf)
        if len(tokens) <= limit:
            return tokens
        old, raw, recent = self.scored(tokens, probabilities, end, prompt)
        order = sorted(range(len(old)), key=lambda i: -raw[i])[: int(limit) - len(recent)]
        return [old[i] for i in sorted(order)] + recent

    def scored(self, tokens, probabilities, end, prompt):
        """SnapKV's candidates in order, what each is worth, and the rows that are kept anyway."""
        s = self.sizes
        window = s["window"]
        score = dict.fromkeys(map(id, tokens), 0.0)
        for width in (window, s.get("wide", 0)):
            for entry in probabilities[-width:] if width else []:
                if entry is not None:
                    for token, p in zip(*entry, strict=True):
                        score[id(token)] += float(p) / width
        recent = [t for t in tokens if t.position >= end - s.get("recent", window)]
        old = [t for t in tokens if t.position < end - s.get("recent", window)]
        raw = [score[id(t)] for t in old]
        if prompt and "ahead" in s:
            raw = [max(raw[max(0, i - s["ahead"] + 1) : i + 1]) for i in range(len(raw))]
        elif prompt:
            reach = s["kernel"] // 2
            raw = [
                sum(raw[j] for j in range(i - reach, i + reach + 1) if 0 <= j < len(raw)) / s["kernel"]
                for i in range(len(raw))
            ]
        return old, raw, recent

    def drop_across_heads(self, work, end, prompt) -> list[list[Token]]:
        """AdaKV: every head keeps its best `floor`, the best of all the others fill the budget of the layer."""
        limit = self.sizes["capacity"]
        tokens = [held + new for held, new, _ in work]
        if not prompt or sum(map(len, tokens)) <= limit * len(work):
            return tokens
        kept, rest = [], []
        for h, (held, new, probabilities) in enumerate(work):
            old, raw, recent = self.scored(held + new, probabilities, end, prompt)
            order = sorted(range(len(old)), key=lambda i: -raw[i])
            kept.append([old[i] for i in order[: self.sizes["floor"]]] + recent)
            rest += [(-raw[i], h, i, old[i]) for i in order[self.sizes["floor"] :]]
        room = limit * len(work) - sum(map(len, kept))
        for _, h, _, token in sorted(rest, key=lambda entry: entry[:3])[: max(0, room)]:
            kept[h].append(token)
        return [sorted(head, key=lambda t: t.position) for head in kept]


KINDS = {
    "identity": (lambda m: KVCache(m), dict()),
    "window": (lambda m: SlidingWindowCache(m, window_length=6, num_sink_tokens=2), dict(window=6, sinks=2)),
    "h2o": (lambda m: HeavyHitterCache(m, heavy_size=4, recent_size=3), dict(heavy=4, recent=3)),
    "snapkv": (
        lambda m: SnapKVCache(m, max_capacity_prompt=8, window_size=3, kernel_size=3),
        dict(capacity=8, window=3, kernel=3, decode=0),
    ),
    "snapkv_bounded": (
        lambda m: SnapKVCache(m, max_capacity_prompt=8, window_size=3, kernel_size=3, decode_budget=2),
        dict(capacity=8, window=3, kernel=3, decode=2),
    ),
    "snapkv_ahead": (
        lambda m: SnapKVCache(
            m, 10, window_size=2, wide_window=6, recent_ratio=0.4, pooling="ahead", kernel_size=3, decode_budget=2
        ),
        dict(capacity=10, window=2, wide=6, recent=4, ahead=3, decode=2),
    ),
    "snapkv_adaptive": (
        lambda m: SnapKVCache(m, 8, window_size=3, kernel_size=3, adaptive_heads=True, floor_alpha=0.25),
        dict(capacity=8, window=3, kernel=3, decode=0, floor=2),
    ),
    "identity_paged": (lambda m: KVCache(m, pool=POOL), dict()),
    "window_paged": (
        lambda m: SlidingWindowCache(m, window_length=6, num_sink_tokens=2, pool=POOL),
        dict(window=6, sinks=2),
    ),
    "snapkv_paged": (
        lambda m: SnapKVCache(m, max_capacity_prompt=8, window_size=3, kernel_size=3, pool=POOL),
        dict(capacity=8, window=3, kernel=3, decode=0),
    ),
    "h2o_mean": (
        lambda m: HeavyHitterCache(m, heavy_size=4, recent_size=3, score="mean"),
        dict(heavy=4, recent=3, mean=1),
    ),
}


class Machine(RuleBasedStateMachine):
    kind = "identity"

    @initialize(seed=st.integers(0, 2**16), batch=st.integers(1, 3))
    def start(self, seed: int, batch: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        make, sizes = KINDS[self.kind]
        self.cache = make(MODEL)
        self.oracle = Oracle(self.kind.partition("_")[0], **sizes)
        self.batch = batch
        self.fresh()
        self.module = SimpleNamespace(
            layer_idx=0, is_causal=True, training=False, num_key_value_groups=GROUP, config=MODEL.config
        )

    def fresh(self) -> None:
        self.oracle.rows = [Row() for _ in range(self.batch)]
        self.oracle.seen = 0
        self.oracle.sizes.pop("dropped", None)
        self.recording = False
        self.first_recorded = False
        self.rolled_back = False
        self.before = None  # oracle before the last recorded step, and the step

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    # -------------------------------------------------------------- steps

    @rule(n=st.integers(1, 24), padding=st.lists(st.integers(0, 5), min_size=4, max_size=4))
    def update(self, n: int, padding: list[int]) -> None:
        empty = self.oracle.seen == 0
        pads = [min(p, n - 1) if empty else 0 for p in padding[: self.batch]]
        self.feed(n, pads)

    @rule()
    def decode(self) -> None:
        self.feed(1, [0] * self.batch)

    def feed(self, n: int, pads: list[int]) -> None:
        q = self.random(self.batch, HEADS * GROUP, n, DIM) * 2
        k, v = self.random(self.batch, HEADS, n, DIM), self.random(self.batch, HEADS, n, DIM)
        real = [[i >= pad for i in range(n)] for pad in pads]
        if self.before is not None and self.oracle.kind != "identity":
            # No rollback came. If there were some before, they have stopped: a plain step, and recording ends.
            (rows, seen, sizes), (*tensors, real_before, prompt) = self.before
            self.oracle.rows, self.oracle.seen, self.oracle.sizes = rows, seen, sizes
            prompt = tensors[0].shape[2] > 1 if self.rolled_back else prompt
            self.oracle.step(*tensors, real_before, prompt)
            self.note_drop()
            self.recording = self.recording and not self.rolled_back
        self.before = None
        prompt = n > 1 and (not self.recording or self.first_recorded)
        if self.recording:
            self.before = (
                copy.deepcopy((self.oracle.rows, self.oracle.seen, dict(self.oracle.sizes))),
                (q, k, v, real, prompt),
            )
            self.first_recorded = False
        seen = self.oracle.seen
        expected = self.oracle.step(q, k, v, real, prompt)
        self.note_drop()
        mask = None
        padded = any(pads) or any(row.padding for row in self.oracle.rows)
        if padded or (n > 1 and seen):
            kept, _ = self.cache.get_mask_sizes(n, 0)
            mask = torch.ones(self.batch, 1, n, kept, dtype=torch.bool)
            if n > 1:
                mask[..., -n:] = torch.ones(n, n, dtype=torch.bool).tril()
            new = torch.tensor(real)
            mask[..., -n:] &= new[:, None, None, :]
            if self.cache.layers[0].complete:  # then the model's mask speaks of every row that is held
                for b, row in enumerate(self.oracle.rows):
                    mask[b, :, :, : min(row.padding, kept)] = False
        single = torch.float32
        keys, values = self.cache.update(k.to(single), v.to(single), 0)
        output, _ = attention_forward(self.module, q.to(single), keys, values, mask, scaling=SCALE, before="sdpa")
        output = output.transpose(1, 2).double()
        for b in range(self.batch):
            for i in range(n):
                if real[b][i]:
                    torch.testing.assert_close(output[b, :, i], expected[b, :, i], atol=2e-4, rtol=1e-3)

    def note_drop(self) -> None:
        if any(len(h) < self.oracle.seen - row.padding for row in self.oracle.rows for h in row.heads):
            self.oracle.sizes["dropped"] = 1

    # -------------------------------------------------------------- operations

    @precondition(lambda self: self.oracle.seen > 0)
    @rule(n=st.integers(1, 6))
    def crop(self, n: int) -> None:
        seen = self.oracle.seen
        self.roll_back(n)
        self.rolled_back = self.rolled_back or self.oracle.seen < seen

    def roll_back(self, n: int) -> None:
        n = min(n, self.oracle.seen)
        if self.before is not None:
            (rows, seen, sizes), (q, k, v, real, prompt) = self.before
            new = q.shape[2]
            if self.oracle.kind != "identity":
                if n > new:
                    with pytest.raises(ValueError, match="cannot roll back"):
                        self.cache.crop(-n)
                    return
                self.before = None
                self.cache.crop(-n)
                self.oracle.rows, self.oracle.seen, self.oracle.sizes = rows, seen, sizes
                left = new - n
                if left:
                    self.oracle.step(q[:, :, :left], k[:, :, :left], v[:, :, :left], [r[:left] for r in real], prompt)
                    self.note_drop()
                if self.oracle.seen == 0:
                    self.forget()
                return
        if self.oracle.kind == "identity":
            self.before = None
            self.cache.crop(-n)
            self.oracle.seen -= n
            for row in self.oracle.rows:
                row.heads = [[t for t in head if t.position < self.oracle.seen] for head in row.heads]
                row.padding = min(row.padding, self.oracle.seen)
            if self.oracle.seen == 0:
                self.forget()
            return
        held = [[[t.position for t in head] for head in row.heads] for row in self.oracle.rows]
        try:
            self.cache.crop(-n)
        except ValueError:
            # A padding row that went counts as dropped, too.
            dropped = self.oracle.sizes.get("dropped") or any(row.padding for row in self.oracle.rows)
            assert self.oracle.kind == "h2o" or dropped
            return
        # Whatever is not refused is exact: nothing was dropped because of the tokens removed.
        self.oracle.seen -= n
        for row, heads in zip(self.oracle.rows, held, strict=True):
            for h, positions in enumerate(heads):
                assert all(p in positions for p in range(self.oracle.seen, self.oracle.seen + n) if p >= row.padding)
                row.heads[h] = [t for t in row.heads[h] if t.position < self.oracle.seen]
            row.padding = min(row.padding, self.oracle.seen)
        if self.oracle.seen == 0:
            self.forget()

    def forget(self) -> None:
        recording = self.recording
        self.fresh()
        self.recording = self.first_recorded = recording

    @rule()
    def record(self) -> None:
        self.cache.activate_past_recording()
        self.rolled_back = False
        self.recording = self.first_recorded = True

    @precondition(lambda self: self.oracle.seen > 0)
    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        order = data.draw(st.lists(st.integers(0, self.batch - 1), min_size=self.batch, max_size=self.batch))
        self.cache.reorder_cache(torch.tensor(order))
        self.oracle.rows = [copy.deepcopy(self.oracle.rows[i]) for i in order]
        self.before = None

    @precondition(lambda self: self.oracle.seen > 0 and self.batch <= 2)
    @rule()
    def repeat(self) -> None:
        self.cache.batch_repeat_interleave(2)
        self.oracle.rows = [copy.deepcopy(row) for row in self.oracle.rows for _ in range(2)]
        self.batch *= 2
        self.before = None

    @precondition(lambda self: self.oracle.seen > 0 and self.batch > 1)
    @rule(data=st.data())
    def choose(self, data: st.DataObject) -> None:
        some = data.draw(st.lists(st.integers(0, self.batch - 1), min_size=1, max_size=self.batch - 1))
        self.cache.batch_select_indices(torch.tensor(some))
        self.oracle.rows = [copy.deepcopy(self.oracle.rows[i]) for i in some]
        self.batch = len(some)
        self.before = None

    @rule(batch=st.integers(1, 3))
    def reset(self, batch: int) -> None:
        self.cache.reset()
        self.batch = batch
        self.fresh()

    @rule()
    def deepcopy(self) -> None:
        old = self.cache
        self.cache = copy.deepcopy(old)
        old.reset()

    @rule()
    def save_and_load(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "cache.safetensors")
            self.cache.save(path)
            make, _ = KINDS[self.kind]
            self.cache = make(MODEL).load(path)
        self.recording, self.before = False, None

    # -------------------------------------------------------------- always

    @invariant()
    def positions_agree(self) -> None:
        if not hasattr(self, "cache") or self.before is not None:
            return
        assert self.cache.get_seq_length() == self.oracle.seen
        if not self.oracle.seen:
            return
        positions = self.cache.kept_positions(0)
        for b, row in enumerate(self.oracle.rows):
            for h, head in enumerate(row.heads):
                got = [p for p in positions[b, h].tolist() if p >= 0]
                assert got == [t.position for t in head], (self.kind, b, h)


def _case(kind: str, examples: int = 60):
    machine = type(f"Machine_{kind}", (Machine,), {"kind": kind})
    case = machine.TestCase
    case.settings = settings(
        max_examples=examples, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
    )
    return case


TestIdentity = _case("identity")
TestWindow = _case("window")
TestHeavyHitter = _case("h2o")
TestSnapKV = _case("snapkv")
TestSnapKVBounded = _case("snapkv_bounded")
TestSnapKVAhead = _case("snapkv_ahead")
TestHeavyHitterMean = _case("h2o_mean")
TestSnapKVAdaptive = _case("snapkv_adaptive")
TestIdentityPaged = _case("identity_paged")
TestWindowPaged = _case("window_paged", 20)
TestSnapKVPaged = _case("snapkv_paged", 20)
