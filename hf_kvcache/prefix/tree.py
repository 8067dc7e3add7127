"""A radix tree over token ids, whose nodes hold read-only rows, and the count of the bytes that they keep.

Nothing here knows of models, files or threads: the store does, and holds its lock around every call.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..segments import Rows
from ..segments.dense import storages_of


@dataclass(eq=False)
class Block:
    """Rows that lie in the same buffers: a table `[1, H, N, D]` for each layer that can be cut at any token.

    `tables` is None while the rows are only in `file`, whose row `offset` is the first one here.
    """

    tables: list[Rows] | None
    length: int
    file: str | None = None
    offset: int = 0
    nodes: set[Node] = field(default_factory=set)  # those that are resident

    def cut(self, start: int, stop: int) -> list[Rows]:
        assert self.tables is not None
        return [rows.map(lambda t: t[:, :, start:stop]) for rows in self.tables]


@dataclass(eq=False)
class State:
    """What the layers that cannot be cut hold at the end of a node: `{layer: a layer object}`, or None: in `file`."""

    layers: dict[int, Any] | None
    file: str | None = None


class Node:
    """A run of tokens, the rows of it, and what continues it.

    `start` is the row of `block` at which the run begins. `users` are the caches that hold these rows.
    """

    def __init__(self, tokens: torch.Tensor, parent: Node | None, block: Block, start: int) -> None:
        self.tokens = tokens
        self.parent = parent
        self.block = block
        self.start = start
        self.children: dict[int, Node] = {}
        self.state: State | None = None
        self.pinned = False
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        self.counted: dict[int, int] = {}  # the storages that this node keeps, while it is resident

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def end(self) -> int:
        """Tokens from the root to the end of this run."""
        return self.length + (self.parent.end if self.parent is not None else 0)

    @property
    def is_resident(self) -> bool:
        return self.block.tables is not None and (self.state is None or self.state.layers is not None)

    @property
    def is_filed(self) -> bool:
        """Whether everything can be read back from files."""
        rows = self.block.file is not None or self.block.tables == []
        return rows and (self.state is None or self.state.file is not None)

    def path(self) -> list[Node]:
        """The nodes from below the root to this one."""
        above = self.parent.path() if self.parent is not None and self.parent.parent is not None else []
        return [*above, self]

    def below(self) -> Iterator[Node]:
        """This node and all that continue it."""
        stack = [self]
        while stack:
            node = stack.pop()
            stack += node.children.values()
            yield node


def root() -> Node:
    return Node(torch.empty(0, dtype=torch.int64), None, Block([], 0), 0)


def common_length(a: torch.Tensor, b: torch.Tensor) -> int:
    """How many first elements of two vectors are equal."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.to(torch.int8).argmax()) if bool(differ.any()) else n


def walk(top: Node, ids: torch.Tensor) -> list[tuple[Node, int]]:
    """The nodes along `ids` and how many tokens of each fit; only the last one may fit in part."""
    found: list[tuple[Node, int]] = []
    node, at = top, 0
    while at < len(ids):
        child = node.children.get(int(ids[at]))
        if child is None:
            break
        fits = common_length(child.tokens, ids[at:])
        found.append((child, fits))
        at += fits
        if fits < child.length:
            break
        node = child
    return found


