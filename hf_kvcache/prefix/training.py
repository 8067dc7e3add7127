"""Training on texts that all begin with one template, whose keys and values are computed once."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import DynamicCache

from ..cache import KVCache, _model_and_config
from . import rows
from .generate import cache_name, read


def prefix_training(
    model: Any, prefix_ids: torch.Tensor, refresh_every: int | None = None, approximate: bool = False
) -> PrefixTraining:
    """Reuse the keys and values of a fixed template in every training step; see `PrefixTraining`."""
    return PrefixTraining(model, prefix_ids, refresh_every, approximate)


class PrefixTraining:
    """Steps of supervised training that do not compute the template again.

    The template's keys and values are constants, shared by all rows of a batch. That is *exact*, in value and in
    gradient, where they depend on no weight that is trained: adapters in the upper layers only, and no trained key or
    value projection that the template passes through, up to the last layer. Otherwise it is an *approximation* in the
    layers `stale_layers`: values are those of the last refresh, and the gradient through the template's own tokens is
    left out. (It is exact again for a model that is also *served* so: with the template read by the weights it was
    read by here, as from a file.)

    Bytes: one full-precision row of keys and values for each token of the template, once for all rows.

    Args:
        model: a transformers model, or a wrapper of one (PEFT), which is then called.
        prefix_ids: `[T]` or `[1, T]`, two tokens at least.
        refresh_every: compute the template anew every so many training steps (where it is an approximation).
        approximate: accept that it is one, without refreshing.

    Attributes:
        stale_layers: layers where the template's keys or values depend on weights that are trained.
        exact: whether there are none.

    Raises:
        ValueError: an approximation that was not asked for; gradient checkpointing, which drops every cache.
        NotImplementedError: models with recurrent states, and those whose prefix depends on what follows.
    """

    def __init__(self, model: Any, prefix_ids: torch.Tensor, refresh_every: int | None, approximate: bool) -> None:
        from .store import PrefixStore

        ids = prefix_ids if prefix_ids.ndim == 2 else prefix_ids[None]
        if ids.shape[0] != 1 or ids.shape[1] < 2 or ids.is_floating_point():
            raise ValueError(f"`prefix_ids` must be one row of at least two token ids, got {tuple(prefix_ids.shape)}")
        whole = isinstance(refresh_every, int) and not isinstance(refresh_every, bool) and refresh_every > 0
        if refresh_every is not None and not whole:
            raise ValueError(f"`refresh_every` must be a positive number of steps, got {refresh_every!r}")
        self.model = model
        self.inner = PrefixStore(max_bytes=1).check_model(model)
        self.ids = ids.to(self.inner.device)
        self.refresh_every = refresh_every
        self.stale_layers = self._stale_layers()
        if self.stale_layers and not approximate and refresh_every is None:
            raise ValueError(
                f"the template's keys and values depend on weights that are trained, in layers {self.stale_layers}, so "
                "reusing them is an approximation. Train fewer weights (adapters in the upper layers), or say that you "
                "want it: `refresh_every=steps` or `approximate=True`."
            )
        self.steps = 0
        self.refresh()

    @property
    def exact(self) -> bool:
        return not self.stale_layers

    @property
    def nbytes(self) -> int:
        """Bytes of the template's rows."""
        return self._cache.nbytes

    def refresh(self) -> None:
        """Compute the template anew (without dropout), up to its last token: that one is fed with every text, because
        what is predicted after it is trained."""
        cache = KVCache(self.inner)
        if any(hasattr(layer, "conv_states") for layer in cache.layers):
            raise NotImplementedError(
                f"{type(self.inner).__name__} keeps recurrent states, which training cannot share"
            )
        training = self.inner.training
        self.inner.eval()
        try:
            read(self.inner, cache, self.ids[:, :-1])
        finally:
            self.inner.train(training)
        rows.free(cache)
        self._cache = cache

    def __call__(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """The model's output for texts `[B, T]` that follow the template (padded on either side).

        `logits` are `[B, 1 + T, V]`: the first are those after the template, for the first token of each text. The loss
        is that of the whole texts with the template left out of the labels.
        """
        if getattr(self.inner, "is_gradient_checkpointing", False) and self.inner.training:
            raise ValueError("gradient checkpointing drops every cache: call `model.gradient_checkpointing_disable()`")
        if self.inner.training and torch.is_grad_enabled():
            if self.refresh_every is not None and self.steps and self.steps % self.refresh_every == 0:
                self.refresh()
            self.steps += 1
        batch, held = input_ids.shape[0], self.ids.shape[1] - 1
        last = self.ids[:, -1:].expand(batch, -1).to(input_ids.device)
        if attention_mask is not None:
            before = attention_mask.new_ones(batch, held + 1)
            attention_mask = torch.cat([before, attention_mask], dim=1)
            kwargs["position_ids"] = (attention_mask.long().cumsum(-1) - 1)[:, held:]
        if labels is not None:
            labels = torch.cat([labels.new_full((batch, 1), -100), labels], dim=1)
        cache = copy.deepcopy(self._cache)
        rows.spread(cache, batch)
        output = self.model(
            input_ids=torch.cat([last, input_ids], dim=1),
            attention_mask=attention_mask,
            labels=labels,
            use_cache=True,
            **{cache_name(self.inner): cache},
            **kwargs,
        )
        for name in ("cache", "past_key_values"):
            if name in output:
                output[name] = None  # it holds the graph of this step
        return output

    def _stale_layers(self) -> list[int]:
        """Where autograd finds a trained weight behind the keys or values of a few tokens."""
        _, config = _model_and_config(self.model)
        cache = DynamicCache(config=config)
        with torch.enable_grad():
            self.inner(input_ids=self.ids[:, :2], use_cache=True, **{cache_name(self.inner): cache})
        found = []
        for index, layer in enumerate(cache.layers):
            tensors = [vars(layer).get("keys"), vars(layer).get("values")]
            if any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors):
                found.append(index)
        return found
