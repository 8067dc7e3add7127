"""CrossLayerSharedCache: layers that read the rows of an earlier layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from ..cache import KVCache
from ..sharing import Sharing


class CrossLayerSharedCache(KVCache):
    """Keep the rows of some layers only; the others attend over those. Lossy on a model that was not trained for it.

    CLA, arXiv 2405.12981 (adjacent layers, with training); KVSharer, arXiv 2410.18517 (a map found by calibration).
    Bytes per token: `2 * Hkv * D * bytes(dtype) + 4` for each layer that is nobody's follower; exactly half of a
    `KVCache` at `sharing=2` and an even number of layers.

    Args:
        model_or_config: the model (it is attached), or its config.
        sharing: how many adjacent layers of one kind share (2: layer 2i is the source of layer 2i + 1); or a map
            `{follower: source}`, sources being earlier layers of the same kind that follow nobody; or what
            `find_sharing` returned. It costs much less than adjacent pairs on a model that was not trained to share.
        scope, policy, codec and other parts: as in `KVCache`. What a policy drops is decided by the attention of all
            layers that read the rows.

    `hf_kvcache.patches.cross_layer` leaves out the projections that followers no longer need.

    Raises:
        ValueError: a map that names layers which cannot share, or of another model.
        NotImplementedError: models that share natively (Gemma 3n), that cache latents (MLA), or without two layers of
            one kind.
    """

    def __init__(
        self,
        model_or_config: PreTrainedModel | PreTrainedConfig,
        sharing: int | Mapping[int, int] | Sharing = 2,
        scope: str = "full",
        **parts: Any,
    ) -> None:
        if sharing is None:
            raise ValueError(f"{type(self).__name__} needs `sharing`: a factor, or a map {{follower: source}}")
        super().__init__(model_or_config, sharing=sharing, scope=scope, **parts)