class Tree:
    """Nodes under any number of roots, in order of use, and the bytes that they hold: each storage once."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.order: OrderedDict[Node, None] = OrderedDict()  # resident nodes, the one used longest ago first
        self._held: dict[int, list[int]] = {}  # storage -> [nodes that keep it, bytes]

    def admit(self, node: Node) -> None:
        """Count a node whose rows are in memory."""
        if node in self.order:
            self.dismiss(node)
        assert node.block.tables is not None
        tensors = [t for rows in node.block.tables for t in rows.tensors().values()]
        if node.state is not None:
            tensors += tensors_of(node.state.layers)
        node.counted = storages_of(tensors)
        for pointer, size in node.counted.items():
            entry = self._held.setdefault(pointer, [0, size])
            if not entry[0]:
                self.nbytes += size
            entry[0] += 1
        node.block.nodes.add(node)
        self.order[node] = None

    def dismiss(self, node: Node) -> None:
        """Count a node no longer."""
        if node not in self.order:
            return
        del self.order[node]
        node.block.nodes.discard(node)
        for pointer in node.counted:
            entry = self._held[pointer]
            entry[0] -= 1
            if not entry[0]:
                self.nbytes -= entry[1]
                del self._held[pointer]
        node.counted = {}

    def merge_up(self, node: Node) -> Node:
        """Join a run with the one before it, by copying, while that one is not much longer and nothing else needs it.

        Attention goes over each run by itself, so a conversation of many turns should not be many runs. Each row is
        copied about as often as its text doubles.
        """
        while True:
            above = node.parent
            if above is None or above.parent is None or len(above.children) > 1 or above.length > 2 * node.length:
                return node
            if above.pinned or above.state is not None or not (node.block.tables and above.block.tables):
                return node
            cuts = [each.block.cut(each.start, each.start + each.length) for each in (above, node)]
            tables = [
                Rows(**{name: torch.cat([t, below.tensors()[name]], dim=2) for name, t in rows.tensors().items()})
                for rows, below in zip(*cuts, strict=True)
            ]
            whole = Node(torch.cat([above.tokens, node.tokens]), above.parent, Block(tables, tables[0].length), 0)
            whole.children, whole.state, whole.pinned = node.children, node.state, node.pinned
            for child in whole.children.values():
                child.parent = whole
            whole.users = weakref.WeakSet([*above.users, *node.users])
            blocks = {above.block, node.block}
            self.dismiss(above)
            self.dismiss(node)
            self.attach(whole)
            for block in blocks:
                self._compact(block)
            node = whole

    def touch(self, node: Node) -> None:
        """Note a use of a node, and so of those that lead to it (which are then used later than it)."""
        for each in reversed(node.path()):
            if each in self.order:
                self.order.move_to_end(each)

    def attach(self, node: Node) -> Node:
        """Hang a new node, whose parent is set, into the tree."""
        assert node.parent is not None
        node.parent.children[int(node.tokens[0])] = node
        if node.is_resident:
            self.admit(node)
        return node

    def split(self, node: Node, length: int) -> Node:
        """Cut a node in two after `length` tokens, and return the first half. No rows are copied."""
        assert node.parent is not None and 0 < length < node.length
        resident = node in self.order
        self.dismiss(node)
        upper = Node(node.tokens[:length], node.parent, node.block, node.start)
        upper.users = weakref.WeakSet(node.users)
        node.parent.children[int(node.tokens[0])] = upper
        node.tokens, node.start, node.parent = node.tokens[length:], node.start + length, upper
        upper.children[int(node.tokens[0])] = node
        if resident:
            self.admit(node)
            self.admit(upper)
        return upper

    def remove(self, node: Node) -> None:
        """Take a node and all that continue it out of the tree."""
        for each in list(node.below()):
            self.dismiss(each)
        if node.parent is not None:
            node.parent.children.pop(int(node.tokens[0]), None)

    def leaf(self) -> Node | None:
        """The node to give up first: not pinned, nothing resident continues it, preferably in use by no cache."""
        used = None
        for node in self.order:
            if node.pinned or any(child in self.order for child in node.children.values()):
                continue
            if not len(node.users):
                return node
            used = used or node
        return used

    def evict(self, node: Node) -> None:
        """Free the memory of a leaf; it stays in the tree if it can be read back from files."""
        block, pinned_below = node.block, any(each.pinned for each in node.below())
        if node.is_filed:
            self.dismiss(node)
            if node.state is not None:
                node.state = State(None, node.state.file)
            if not block.nodes:
                block.tables = None if block.tables else block.tables
            elif block.tables:
                node.block, node.start = Block(None, node.length, block.file, block.offset + node.start), 0
        elif not pinned_below:
            self.remove(node)
        self._compact(block)

    def filed(self, block: Block, start: int, rows: int, file: str) -> None:
        """Note that the rows `start : start + rows` of a block are in a file, which holds nothing else."""
        inside = [node for node in block.nodes if start <= node.start and node.start + node.length <= start + rows]
        if len(inside) == len(block.nodes):
            block.file, block.offset = file, -start
            return
        own = Block(block.tables, block.length, file, -start)
        for node in inside:
            self.dismiss(node)
            node.block = own
            self.admit(node)

    def _compact(self, block: Block) -> None:
        """Give the nodes that are left of a block rows of their own, so that the rest of it is freed."""
        left = list(block.nodes)
        if not left or block.tables is None or sum(node.length for node in left) >= block.length:
            return
        for node in left:
            self.dismiss(node)
            tables = [rows.map(torch.clone) for rows in block.cut(node.start, node.start + node.length)]
            node.block = Block(tables, node.length, block.file, block.offset + node.start)
            node.start = 0
            self.admit(node)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Every tensor that a layer, or a collection of layers, holds."""
    found: list[torch.Tensor] = []
    visited: set[int] = set()
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, dict):
            stack += item.values()
        elif isinstance(item, (list, tuple)):
            stack += item
        elif hasattr(item, "__dict__") and not isinstance(item, type) and id(item) not in visited:
            visited.add(id(item))
            # The codec's own matrices are the same for everyone.
            stack += [v for name, v in vars(item).items() if name not in ("_codec", "_turns", "make")]
    return found
