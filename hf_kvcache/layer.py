"""KVLayer: the cache of one model layer, and the only place that touches `seen` and `kept`.

The order of every step is the contract: `update` receives new keys and values and returns a handle; attention sees the
rows held when the step began plus the new ones in full precision; only then does the policy drop.

- `seen`: tokens ever given. `get_seq_length()` returns it, and positions come from it.
- `kept`: rows physically held per KV head. `get_mask_sizes()` returns `(kept + q, seen - kept)`, so the last q columns
  of a mask built from it are right whatever was dropped.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from .policies.base import Keep, LayerPolicy, Step, select
from .segments import Chain, OffloadedPackedStore, OffloadedStore, PackedStore, PagedSegment, Ragged, Rows
from .segments.dense import EMPTY
from .segments.offloaded import OffloadedRows
from .segments.packed import LazyRows
from .view import KVView

if TYPE_CHECKING:
    from .codecs.base import LayerCodec
    from .offload import Offloader
    from .paging import BlockPool

# The layer whose rows were last read outside our attention function, per thread: a model that expands its cache before
# it attends (MLA) hands plain tensors on, and the attention function finds the layer here.
expected = threading.local()

# Queries kept back while a draft is being verified: the longest draft that can be rolled back.
MAX_ROLLBACK = 256


def _new_indices(start: int, new: int, batch: int, device: torch.device) -> torch.Tensor:
    """Sequence indices of new tokens, int32 `[batch, 1, new]`."""
    return torch.arange(start, start + new, dtype=torch.int32, device=device).expand(batch, 1, new)


# All layers of a step are given the same ones. A training step keeps its tensors, so those are its own.
_indices = lru_cache(maxsize=2)(_new_indices)


@dataclass
class Pending:
    """New tokens between `update` and the end of their step."""

    rows: Rows  # the new rows alone
    start: int  # sequence index of the first of them
    held: int  # rows held when the step began
    written: bool  # already appended to the segment
    step: Step | None = None  # attended, but left open for other layers that share the rows
    readers: int = 0  # followers that have still to attend over the rows
    given: set[int] = field(default_factory=set)  # followers that were handed the rows


class KVLayer(CacheLayerMixin):
    """One layer's cache: a segment of rows, a policy, and the rules of the contract.

    Args:
        policy: what stays.
        layer_idx: index of the model layer.
        sliding_window: the layer's own window (tokens, as `config.sliding_window`), or None.
        chunk_size: the layer's attention chunk (tokens), or None.
        codec: makes the codec of this layer from the sizes of its keys and values; None: full precision.
        pool: where rows are drawn from, a block at a time; None: buffers of the layer's own.
        offloader: what it shares with the other layers whose older rows leave the device; None: all rows stay.
        attached: whether the model's attention goes through this library, so that a handle may be returned.
    """

    is_compileable = False
    is_croppable = True
    supports_early_init = True

    def __init__(
        self,
        policy: LayerPolicy,
        layer_idx: int,
        sliding_window: int | None = None,
        chunk_size: int | None = None,
        attached: bool = False,
        technique: str = "KVCache",
        expanded: bool = False,
        codec: Callable[[int, int], LayerCodec] | None = None,
        pool: BlockPool | None = None,
        offloader: Offloader | None = None,
    ) -> None:
        self.policy = policy
        self.layer_idx = layer_idx
        self.sliding_window = sliding_window
        self.chunk_size = chunk_size
        self.attached = attached
        self.technique = technique
        # The model stores latents and expands them to all heads before it attends (MLA).
        self.expanded = expanded
        self.signature: tuple[Any, ...] | None = None
        self.checked: set[int] = set()  # ids of the attention modules that were found to fit
        self.shared = False  # later model layers attend over these rows too
        self.followers = 0  # layers of the cache that read these rows, each once in every step (see `FollowerLayer`)
        self.full_width = False  # the model makes a bias for every position ever given, dropped ones included
        self.segments: Chain | Ragged | PackedStore | PagedSegment | OffloadedStore
        if codec is not None:
            self.segments = PackedStore(codec) if offloader is None else OffloadedPackedStore(codec, offloader)
        elif pool is not None:
            self.segments = PagedSegment(pool, layer_idx)
        elif offloader is not None:
            self.segments = OffloadedStore(offloader)
        else:
            self.segments = Ragged() if policy.ragged else Chain()
        self.is_initialized = False
        self.record_past = False
        self._clear()

    def _clear(self) -> None:
        self.segments.clear()
        self.policy.reset()
        self._seen = 0
        self.pending: Pending | None = None
        self._deferred: Step | None = None  # a step whose drop waits for `crop` (recording mode)
        self._next_is_prompt = True
        self._rolled_back = False  # `crop` was called since recording began
        self._last_drop = 0  # `seen` when a row was last dropped or a score was last changed for good
        self._complete = True  # every token ever given is held, in order
        self._packed = False  # rows were written by the policy, in its order
        self._has_empty = False  # some row may be padding or an empty slot
        self._padding: torch.Tensor | None = None  # [B] padding tokens at the start of each batch row
        self._batch = -1
        self._fitting: tuple[int, int, int] | None = None  # sizes that were found to fit the rows held
        self.is_initialized = False

    # ------------------------------------------------------------------ state that transformers asks for

    @property
    def is_sliding(self) -> bool:  # type: ignore[override]
        return self.sliding_window is not None or self.chunk_size is not None

    @property
    def keys(self) -> torch.Tensor | None:  # type: ignore[override]
        """All keys, in order, or None while empty (for code that looks into the cache)."""
        return self.materialize("keys") if self._seen else None

    @keys.setter
    def keys(self, value: Any) -> None:
        if value is not None:
            raise AttributeError("keys are written through `update` only")

    @property
    def values(self) -> torch.Tensor | None:  # type: ignore[override]
        """All values, in order, or None while empty."""
        return self.materialize("values") if self._seen else None

    @values.setter
    def values(self, value: Any) -> None:
        if value is not None:
            raise AttributeError("values are written through `update` only")

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: device, dtype and shapes are taken from the first keys."""

    @property
    def element_size(self) -> int:
        """Bytes of one element of a key."""
        return self.segments.element_size

    def get_seq_length(self) -> int:
        return self._seen

    def get_max_length(self) -> int:
        return -1

    @property
    def kept(self) -> int:
        """Rows held per KV head (pending ones included)."""
        self.settle()
        return self.segments.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.full_width or self._reads_in_order:
            return self._seen + query_length, 0
        return self.mask_sizes(self.kept, self._seen, query_length)

    def mask_sizes(self, kept: int, seen: int, query_length: int) -> tuple[int, int]:
        """Width and offset of a mask for `query_length` tokens after `seen`, of which `kept` rows are held."""
        # More rows than tokens: packed slots that short rows of a padded batch leave empty.
        if self.full_width or self._reads_in_order or kept > seen:
            return seen + query_length, 0
        return kept + query_length, seen - kept

    @property
    def nbytes(self) -> int:
        """Bytes of all storage held by this layer, slack, metadata and policy state included."""
        self.settle()
        others = [self._padding, *self.policy.tensors()]
        step = self._deferred
        if step is not None:
            others += [step.query, step.recorded, step.real]
            if step.query is not None:
                queries = step.query.shape[2]
                others += [step.visible(0, queries), step.bias(0, queries)]
        return self.segments.nbytes + sum(t.untyped_storage().nbytes() for t in others if t is not None)

    def kept_positions(self) -> torch.Tensor:
        """Positions of held rows `[B, H, kept]`, ascending; -1 for slots that hold no token (padding, short rows)."""
        self.settle()
        if self.segments.is_empty:
            return torch.empty(max(self._batch, 0), 0, 0, dtype=torch.int32)
        return self.segments.positions.expand(-1, self.segments.shape[1], -1).sort(dim=-1).values

    # ------------------------------------------------------------------ a step: update, attend, finish

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.settle()
        if self._deferred is not None:
            step = self._deferred
            if self._rolled_back:
                # Rollbacks came after every step and have stopped: transformers leaves recording on after drafted
                # decoding, and what looked like a draft was the prompt (or a token) of a later, plain turn.
                self.record_past = False
                step = replace(step, prompt=step.new > 1)
            self._apply(step)
        if isinstance(self.segments, OffloadedStore):
            self.segments.leave(trained=not torch.is_grad_enabled())
        self._compress()  # what a rollback could have reached until now
        self._check(key_states, value_states)
        new = key_states.shape[2]
        if not self.is_initialized:
            self._begin(key_states.shape[0])
        held = self.segments.length
        indices = _new_indices if torch.is_grad_enabled() else _indices
        positions = indices(self._seen, new, self._batch, key_states.device)
        scores = None
        if self.policy.uses_scores:
            scores = torch.zeros(key_states.shape[:3], dtype=torch.float32, device=key_states.device)
        rows = Rows(key_states, value_states, positions, scores)
        # A prompt on an empty cache is attended where it lies, and only what stays is written. Everything else is
        # written first, so that one contiguous buffer is attended.
        written = held > 0
        if written:
            self.segments.append(rows)
        self.pending = Pending(rows, self._seen, held, written, readers=self.followers)
        self._seen += new
        return self.handles(self.pending)

    def handles(self, pending: Pending) -> tuple[torch.Tensor, torch.Tensor]:
        """What a model layer is given for the keys and values of an open step."""
        if not self.attached:
            return self.materialize("keys"), self.materialize("values")
        rows = pending.rows
        # T5 takes the width of its position bias from the keys themselves.
        total = self._seen if self.full_width or self._reads_in_order else pending.held + rows.length
        return KVView(self, "keys", rows.keys, total), KVView(self, "values", rows.values, total)

    def _begin(self, batch: int) -> None:
        """Take the batch size from the first tokens. Rows of a shared prefix are for as many batch rows as come."""
        if batch > 1 and not self.segments.is_empty:
            self.segments.batch_map(lambda t: t.repeat_interleave(batch, dim=0))
        self._batch = batch
        self.is_initialized = True

    def _check(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if self.segments.is_empty:
            return
        batch, heads, _, dim = keys.shape
        if self.is_initialized and batch != self._batch:
            raise ValueError(
                f"the cache holds a batch of {self._batch} but was given {batch}: call `cache.reset()` for a "
                "new batch, or `cache.batch_repeat_interleave(n)` / `cache.batch_select_indices(...)` to change it"
            )
        given = (heads, dim, values.shape[3])
        if given == self._fitting:
            return
        held = self.segments.shape[1:]
        if held == given:
            self._fitting = given
        else:
            raise ValueError(
                f"layer {self.layer_idx} holds (kv heads, key size, value size) = {held} but was given {given}: this "
                "cache belongs to another model; make a new one or call `cache.reset()`"
            )

    def current(self) -> Rows:
        """Rows to attend over: held ones, then the pending ones."""
        if self.pending is not None and not self.pending.written:
            return self.pending.rows
        return self.segments.rows

    @property
    def parts(self) -> list[Rows]:
        """The rows to attend over, one table for each segment."""
        if self.pending is not None and not self.pending.written:
            return [self.pending.rows]
        return self.segments.parts

    @property
    def is_sealed(self) -> bool:
        """Whether the rows to attend over lie in more than one segment."""
        return isinstance(self.segments, Chain) and bool(self.segments.sealed) and len(self.parts) > 1

    @property
    def is_shared_by_rows(self) -> bool:
        """Whether some of those segments hold one batch row that stands for several."""
        return self.is_sealed and any(part.keys.shape[0] != self._batch for part in self.parts)

    def seal(self) -> None:
        """Make the rows held so far read-only, to be shared by copies of the cache.

        Raises `ValueError` where the policy drops rows.
        """
        self.settle()
        if self.policy.drops or self.is_sliding or isinstance(self.segments, Ragged):
            raise ValueError(f"{self.technique} drops tokens, so its rows cannot be shared read-only")
        if not isinstance(self.segments, Chain | PackedStore) or isinstance(self.segments, OffloadedPackedStore):
            raise ValueError(
                f"{self.technique}: rows of a pool or in host memory are not made read-only; copies of a cache with a "
                "pool share them as they are"
            )
        self.segments = self.segments.seal()

    def adopt(self, parts: list[Rows]) -> None:
        """Begin, on an empty layer, with read-only rows `[1, H, N, D]` of the first tokens of every batch row."""
        assert isinstance(self.segments, Chain) and not self._seen
        self.segments.adopt(parts)
        self._seen = self.segments.length
        self._batch = 1

    def free_batch(self) -> None:
        """Let what one batch row holds stand for as many batch rows as the next tokens have."""
        self.settle()
        assert self._batch == 1 and self._padding is None
        self.is_initialized = self.record_past = self._rolled_back = False
        self._next_is_prompt = True

    @property
    def total(self) -> int:
        """How many rows there are to attend over (per KV head; of the longest head)."""
        if self.pending is not None and not self.pending.written:
            return self.pending.rows.length
        return self.segments.length

    @property
    def positions(self) -> torch.Tensor:
        """Positions `[B, H|1, N]` of the rows to attend over."""
        if self.pending is not None and not self.pending.written:
            return self.pending.rows.positions
        return self.segments.positions

    def front(self) -> tuple[str, torch.Tensor] | None:
        """Moved sink rows to use in place of the first ones: which tensor, and `[B, H, F, D]`."""
        if not self._packed or self.segments.is_empty:
            return None
        start = self.pending.start if self.pending is not None else self._seen
        rows = self.segments.rows
        if isinstance(self.segments, PackedStore) and self.segments.front is not None:
            rows = self.segments.front
        return self.policy.front_rows(rows, start)

    def materialize(self, which: str) -> torch.Tensor:
        """All keys or values `[B, H, kept, D]`, in order.

        Raises `NotImplementedError` where the policy drops rows and the model's attention does not go through this
        library's function: the model would apply a mask that does not fit the rows.
        """
        if self.policy.drops and self.pending is not None and not self.expanded:
            raise NotImplementedError(
                f"{self.technique} drops tokens, and the keys were read outside this library's attention. Was the "
                "model detached, or its attention implementation changed? Then call `hf_kvcache.attach(model)`. Is it "
                "another model? Make a cache for each model. Otherwise this model reads its keys before it attends, "
                "and cannot be told which tokens are left: use KVCache, which keeps every token."
            )
        rows = self.current()
        # What leaves this library must not lie in a buffer that another layer takes over.
        tensor = rows.owned(which) if isinstance(rows, OffloadedRows) else getattr(rows, which)
        if self._reads_in_order:
            tensor = self._in_order(tensor, rows.positions)
        front = self.front() if self._packed else None
        if front is not None and front[0] == which:
            tensor = torch.cat([front[1], tensor[:, :, front[1].shape[2] :]], dim=2)
        if self.pending is not None and self.expanded:
            expected.layer = weakref.ref(self)
        return tensor

    @property
    def _reads_in_order(self) -> bool:
        """Whether rows that are read as a tensor have to be brought to the places of their positions first."""
        aligned = isinstance(self.segments, PackedStore) and not self._complete
        return aligned and not self.policy.drops and not self.expanded

    def _in_order(self, tensor: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rows at the places of their positions, `[B, H, seen, D]`, as the model's own masks expect them."""
        whole = tensor.new_zeros(*tensor.shape[:2], self._seen + 1, tensor.shape[3])
        index = torch.where(positions == EMPTY, self._seen, positions).long()  # empty slots go to a place of no use
        index = index.expand(-1, tensor.shape[1], -1)[..., None].expand(-1, -1, -1, tensor.shape[3])
        return whole.scatter_(2, index, tensor)[:, :, : self._seen]

    def past_visibility(
        self, positions: torch.Tensor, query_index: torch.Tensor, window: int | None = None
    ) -> torch.Tensor | None:
        """Which past rows each query may see: bool `[B, H|1, Q, N]`, or None for all.

        `positions [B, H|1, N]` are past rows (older than every query, so causality is free), `query_index [Q]` the
        sequence indices of the queries, `window` a sliding window that the model asks for in this call.
        """
        window = self.sliding_window if window is None else window
        visible = None
        if self._has_empty:
            visible = (positions != EMPTY)[:, :, None, :].expand(-1, -1, query_index.numel(), -1)
        if window is not None:
            near = positions[:, :, None, :] > query_index[None, None, :, None] - window
            visible = near if visible is None else visible & near
        if self.chunk_size is not None:
            # Chunks are counted from the first real token of each batch row.
            pad = self._padding if self._padding is not None else torch.zeros(1, device=positions.device)
            pad = pad.view(-1, 1, 1, 1).to(positions.device)
            size = self.chunk_size
            mine = torch.div(query_index[None, None, :, None] - pad, size, rounding_mode="floor")
            same = torch.div(positions[:, :, None, :] - pad, size, rounding_mode="floor") == mine
            visible = same if visible is None else visible & same
        return visible

    def note_padding(self, real: torch.Tensor | None) -> None:
        """Record which of the pending tokens are padding (`real`: bool `[B, new]`, None when all are real)."""
        assert self.pending is not None
        if real is None:
            return
        self._has_empty = True
        count = (~real).sum(-1)
        self._padding = (
            count if self._padding is None else self._padding + count * (self._padding == self.pending.start)
        )
        positions = self.pending.rows.positions.masked_fill(~real[:, None], EMPTY)
        self.pending.rows.positions = positions
        if self.pending.written:
            self.segments.mark(positions)

    def is_prompt(self, new: int) -> bool:
        """Whether a step of `new` tokens is (part of) a prompt, as against decoding and checking drafts."""
        return new > 1 and (not self.record_past or self._next_is_prompt)

    def horizon(self, end: int) -> int | torch.Tensor:
        """The last position that no query from `end` on can see."""
        if self.sliding_window is not None:
            return end - self.sliding_window
        if self.chunk_size is not None:
            pad = self._padding[:, None, None] if self._padding is not None else 0
            return (end - pad) // self.chunk_size * self.chunk_size + pad - 1
        return EMPTY

    @property
    def has_empty(self) -> bool:
        """Whether some row may be padding or an empty slot."""
        return self._has_empty

    @property
    def padding(self) -> torch.Tensor | None:
        """Padding tokens before each batch row `[B]`, or None where there are none."""
        return self._padding

    @property
    def complete(self) -> bool:
        """Whether every token ever given is held, in order, so that a full-width mask from outside fits the rows."""
        return self._complete

    def finish(self, step: Step) -> None:
        """End of a step: the policy looks, and unless a rollback may follow, drops."""
        pending = self.pending
        assert pending is not None
        if pending.step is not None:  # of a follower: its queries count like those of the layer itself
            step = join(pending.step, step) if self.policy.needs_queries else pending.step
        if self.shared or self._awaits_reader():
            pending.step = step  # the rest of the forward pass needs the rows; at the latest `settle` finishes it
            return
        self._finish(step)

    def _awaits_reader(self) -> bool:
        """Whether a follower has still to attend over the rows of this step, once another reader is done with it."""
        assert self.pending is not None
        self.pending.readers -= 1
        return self.pending.readers >= 0

    def _finish(self, step: Step) -> None:
        pending = self.pending
        assert pending is not None
        if not self.record_past:
            try:
                self._apply(step)
            except MemoryError:
                self._give_up()
                raise
            self.pending = None
            return
        self._write_pending()
        self.pending = None
        self._deferred = self._hold_back(step)
        self._next_is_prompt = False

    def _write_pending(self) -> None:
        """Write new tokens that were attended where they lay."""
        assert self.pending is not None
        if self.pending.written:
            return
        try:
            self.segments.append(self.pending.rows)
        except MemoryError:
            self._give_up()
            raise

    def _give_up(self) -> None:
        """There was no room for the tokens of this step: it has not been, and other layers find that out."""
        if self.pending is not None and not self.pending.written:
            self._seen, self.pending = self.pending.start, None

    def finish_unseen(self) -> None:
        """End of a step that the policy has nothing to do with: all its rows stay."""
        assert self.pending is not None
        if self._awaits_reader():
            return
        self._write_pending()
        self.pending = None
        if self.record_past:
            self._next_is_prompt = False
        else:
            self._compress()

    def _compress(self) -> None:
        """Pack what has left the exact window (see `PackedStore`)."""
        store = self.segments
        if isinstance(store, OffloadedStore):
            store.leave()
        if not isinstance(store, PackedStore) or not store.compress(self.policy.reserve):
            return
        if self._has_empty:
            self._complete = False  # short rows of a padded batch now stand aligned to their own start
        # No later query sees what has left the layer's own window.
        if self.sliding_window is not None and store.expire(self._seen - self.sliding_window + 1, only_packed=True):
            self._has_empty, self._complete, self._last_drop = True, False, self._seen

    def _hold_back(self, step: Step) -> Step | None:
        """What must be kept of a step until it is known how much of it is rolled back."""
        if not self.policy.drops and not self.is_sliding:
            return None
        rows = self._no_rows(step)  # they are in the segments; no second copy here
        if not self.policy.needs_queries or step.query is None:
            nothing = _slices(None)  # without queries nobody asks what they saw, and masks of a prompt are large
            return replace(step, rows=rows, query=None, model_keys=None, probs=None, visible=nothing, bias=nothing)
        if step.model_keys is not None and step.model_keys.shape[1] != rows.keys.shape[1]:
            raise NotImplementedError(
                f"{self.technique}: rolling back a draft is not possible on a model that expands its cache to more "
                "heads (MLA); generate without an assistant or prompt lookup"
            )
        keep = min(step.new, MAX_ROLLBACK)
        skip = step.new - keep
        recorded = None
        if skip and self.policy.uses_scores:
            # Queries that no rollback can reach count now; their sums are all that is kept of them.
            recorded = self.policy.partial_scores(queries_of(step, 0, skip))
        late = queries_of(step, skip, step.new)
        assert late.query is not None
        # Masks become tensors here: the rows they speak of may move before the step is applied.
        visible, bias = late.visible(0, keep), late.bias(0, keep)
        return replace(
            late,
            rows=rows,
            query=late.query.detach().clone(),
            model_keys=None,
            probs=None,
            recorded=recorded,
            visible=_slices(None if visible is None else visible.clone()),
            bias=_slices(None if bias is None else bias.clone()),
        )

    def _apply(self, step: Step) -> None:
        """Let the policy observe a step, then drop what it does not keep."""
        self._deferred = None
        unwritten = self.pending.rows if self.pending is not None and not self.pending.written else None
        rows = self.segments.rows if unwritten is None else unwritten
        step = replace(step, rows=rows)
        packed = isinstance(self.segments, PackedStore)
        # A training step may still need rows that would be overwritten, and its gradients pass through what is kept.
        training = torch.is_grad_enabled() and not packed and rows.keys.requires_grad
        with torch.no_grad():
            if self.policy.drops:
                self.policy.observe(step)
                if self.policy.uses_scores:
                    self._last_drop = step.end
                    if isinstance(rows, LazyRows) and rows.scores is not None:
                        cast(PackedStore, self.segments).set_scores(rows.scores)
            if packed and self.policy.fifo_window is not None and unwritten is None:
                self._expire_packed(step)
                return
            if unwritten is None and step.new == 1 and self._packed and not training:
                slot = self.policy.victim(step)
                if slot is not None:
                    self.segments.overwrite(slot)
                    self._dropped(step)
                    self._settle_packed()
                    return
            chosen = self.policy.keep(step) if self.policy.drops else None
            if chosen is None:
                chosen = self._expire(step)
        if chosen is not None:
            self._write(rows, chosen)
            self._dropped(step)
        elif unwritten is not None:
            self.segments.append(unwritten)
        self._settle_packed()

    def _settle_packed(self) -> None:
        """End of a step whose tokens are all accepted."""
        if not self.record_past:
            with torch.no_grad():
                self._compress()

    def _expire_packed(self, step: Step) -> None:
        """A policy that drops the oldest rows, over packed ones: they go a block at a time."""
        store, policy = cast(PackedStore, self.segments), self.policy
        assert policy.fifo_window is not None
        if step.end > policy.kept_after(step.end) and store.expire(step.end - policy.fifo_window):
            self._packed = self._has_empty = True
            self._dropped(step)
        self._settle_packed()

    def _no_rows(self, step: Step) -> Rows:
        rows = step.rows if self.pending is None else self.pending.rows
        return rows.none()

    def _write(self, rows: Rows, chosen: Keep) -> None:
        if isinstance(self.segments, PackedStore):
            if chosen.filled is not None and not bool(chosen.filled.all()):
                self._has_empty = True
            self.segments.select(rows, chosen.index, chosen.filled, self.policy.reserve)
            self._packed = True
            return
        kept = rows.gather(chosen.index)
        if chosen.filled is not None and not bool(chosen.filled.all()):
            kept.positions = kept.positions.masked_fill(~chosen.filled.expand_as(kept.positions), EMPTY)
            if kept.scores is not None:
                kept.scores = kept.scores.masked_fill(~chosen.filled.expand_as(kept.scores), 0.0)
            self._has_empty = True
        self.segments.replace(kept, self.policy.reserve)
        self._packed = True

    def _dropped(self, step: Step) -> None:
        self._complete = False
        self._last_drop = step.end

    def _expire(self, step: Step) -> Keep | None:
        """On a sliding or chunked layer: forget rows that no later query can see, now and then."""
        limit = self.sliding_window or self.chunk_size
        if isinstance(self.segments, PackedStore):
            return None  # they go with the next block that is packed
        if limit is None or step.rows.length < limit + max(limit, 32):
            return None
        return select(torch.where(step.valid(), step.rows.positions.double(), float("-inf")), limit)

    def settle(self) -> None:
        """End a step left open, or commit tokens that were never attended through this library (read as tensors)."""
        pending = self.pending
        if pending is None:
            return
        if pending.step is not None:
            with torch.no_grad():
                self._finish(pending.step)
            return
        if self.policy.drops:
            raise RuntimeError(
                f"layer {self.layer_idx} of {self.technique} was given tokens that never went through its attention "
                "function: was the model detached, or did a forward pass fail half-way? Call `cache.reset()`."
            )
        self._write_pending()
        self.pending = None
        if not self.record_past:
            with torch.no_grad():
                self._compress()

    # ------------------------------------------------------------------ state that is saved

    def state(self) -> dict[str, Any]:
        """JSON-able state beside the rows. A step that waits for a rollback is applied first."""
        self.settle()
        if self._deferred is not None:
            self._apply(self._deferred)
        return {
            "seen": self._seen,
            "last_drop": self._last_drop,
            "complete": self._complete,
            "packed": self._packed,
            "has_empty": self._has_empty,
            "policy": self.policy.state(),
        }

    def load_state(self, state: dict[str, Any], padding: torch.Tensor | None) -> None:
        """The reverse of `state`, on a layer whose rows were just written."""
        self._seen = state["seen"]
        self._last_drop = state["last_drop"]
        self._complete = bool(state["complete"])
        self._packed = bool(state["packed"])
        self._has_empty = bool(state["has_empty"])
        self._padding = padding
        self.policy.load_state(state["policy"])
        if not self.segments.is_empty:
            self._batch = self.segments.shape[0]
            self.is_initialized = True
            move = self.segments.positions.device
            self.policy.batch_map(lambda t: t.to(move))

    # ------------------------------------------------------------------ operations

    def activate_past_recording(self) -> None:
        """From now on, drop a step's rows only when the next step or `crop` shows that it was accepted."""
        self.settle()
        self.record_past = True
        self._next_is_prompt = True
        self._rolled_back = False

    def check_crop(self, tokens_to_remove: int) -> int:
        """How many tokens `crop` would forget; `ValueError` where that cannot be exact. Changes nothing."""
        self.settle()
        tokens_to_remove = int(tokens_to_remove)  # transformers 5.17 passes a tensor
        n = -tokens_to_remove if tokens_to_remove <= 0 else max(0, self._seen - tokens_to_remove)
        n = min(n, self._seen)
        step = self._deferred
        if step is not None:
            if n > step.new or (step.query is not None and n > step.query.shape[2]):
                raise ValueError(
                    f"cannot roll back {n} tokens: {self.technique} can undo its last step of {step.new} tokens, at "
                    f"most {MAX_ROLLBACK}"
                )
        elif n and self._seen - n < self._last_drop:
            raise ValueError(
                f"cannot roll back {n} of {self._seen} tokens: {self.technique} dropped rows (or changed scores) at "
                f"token {self._last_drop}. Call `cache.activate_past_recording()` before the step that may be undone."
            )
        return n

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens. Exact, or `ValueError`.

        A positive number is the length to keep, as in older transformers.
        """
        n = self.check_crop(tokens_to_remove)
        step, self._deferred = self._deferred, None
        if step is not None:
            self._remove(n)
            if step.new > n:
                shorter = _shorten(step, n, self.segments.rows)
                self._deferred = replace(shorter, horizon=self.horizon(shorter.end))
                self._apply(self._deferred)
        elif n:
            self._remove(n)
        self._rolled_back = True

    def _remove(self, n: int) -> None:
        self.segments.crop(n, self._seen - n)
        self._seen -= n
        if isinstance(self.segments, PackedStore) and self.segments.has_holes:
            self._has_empty, self._complete = True, False
        if self._padding is not None:
            self._padding = self._padding.clamp(max=self._seen)
        if self._seen == 0:
            record = self.record_past
            self._clear()
            self.record_past = record

    def reset(self) -> None:
        """Forget everything, recording mode included; the object can be used for another prompt or batch."""
        self._clear()
        self.record_past = False

    def _batch_map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.settle()
        if self._deferred is not None:
            self._apply(self._deferred)
        if self.segments.is_empty or not self.is_initialized:
            return  # nothing is held, or what will stand for any batch
        self.segments.batch_map(fn)
        self.policy.batch_map(fn)
        if self._padding is not None:
            self._padding = fn(self._padding)
        self._batch = self.segments.shape[0]

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._batch_map(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        if repeats < 1:
            raise ValueError(f"`repeats` must be at least 1, got {repeats}")
        self._batch_map(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._batch_map(lambda t: t[indices.to(t.device)])

    def offload(self) -> None:
        raise NotImplementedError("this layer cannot be offloaded by transformers")

    def prefetch(self) -> None:
        raise NotImplementedError("this layer cannot be offloaded by transformers")


def queries_of(step: Step, start: int, stop: int) -> Step:
    """The step as seen by its queries `start:stop` only (counted among the queries it carries)."""
    assert step.query is not None
    return replace(
        step,
        query=step.query[:, :, start:stop],
        visible=lambda a, b: step.visible(a + start, b + start),
        bias=lambda a, b: step.bias(a + start, b + start),
        probs=None,
    )


def join(first: Step, second: Step) -> Step:
    """One step with the queries of two layers over the same rows: each KV head has the larger group."""
    assert first.query is not None and second.query is not None
    heads = first.keys.shape[1]

    def both(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Query heads `[B, Hq, ...]` of the two, those of a KV head side by side."""
        return torch.cat([x.unflatten(1, (heads, -1)), y.unflatten(1, (heads, -1))], dim=2).flatten(1, 2)

    def bias(start: int, stop: int) -> torch.Tensor | None:
        pair = [(step.query, step.bias(start, stop)) for step in (first, second)]
        if all(added is None for _, added in pair):
            return None
        wide = []
        for query, added in pair:
            assert query is not None
            shape = (*query.shape[:2], stop - start, first.keys.shape[2])
            wide.append((query.new_zeros(1) if added is None else added).expand(shape))
        return both(*wide)

    def visible(start: int, stop: int) -> torch.Tensor | None:
        pair = first.visible(start, stop), second.visible(start, stop)
        if pair[0] is None or pair[1] is None or pair[0].shape[1] in (1, heads):
            return pair[0]
        return both(pair[0], pair[1])  # a mask with one entry for each query head

    ratio = second.extras.scaling / first.extras.scaling
    sinks = (first.extras.sinks, second.extras.sinks)
    joined = None if sinks[0] is None or sinks[1] is None else both(sinks[0][None], sinks[1][None])[0]
    probs = None if first.probs is None or second.probs is None else both(first.probs, second.probs)
    return replace(
        first,
        query=both(first.query, second.query if ratio == 1 else second.query * ratio),
        visible=visible,
        bias=bias,
        extras=first.extras._replace(sinks=joined),
        probs=probs,
    )


def _shorten(step: Step, n: int, rows: Rows) -> Step:
    """The step without its last `n` tokens; `rows` are those left."""
    total = rows.length

    def cut(fn: Callable[[int, int], torch.Tensor | None]) -> Callable[[int, int], torch.Tensor | None]:
        def shorter(start: int, stop: int) -> torch.Tensor | None:
            mask = fn(start, stop)
            return mask if mask is None else mask[..., :total]

        return shorter

    return replace(
        step,
        rows=rows,
        new=step.new - n,
        query=None if step.query is None else step.query[:, :, : step.query.shape[2] - n],
        real=None if step.real is None else step.real[:, : step.new - n],
        recorded=None if step.recorded is None else step.recorded[..., :total],
        visible=cut(step.visible),
        bias=cut(step.bias),
    )


def _slices(mask: torch.Tensor | None) -> Callable[[int, int], torch.Tensor | None]:
    return lambda start, stop: None if mask is None else mask[..., start:stop, :]


class HybridKVLayer(LinearAttentionLayer, KVLayer):
    """A layer that holds a linear-attention state beside keys and values (Falcon-H1, Zamba and others)."""

    is_compileable = False

    def __init__(self, *args: Any, number_of_states: int = 1, **kwargs: Any) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)
        KVLayer.__init__(self, *args, **kwargs)

    @property
    def state_nbytes(self) -> int:
        """Bytes of the states, which `nbytes` leaves out: they are no rows, and do not grow."""
        states = [t for t in (*self.conv_states.values(), *self.recurrent_states.values()) if t is not None]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in states}.values())

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        if kwargs:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        KVLayer.reset(self)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        LinearAttentionLayer.reorder_cache(self, beam_idx)
        KVLayer.reorder_cache(self, beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        LinearAttentionLayer.crop(self, tokens_to_remove)
        KVLayer.crop(self, tokens_to_remove)

    def activate_past_recording(self) -> None:
        LinearAttentionLayer.activate_past_recording(self)
        KVLayer.activate_past_recording(self)
