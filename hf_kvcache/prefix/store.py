"""PrefixStore: computed prefixes, kept for whoever comes with the same first tokens."""

from __future__ import annotations

import copy
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch

from .. import storage
from ..cache import KVCache, _model_and_config
from . import files, rows
from . import generate as generating
from .keys import Key, key_of, longest_steady, placeholders
from .tree import Block, Node, State, Tree, common_length, root, walk


class PrefixStore:
    """Reuses the keys and values of shared prefixes across calls, threads, processes and machines. Lossless.

    A radix tree over token ids holds read-only rows; every cache that continues a prefix shares them (zero copy, also
    across the rows of a batch and across beams) and appends rows of its own. The idea is that of the prefix caches of
    vLLM (blocks under chained hashes) and SGLang (a radix tree, LRU on leaves).

    Bytes: those of the caches that were put in, each buffer once (`store.nbytes`). Keys and values are found only for
    the same weights, adapters, config, dtype, technique, codec and other inputs (`keys.key_of`).

    Layers that cannot be cut at any token (a codec's packed rows, sliding windows, recurrent states) are kept as they
    are at the end of each entry, and found only by texts that begin with the whole entry. With a codec, the text after
    a prefix sees the prefix packed, as on a second turn.

    Args:
        max_bytes: most bytes of rows in memory; the leaf used longest ago goes first. Pinned entries stay.
        path: a folder, or an fsspec URL, in which entries are kept too; other processes and machines use them.
        cache: how to make a cache: a function of the model, or an empty cache to copy. Default `KVCache`.
        max_disk_bytes: most bytes under `path`; files used longest ago are removed. None: no limit.

    Raises:
        ValueError: impossible arguments; caches that drop tokens.
        ImportError: a URL without fsspec.
        NotImplementedError: models whose prefix depends on more than itself, by name.
    """

    def __init__(
        self,
        max_bytes: int,
        path: str | os.PathLike[str] | None = None,
        cache: Callable[[Any], KVCache] | KVCache | None = None,
        max_disk_bytes: int | None = None,
    ) -> None:
        for name, value in (("max_bytes", max_bytes), ("max_disk_bytes", max_disk_bytes)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"`{name}` must be a positive number of bytes, got {value!r}")
        if max_disk_bytes is not None and path is None:
            raise ValueError("`max_disk_bytes` bounds what lies under `path`: give a `path` too, or leave it None")
        if max_bytes is None:
            raise ValueError("`max_bytes` must be a positive number of bytes: it bounds what the store holds in memory")
        if isinstance(cache, KVCache):
            rows.check(cache)
            if rows.seen(cache):
                raise ValueError("`cache` must be empty: every cache of the store begins as a copy of it")
        elif cache is not None and not callable(cache):
            raise ValueError(f"`cache` must be an empty cache or a function of the model, got {type(cache).__name__}")
        self.max_bytes = max_bytes
        self.max_disk_bytes = max_disk_bytes
        self.folder = None if path is None else files.Folder(path)
        self.rescan_seconds = 5.0  # how often to look for what other processes have added, at a miss
        self._make = cache
        self._lock = threading.RLock()
        self._tree = Tree()
        self._roots: dict[Key, Node] = {}
        self._scanned: dict[Key, float] = {}
        self._blocks: weakref.WeakValueDictionary[tuple[str, str], Block] = weakref.WeakValueDictionary()
        self._bad: set[str] = set()  # files that were found damaged
        self._described: dict[str, tuple[str, torch.Tensor, int]] = {}  # kind, tokens and start of each file
        self._warned: set[str] = set()
        self._counts = dict.fromkeys(("hits", "misses", "tokens_saved", "evictions", "damaged_files"), 0)

    # ------------------------------------------------------------------ what it holds

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers held in memory, each once."""
        with self._lock:
            return self._tree.nbytes

    def stats(self) -> dict[str, int]:
        """`hits` and `misses` of lookups, `tokens_saved` (over all batch rows), `evictions`, `damaged_files`, and now:
        `bytes`, `entries` (runs of tokens in memory), `pinned`, `filed` (runs that are only in files)."""
        with self._lock:
            nodes = [node for top in self._roots.values() for node in top.below() if node is not top]
            return {
                **self._counts,
                "bytes": self._tree.nbytes,
                "entries": len(self._tree.order),
                "pinned": sum(node.pinned for node in nodes),
                "filed": sum(node not in self._tree.order for node in nodes),
            }

    def __repr__(self) -> str:
        now = self.stats()
        where = "" if self.folder is None else f", path={self.folder.path!r}"
        return (
            f"PrefixStore(max_bytes={self.max_bytes}{where}): {now['entries']} entries, {now['bytes']:,} bytes, "
            f"{now['hits']} hits, {now['misses']} misses, {now['tokens_saved']:,} tokens saved"
        )

    # ------------------------------------------------------------------ get, put, generate

    def get(
        self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **inputs: Any
    ) -> KVCache:
        """A new cache that holds the longest stored prefix of `input_ids` (never all of them), or nothing.

        Feed it, or `generate`, with the full `input_ids`; `cache.get_seq_length()` is the number of tokens found. Rows
        of a batch get the prefix that all of them have. Other `inputs` (images, sound) must be those that were put.
        Raises `ValueError` for padded ids: padding stands before the prefix (`store.generate` takes care of that).
        """
        ids = _ids(input_ids, attention_mask)
        _check_content(ids, inputs)
        cache = self.new_cache(model)
        most = ids.shape[1] - 1
        for row in ids[1:]:
            most = min(most, common_length(ids[0], row))
        if inputs:
            first, last = placeholders(self.check_model(model).config, ids[0])
            most = most if last <= most else min(most, first)
        self.fill(model, cache, ids[0, : max(0, most)], ids.shape[0], inputs)
        return cache

    def put(
        self,
        model: Any,
        input_ids: torch.Tensor,
        cache: KVCache,
        attention_mask: torch.Tensor | None = None,
        pin: bool = False,
        **inputs: Any,
    ) -> int:
        """Keep what `cache` holds of `input_ids` (one row of ids for each of its batch rows); tokens newly kept.

        The cache may hold more or fewer tokens. Of one batch row nothing is copied: what the cache holds becomes
        read-only there too, and it goes on in rows of its own. Raises `ValueError` for padded rows, for a cache of
        other weights, and for layers that cannot be cut where `input_ids` end.
        """
        ids = _ids(input_ids, attention_mask)
        _check_content(ids, inputs)
        rows.check(cache)
        rows.check_whole(cache)
        held = rows.seen(cache)
        batch = next((b for b in map(rows.batch_of, cache.layers) if b is not None), 0)
        if held and batch not in (1, ids.shape[0]):
            raise ValueError(f"the cache holds {batch} batch rows, but `input_ids` has {ids.shape[0]}")
        if held and batch < ids.shape[0] and bool((ids[:, :held] != ids[:1, :held]).any()):
            raise ValueError(
                f"the cache holds one batch row, but `input_ids` has {ids.shape[0]} different ones: put each row with "
                "the cache that read it"
            )
        if ids.shape[1] < held and rows.others(cache):
            raise ValueError(
                f"the cache holds {held} tokens and `input_ids` has {ids.shape[1]}, but its layers "
                f"({rows.kinds(cache)}) are kept only as they are at the end. Put the prefix before "
                "more tokens are fed, or pass all ids."
            )
        inner = self.check_model(model)
        if cache.fingerprint != storage.fingerprint(inner):
            raise ValueError(
                "the cache was made for other weights, adapters or precision than the model has now (or from a config "
                "alone): make caches with `store.get(model, ...)`"
            )
        key = key_of(inner, cache, inputs)
        return sum(self.put_row(inner, key, ids[row], cache, row, pin) for row in range(ids.shape[0]))

    def generate(self, model: Any, inputs: Any = None, **kwargs: Any) -> Any:
        """`model.generate(**inputs, **kwargs)` that begins with the longest stored prefix, and keeps what it computed.

        `inputs` is a tensor of ids, or what a tokenizer or processor returns. A prefix that all rows (or beams) have in
        common is computed once. Left-padded rows share a prefix too. Returns what `generate` returns.
        """
        return generating.run(self, model, inputs, kwargs)

    def warm(self, model: Any, input_ids: torch.Tensor, pin: bool = True) -> int:
        """Compute a prefix `[T]` or `[1, T]` and keep it (pinned, unless told otherwise); tokens newly kept.

        The way to make an entry end where texts branch, for layers that cannot be cut.
        """
        ids = _ids(input_ids if input_ids.ndim > 1 else input_ids[None], None)
        if ids.shape[0] != 1:
            raise ValueError(f"`warm` takes one prefix, got {ids.shape[0]} rows")
        cache = self.new_cache(model)
        found = self.fill(model, cache, ids[0], 1, {}, times=0)
        if found < ids.shape[1]:
            generating.read(self.check_model(model), cache, ids[:, found:])
        return self.put(model, ids, cache, pin=pin)

    def pin(self, model: Any, input_ids: torch.Tensor, pinned: bool = True) -> bool:
        """Protect the entry of `input_ids` `[T]` or `[1, T]` from eviction (or no longer). Whether all are stored."""
        ids = _ids(input_ids if input_ids.ndim > 1 else input_ids[None], None)[0]
        cache = self.new_cache(model)
        key = key_of(self.check_model(model), cache, {})
        with self._lock:
            path = walk(self._top(key, cache), ids)
            if sum(fits for _, fits in path) < len(ids) or not path:
                return False
            node, fits = path[-1]
            if fits < node.length:
                node = self._tree.split(node, fits)
            node.pinned = pinned
            return True

    def clear(self) -> None:
        """Forget everything in memory, pinned entries too. Files stay."""
        with self._lock:
            for top in self._roots.values():
                for child in list(top.children.values()):
                    self._tree.remove(child)
            self._roots.clear()
            self._scanned.clear()

    # ------------------------------------------------------------------ the same for `generate`

    def check_model(self, model: Any) -> Any:
        """The model inside, of which a prefix depends on nothing but itself; else `NotImplementedError`."""
        inner, config = _model_and_config(model)
        if inner is None:
            raise ValueError("a PrefixStore needs the model itself, not only its config")
        name = type(inner).__name__
        if getattr(model, "active_peft_config", None) is not None and model.active_peft_config.is_prompt_learning:
            raise NotImplementedError(
                f"{name} with a learned prompt (PEFT) puts tokens before yours; merge or remove it"
            )
        if config.is_encoder_decoder:
            raise NotImplementedError(
                f"{name}: keys of its decoder depend on the encoder's input, not on a prefix alone"
            )
        decoder = config.get_text_config(decoder=True)
        # "vision" is only about images, of which a prefix has all or none.
        whole = config.model_type == "paligemma"
        whole = whole or getattr(decoder, "use_bidirectional_attention", None) not in (None, False, "vision")
        if whole or getattr(decoder, "is_causal", None) is False:
            raise NotImplementedError(
                f"{name}: tokens of its prompt see later ones, so a prefix depends on what follows"
            )
        return inner

    def new_cache(self, model: Any) -> KVCache:
        """An empty cache of the store's technique for this model, checked."""
        inner = self.check_model(model)
        if isinstance(self._make, KVCache):
            if self._make.fingerprint != storage.fingerprint(inner):
                raise ValueError("the store's `cache` was made for another model: pass a function of the model instead")
            cache = copy.deepcopy(self._make)
        else:
            cache = KVCache(inner) if self._make is None else self._make(inner)
            rows.check(cache)
        if not generating.continues(inner):
            raise NotImplementedError(
                f"{type(inner).__name__} does not continue a text from its cache: fed in two parts, a short one fails "
                "or gives other logits than in one"
            )
        return cache

    def fill(
        self,
        model: Any,
        cache: KVCache,
        ids: torch.Tensor,
        batch: int,
        inputs: dict[str, Any],
        times: int | None = None,
    ) -> int:
        """Give an empty cache the longest stored prefix of `ids` `[T]`, and return its length.

        `batch` is how many rows layers of transformers' own are to hold; `times`, for how many rows tokens are saved
        (0: no lookup for the statistics).
        """
        inner = self.check_model(model)
        steady = longest_steady(inner.config.get_text_config(decoder=True))
        if steady is not None and len(ids) >= steady:
            ids = ids[:0]
        most = len(ids)
        times = batch if times is None else times
        key = key_of(inner, cache, inputs)
        with self._lock:
            node, length = self._find(key, cache, ids, most)
            if length < len(ids) and self._is_stale(key):
                self._scan(key, cache)
            while True:
                node, length = self._find(key, cache, ids, most)
                if inputs:
                    first, last = placeholders(inner.config, ids)
                    if first < length < last:  # a prefix has all of the images, or none
                        node, length = self._find(key, cache, ids, first)
                damaged = self._counts["damaged_files"]
                parts, state = self._resident(node, length, cache, inner, key)
                if damaged == self._counts["damaged_files"]:
                    break
                self._scan(key, cache)  # other files may hold the same rows
            length = sum(count for _, count in parts)
            if times:
                self._counts["hits" if length else "misses"] += 1
                self._counts["tokens_saved"] += length * times
            if length and node is not None:
                self._tree.touch(node)
                for each in node.path():
                    each.users.add(cache)
            self._shrink()
        if length:
            rows.fill(cache, parts, state, batch)
        return length

    def matched(self, model: Any, cache: KVCache, ids: torch.Tensor, inputs: dict[str, Any]) -> int:
        """How many first tokens of `ids` `[T]` some entry has, whether or not a cache can begin there."""
        with self._lock:
            path = walk(self._top(key_of(self.check_model(model), cache, inputs), cache), ids)
            return sum(fits for _, fits in path)

    @torch.no_grad()
    def put_row(self, model: Any, key: Key, ids: torch.Tensor, cache: KVCache, row: int, pin: bool = False) -> int:
        """Keep what a cache holds of the `ids` `[T]` of one batch row; tokens newly kept."""
        held = rows.seen(cache)
        end = min(len(ids), held)
        steady = longest_steady(model.config.get_text_config(decoder=True))
        if not end or (steady is not None and held > steady):
            return 0
        strange = rows.strange(cache, model)
        if strange is not None:
            self._warn(f"strange {strange}", f"{type(model).__name__}: {strange}; nothing is kept")
            return 0
        ids = ids[:end].clone()
        state = rows.state_of(cache, row)
        with self._lock:
            top = self._top(key, cache)
            path = walk(top, ids)
            at = sum(fits for _, fits in path)
        blocks = rows.blocks_of(cache, row, at, end) if at < end else []
        fresh: list[Node] = []
        with self._lock:
            if self._roots.get(key) is not top:
                return 0  # the store was cleared meanwhile
            path = walk(top, ids)  # another thread may have been here
            node, have = (path[-1][0] if path else top), sum(fits for _, fits in path)
            if path and path[-1][1] < node.length:
                node = self._tree.split(node, path[-1][1])
            if have < at:
                return 0  # what the new rows continue has just been evicted
            for block, start, count in blocks:
                skip = min(count, have - at)
                if skip < count:
                    tokens = ids[at + skip : at + count]
                    node = Node(tokens, node, block, start + skip)
                    fresh.append(self._tree.attach(node))
                at += count
            if state is not None and (node.state is None or node.state.layers is None):
                node.state = State(state.layers, None if node.state is None else node.state.file)
                self._tree.dismiss(node)
                if node.is_resident:
                    self._tree.admit(node)
            node.pinned = node.pinned or pin
            if fresh:
                node = self._tree.merge_up(node)
            self._tree.touch(node)
            for each in node.path():
                each.users.add(cache)
            new = sum(each.length for each in fresh)
            writes = self._unwritten(node)
        if self.folder is not None:
            self._write(key.name, writes)
        with self._lock:
            self._shrink()
        return new

    # ------------------------------------------------------------------ inside, under the lock

    def _top(self, key: Key, cache: KVCache) -> Node:
        if key not in self._roots:
            self._roots[key] = root()
            if self.folder is not None:
                self._scan(key, cache)
        return self._roots[key]

    def _find(self, key: Key, cache: KVCache, ids: torch.Tensor, most: int) -> tuple[Node | None, int]:
        """The last node of the longest usable prefix, and its length in tokens."""
        path = walk(self._top(key, cache), ids)
        if not rows.others(cache):
            path = walk(self._top(key, cache), ids[:most])
            return (path[-1][0], sum(fits for _, fits in path)) if path else (None, 0)
        found, length, at = None, 0, 0
        for node, fits in path:
            at += fits
            if fits == node.length and node.state is not None and at <= most:
                found, length = node, at
        return found, length

    def _resident(
        self, node: Node | None, length: int, cache: KVCache, model: Any, key: Key
    ) -> tuple[list[tuple[list[Any], int]], State | None]:
        """The rows of the `length` tokens up to a node, read from files where needed; none if those are damaged."""
        spans: list[tuple[Block, int, int]] = []
        state = None
        at = 0
        for each in node.path() if node is not None else []:
            last = each is node
            count = min(each.length, length - at)
            try:
                if each.block.tables is None:
                    self._load_rows(each, cache, model, key)
                if last and rows.others(cache):
                    assert each.state is not None
                    if each.state.layers is None:
                        self._load_state(each, cache, model)
                    state = each.state
            except files.DamagedFile as error:
                self._lose(each, error)
                return [], None
            if each.is_resident and each not in self._tree.order:
                self._tree.admit(each)
            if spans and spans[-1][0] is each.block and spans[-1][2] == each.start:
                spans[-1] = (each.block, spans[-1][1], each.start + count)  # it was one run once
            else:
                spans.append((each.block, each.start, each.start + count))
            at += count
        return [(block.cut(start, stop), stop - start) for block, start, stop in spans], state

    def _lose(self, node: Node, error: files.DamagedFile) -> None:
        """Forget an entry whose file is not to be trusted."""
        self._distrust(error)
        self._tree.remove(node)

    def _distrust(self, error: files.DamagedFile) -> None:
        self._counts["damaged_files"] += 1
        self._warn(str(error), f"{error}. The entry is left out and will be computed anew.")
        if error.file is None or self.folder is None:
            return
        self._bad.add(error.file)
        self._described.pop(error.file, None)
        if error.is_certain:
            try:
                self.folder.remove(error.file)  # so that it is found once only
            except Exception as again:
                self._warn("remove", f"{self.folder.path}: a damaged file cannot be removed ({again})")

    def _shrink(self) -> None:
        while self._tree.nbytes > self.max_bytes:
            node = self._tree.leaf()
            if node is None:
                break
            self._tree.evict(node)
            self._counts["evictions"] += 1

    # ------------------------------------------------------------------ files

    def _is_stale(self, key: Key) -> bool:
        return self.folder is not None and time.monotonic() - self._scanned.get(key, 0.0) > self.rescan_seconds

    def _scan(self, key: Key, cache: KVCache) -> None:
        """Learn which entries there are in files, without reading their rows."""
        assert self.folder is not None
        self._scanned[key] = time.monotonic()
        top = self._roots.setdefault(key, root())
        known = {node.block.file for node in top.below()}
        known |= {node.state.file for node in top.below() if node.state is not None}
        found = []
        try:
            self.folder.clear_orphans(key.name)
            names = self.folder.names(key.name)
        except Exception as error:
            self._warn("scan", f"{self.folder.path} cannot be read ({error}); only entries in memory are used")
            return
        for name in names:
            if name in known or name in self._bad:
                continue
            try:
                if name not in self._described:
                    description = files.describe(self.folder, name)
                    if description["key"] != key.name:
                        raise files.DamagedFile(f"{name}: in the folder of another key", name)
                    tokens = torch.tensor(description["tokens"], dtype=torch.int64)
                    self._described[name] = (description["kind"], tokens, description["start"])
                found.append((name, *self._described[name]))
            except files.DamagedFile as error:
                self._distrust(error)
            except Exception as error:  # of the file system: another time it may work
                self._warn(name, f"{name} cannot be read ({error})")
        # Rows that others continue come first, and all rows before the states at their ends.
        for name, kind, tokens, start in sorted(found, key=lambda entry: (entry[1], len(entry[2]), entry[0])):
            path, end = walk(top, tokens), len(tokens)
            at, node = sum(fits for _, fits in path), (path[-1][0] if path else top)
            bare = kind == "state" and not rows.cuttable(cache)
            if at < (start if not bare else 0) or (at < end and kind == "state" and not bare):
                continue  # what it continues is missing
            if path and path[-1][1] < node.length and (at < end or kind == "state"):
                node = self._tree.split(node, path[-1][1])
            if at < end:
                block = Block([] if bare else None, end - at, None if bare else name, at - start)
                node = Node(tokens[at:], node, block, 0)
                self._tree.attach(node)
            if kind == "state" and node.state is None:
                self._tree.dismiss(node)
                node.state = State(None, name)

    def _load_rows(self, node: Node, cache: KVCache, model: Any, key: Key) -> None:
        """Read the rows of a node; other nodes of the same file share them."""
        assert self.folder is not None and node.block.file is not None
        name = node.block.file
        block = self._blocks.get((name, key.place))
        if block is None or block.tables is None:
            description, tensors = files.unpack(self.folder, name)
            start, end = description["start"], len(description["tokens"])
            devices = storage.layer_devices(model, len(cache.layers))
            wanted = [devices[index] for index in rows.cuttable(cache)]
            path = torch.cat([each.tokens for each in node.path()])
            try:
                if not torch.equal(torch.tensor(description["tokens"])[: len(path)], path[:end]):
                    raise ValueError("rows of other tokens")
                tables = rows.rows_from_file(tensors, start, end - start, wanted)
            except ValueError as error:
                raise files.DamagedFile(f"{name}: {error}", name) from error
            block = Block(tables, end - start, name)
            self._blocks[name, key.place] = block
            self.folder.touch(name)
        node.start += node.block.offset
        node.block = block

    def _load_state(self, node: Node, cache: KVCache, model: Any) -> None:
        assert self.folder is not None and node.state is not None and node.state.file is not None
        name = node.state.file
        description, tensors = files.unpack(self.folder, name)
        devices = storage.layer_devices(model, len(cache.layers))
        try:
            path = torch.cat([each.tokens for each in node.path()])
            if description["tokens"] != path.tolist():
                raise ValueError("a state of other tokens")
            loaded = rows.state_from_file(description.get("layers"), tensors, self.new_cache(model), len(path), devices)
        except ValueError as error:
            raise files.DamagedFile(f"{name}: {error}", name) from error
        node.state.layers = loaded.layers
        self._tree.dismiss(node)
        self.folder.touch(name)

    def _unwritten(self, node: Node) -> list[tuple[str, list[int], int, Any]]:
        """What of the path to a node is in memory only: (kind, token ids up to its end, start, contents)."""
        if self.folder is None:
            return []
        found: list[tuple[str, list[int], int, Any]] = []
        ids: list[int] = []
        for each in node.path():
            start = len(ids)
            ids = ids + each.tokens.tolist()
            block = each.block
            if block.tables and block.file is None:
                tables = block.cut(each.start, each.start + each.length)
                found.append(("rows", ids, start, (block, each.start, tables)))
            if each.state is not None and each.state.layers is not None and each.state.file is None:
                found.append(("state", ids, len(ids), each.state))
        return found

    def _write(self, key: str, writes: list[tuple[str, list[int], int, Any]]) -> None:
        """Write entries, outside of the lock. What cannot be written stays in memory, with one warning."""
        assert self.folder is not None
        for kind, ids, start, contents in writes:
            description: dict[str, Any] = {"kind": kind, "key": key, "start": start, "tokens": ids}
            description["format_version"] = files.FORMAT_VERSION
            name = f"{key}/{files.name_of(description)}"
            try:
                if name in self._bad or not self.folder.exists(name):
                    if kind == "rows":
                        tensors = rows.rows_to_file(contents[2])
                    else:
                        description["layers"], tensors = rows.state_to_file(contents)
                    self.folder.write(name, files.pack(description, tensors))
                    self._bad.discard(name)
            except NotImplementedError as error:
                self._warn(f"form {error}", f"{error}; such entries stay in memory")
                continue
            except Exception as error:  # of the file system, or of whatever fsspec stands for
                self._warn("write", f"{self.folder.path}: an entry could not be written ({error}); it stays in memory")
                continue
            with self._lock:
                if kind == "state":
                    contents.file = name
                elif contents[0].file is None:
                    self._tree.filed(contents[0], contents[1], len(ids) - start, name)
        if self.max_disk_bytes is not None and writes:
            self._trim_files()

    def _trim_files(self) -> None:
        assert self.folder is not None and self.max_disk_bytes is not None
        try:
            held = self.folder.sizes()
            total = sum(size for _, size, _ in held)
            for _, size, name in held:
                if total <= self.max_disk_bytes:
                    break
                self.folder.remove(name)
                total -= size
        except Exception as error:
            self._warn("trim", f"{self.folder.path}: old entries could not be removed ({error})")

    def _warn(self, about: str, text: str) -> None:
        """A warning, once for each thing."""
        if about not in self._warned:
            self._warned.add(about)
            level, frame = 1, sys._getframe()
            while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("hf_kvcache."):
                level, frame = level + 1, frame.f_back
            warnings.warn(f"PrefixStore: {text}", RuntimeWarning, stacklevel=level)


def _check_content(ids: torch.Tensor, inputs: dict[str, Any]) -> None:
    if inputs and ids.shape[0] > 1:
        raise ValueError(
            f"{', '.join(sorted(inputs))}: with such inputs a prefix is shared one row at a time, because which "
            "of them belong to which row is the model's business"
        )


def _ids(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """Ids `[B, T]` on the CPU; `ValueError` where some are padding."""
    if not isinstance(input_ids, torch.Tensor) or input_ids.ndim != 2 or input_ids.is_floating_point():
        raise ValueError(f"`input_ids` must be token ids [batch, tokens], got {type(input_ids).__name__}")
    if attention_mask is not None and not bool((attention_mask != 0).all()):
        raise ValueError(
            "these rows are padded, and padding stands before the prefix, so they cannot share one. Use "
            "`store.generate`, which moves the padding, or take the rows one at a time without padding."
        )
    return input_ids.detach().to("cpu", torch.int64)
