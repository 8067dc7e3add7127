"""The arithmetic that papers print beside what a cache really holds.

A figure such as "4 bits: a quarter" counts codes alone. What is held has scales and zeros, positions, an exact window,
and room to grow too. Six lines, as in surveys of the field: the model with a KV head for each query head (MHA), as it
is (GQA), with latents of 6.7% (MLA), in 4 and in 2 bits, and with a twentieth of the MHA rows (H2O).
"""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass
from typing import Any

from ..mla import plan_mla
from ..specs import parse_spec
from .sizes import ModelSizes, measure_sizes
from .table import Sized, converted

MLA_KEEP, H2O_SHARE = 0.067, 1 / 20


@dataclass
class SurveyRow:
    """One line.

    Attributes:
        name: as surveys call it.
        counted: bytes by the papers' arithmetic: numbers times bits, nothing else.
        scales: whether the counted figure includes scales and zeros; None where the method has none.
        held: bytes that this library's cache holds, everything included.
        cache: how that one is made.
        left_out: what is in `held` and not in `counted`.
    """

    name: str
    counted: int
    scales: bool | None
    held: int
    cache: str
    left_out: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def survey(sizes: ModelSizes, context: int, batch: int) -> list[SurveyRow]:
    """The six lines for a model of full attention with plain heads. Raises `NotImplementedError` for others.

    The lines of MLA and H2O are left out for models that cannot be converted, or from which no tokens can be dropped.
    """
    decoder = sizes.decoder
    shapes = {layer.shape for layer in sizes.layers}
    plain = all(layer.kind == "DynamicLayer" for layer in sizes.layers) and len(shapes) == 1 and None not in shapes
    if not plain or getattr(decoder, "kv_lora_rank", None) is not None:
        raise NotImplementedError(
            f"{sizes.name}: the survey's lines are for models whose layers all keep keys and values of plain heads; "
            "leave --survey out"
        )
    as_mha = copy.deepcopy(sizes.config)
    as_mha.get_text_config(decoder=True).num_key_value_heads = decoder.num_attention_heads
    mha = measure_sizes(as_mha, sizes.dtype, sizes.name)
    layers, bits = len(sizes.layers), 8 * sizes.dtype.itemsize
    full, grouped = mha.native_bytes(batch, context), sizes.native_bytes(batch, context)
    shape = sizes.layers[0].shape
    assert shape is not None
    plan = plan_mla(mha.decoder, MLA_KEEP)
    latent = layers * (plan.kv_lora_rank + plan.qk_rope_head_dim) * sizes.dtype.itemsize * batch * context
    room = "positions (4 bytes a token and layer) and room to grow"
    rows = [
        SurveyRow("MHA", full, None, _held(mha, "kv", context, batch), "kv, on as many KV heads as heads", room),
        SurveyRow(f"GQA-{shape[0]}", grouped, None, _held(sizes, "kv", context, batch), "kv", room),
    ]
    held = converted(mha, MLA_KEEP)
    if held is not None:
        name = f"MLA at {MLA_KEEP:.1%} of MHA"
        made = f"convert_to_mla(kv_keep={MLA_KEEP}) of MHA"
        rows.append(SurveyRow(name, latent, None, held(batch, context), made, room))
    for width in (4, 2):
        spec = f"kivi:nbits={width}"
        left = "scales and zeros (1 bit an element), 128 exact tokens, " + room
        rows.append(
            SurveyRow(
                f"GQA + INT{width}", grouped * width // bits, False, _held(sizes, spec, context, batch), spec, left
            )
        )
    spec = f"h2o:heavy_ratio={H2O_SHARE / 2},recent_ratio={H2O_SHARE / 2}"
    left = "a score and a position for each row"
    counted = round(full * H2O_SHARE)
    try:
        rows.append(SurveyRow("H2O at 20x of MHA", counted, None, _held(mha, spec, context, batch), spec, left))
    except NotImplementedError:  # attention code of its own: the other lines hold for it too
        pass
    return rows


def _held(sizes: ModelSizes, spec: str, context: int, batch: int) -> int:
    return Sized(sizes, parse_spec(spec)).total(batch, context)
