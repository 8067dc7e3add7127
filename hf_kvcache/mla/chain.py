"""The decoder layers of a model one at a time, each on what the one before gave.

So a model is run layer by layer over many windows, with one hidden state of each window in memory, and weights may
change before the next layer sees what they give. What a layer is handed besides hidden states (rotary tables, masks) is
recorded from a pass of the model itself, which also shows whether its layers form such a chain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .moments import run


class _Stop(Exception):
    """Raised in a hook, where the rest of a pass is of no use."""


class Chain:
    """The decoder layers that hold the attention modules `names` of a model.

    Attributes:
        adds: by layer, whether its attention's output is added to the hidden state as it is.

    Raises `NotImplementedError` for models whose layers do not form a chain.
    """

    def __init__(self, model: PreTrainedModel, names: list[str]) -> None:
        self.model, self.names = model, names
        self.attention: list[Any] = [model.get_submodule(name) for name in names]
        self.layers: list[Any] = [model.get_submodule(name.rpartition(".")[0]) for name in names]
        self.adds = [False] * len(names)
        self._handed: dict[int, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {}

    def start(self, ids: torch.Tensor) -> torch.Tensor:
        """What goes into the first layer for token ids `[1, T]`. The first call of each length runs the whole model."""
        if ids.shape[1] not in self._handed:
            self._record(ids)
        found: list[torch.Tensor] = []

        def first(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found.append(_hidden(args, kwargs))
            raise _Stop

        with _hooked([self.layers[0].register_forward_pre_hook(first, with_kwargs=True)]):
            try:
                run(self.model, ids)
            except _Stop:
                pass
        return found[0]

    def tables(self, index: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """The rotary table `(cos, sin)`, each `[T, D / 2]` or wider, of a layer, by length of the window."""
        tables = {}
        for length, handed in self._handed.items():
            cos, sin = handed[index][1]["position_embeddings"]
            tables[length] = (cos[0], sin[0])
        return tables

    def run(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """What a layer gives for `[1, T, hidden]`."""
        args, kwargs = self._handed[hidden.shape[1]][index]
        return _first(self.layers[index](hidden, *args, **kwargs))

    def watched(self, index: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What a layer gives, and what comes into and out of its attention, `[T, hidden]`."""
        found: list[torch.Tensor] = []

        def seen(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            found.extend((_hidden(args, kwargs)[0], _first(output)[0]))

        with _hooked([self.attention[index].register_forward_hook(seen, with_kwargs=True)]):
            output = self.run(index, hidden)
        return output, found[0], found[1]

    def input(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """What comes into a layer's attention, `[T, hidden]`."""
        found: list[torch.Tensor] = []

        def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found.append(_hidden(args, kwargs)[0])
            raise _Stop

        with _hooked([self.attention[index].register_forward_pre_hook(stop, with_kwargs=True)]):
            try:
                self.run(index, hidden)
            except _Stop:
                pass
        return found[0]

    def _record(self, ids: torch.Tensor) -> None:
        handed: list[Any] = [None] * len(self.layers)
        last: list[torch.Tensor] = []
        state: dict[str, Any] = {}

        def before(index: int) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                hidden = _hidden(args, kwargs)
                if index and not (last and _same(last[0], hidden)):
                    raise NotImplementedError(
                        f"{type(self.model).__name__}: {type(module).__name__} {index} is not handed what the layer "
                        "before it gave, so its layers cannot be run one at a time"
                    )
                rest = {name: value for name, value in kwargs.items() if name != "hidden_states"}
                handed[index] = (args[1:] if args else (), rest)
                state.update(hidden=hidden, output=None)

            return hook

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            last[:] = [_first(output)]

        def attended(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            state["output"] = _first(output)

        def inside(index: int) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
                given = args[0] if args and isinstance(args[0], torch.Tensor) else None
                if given is not None and state["output"] is not None and given.shape == state["hidden"].shape:
                    self.adds[index] |= _same(given, state["hidden"] + state["output"])

            return hook

        handles = []
        for index, (layer, attention) in enumerate(zip(self.layers, self.attention, strict=True)):
            handles.append(layer.register_forward_pre_hook(before(index), with_kwargs=True))
            handles.append(layer.register_forward_hook(after))
            handles.append(attention.register_forward_hook(attended))
            others = [child for child in layer.children() if child is not attention]
            handles += [child.register_forward_pre_hook(inside(index)) for child in others]
        with _hooked(handles):
            run(self.model, ids)
        if any(entry is None or "position_embeddings" not in entry[1] for entry in handed):
            raise NotImplementedError(
                f"{type(self.model).__name__}: its layers are not handed a rotary table by the name of "
                "`position_embeddings`, so they cannot be run one at a time"
            )
        self._handed[ids.shape[1]] = handed


@contextmanager
def _hooked(handles: list[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    return kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]


def _first(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output[0]


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool(torch.equal(a.to(b.device), b))
