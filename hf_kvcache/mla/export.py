"""`export_deepseek_v3`: a converted model as a standard DeepSeek-V3 checkpoint, which needs this package no more."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import DeepseekV3Config, PreTrainedModel

from .deepseek import EPS, Fold, Rotary, attention_tensors, bias_of, fold_of, rotary_of
from .folder import ShardWriter, bytes_of, new_folder, write_tokenizer
from .module import MLAAttention
from .probe import Probe, check_layers, probe

_LAYER = ("input_layernorm", "post_attention_layernorm", "self_attn", "mlp")
_MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass
class ExportReport:
    """What `export_deepseek_v3` wrote; `print` it for a summary.

    Attributes:
        kv_lora_rank, qk_rope_head_dim: sizes of all layers. Smaller ones of single layers are filled up with zeros.
        elements, elements_before: cached numbers of a token, all layers: exported, and of the converted model.
        rope: "default" or "longrope".
        fold_error: relative error of the folded norm of the latents, the largest of the layers.
        stream_scale: factor of the residual stream, 1 where the format has the model's own `eps`.
        difference: largest difference of a layer's output (and of the logits) from the model's, relative to its
            largest value, on a few tokens.
        nbytes: of the weights.
    """

    path: str
    target: str
    dtype: str
    kv_lora_rank: int
    qk_rope_head_dim: int
    elements: int
    elements_before: int
    rope: str
    fold_error: float
    stream_scale: float
    difference: float
    nbytes: int
    layers: list[dict[str, Any]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"{self.path}: DeepseekV3ForCausalLM for {self.target}, {self.dtype}, {self.nbytes:,} bytes",
            f"rank {self.kv_lora_rank}, rotary key {self.qk_rope_head_dim} ({self.rope} RoPE): {self.elements} cached "
            f"numbers a token, {self.elements_before} in the converted model",
            f"norm of the latents folded to {self.fold_error:.1e}; residual stream times {self.stream_scale:.6g}; "
            f"layers and logits differ by {self.difference:.1e}",
        ]
        return "\n".join(lines)


@torch.no_grad()
def export_deepseek_v3(
    model: PreTrainedModel,
    path: str | os.PathLike[str],
    target: str = "hf",
    *,
    tokenizer: Any = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
) -> ExportReport:
    """Write a converted model as a dense `DeepseekV3ForCausalLM`, for programs that do not know this package.

    The same model but for rounding. Weights are computed in float64, layer by layer, and every layer is held against
    the model's own before anything gets its name. Layers that were converted to different sizes are filled up with
    zeros to the largest (`convert_to_mla(..., rotary="uniform")` makes them alike).

    Args:
        model: what `convert_to_mla` returned, or such a model loaded again. It is left as it is.
        path: the folder to write: safetensors, config, generation config, tokenizer.
        target: "hf" for transformers, which can have biases and any frequencies ("longrope" factors); "vllm" for vLLM,
            which has default RoPE only (`convert_to_mla(..., rotary="default")`) and no biases. What is written for
            "vllm" is read by transformers too.
        tokenizer: saved with it. Without one, its files are copied from the local folder the model came from, if any.
        dtype: of the weights: float32, float64 or bfloat16; the model's own if None. Better computed from a float32
            model than from one that is rounded already.
        max_shard_size: of a file.
        overwrite: whether to replace what is in `path`.

    Raises:
        ValueError: not a converted model, a target or dtype that is not known, a folder that is not empty.
        NotImplementedError: what the format or the target cannot express: float16, windows, soft caps, norms of queries
            or keys, biases (vLLM) and biases of the MLP, other layers than Llama's, other activations than SiLU (vLLM),
            rotary tables that vLLM has not; see the message.
        OSError: the disk has no room for it. Checked before anything is written.
    """
    if target not in ("hf", "vllm"):
        raise ValueError(f"`target` must be 'hf' or 'vllm', got {target!r}")
    shard = bytes_of(max_shard_size)
    modules = _modules(model)
    dtype = model.dtype if dtype is None else dtype
    _check(model, modules, target, dtype)
    rotary = rotary_of(model, modules, target)
    rank = max(module.kv_lora_rank for module in modules)
    seen = probe(model, modules)
    plan = _Plan(model, modules, rotary, rank, target, dtype, seen)
    nbytes = plan.nbytes()
    with new_folder(path, nbytes, overwrite, getattr(model.config, "_name_or_path", None) or None) as folder:
        writer = ShardWriter(folder, shard)
        difference = check_layers(plan.config, seen, plan.layer, plan.ends(), plan.stream)
        for name, tensor in plan.tensors():
            writer.add(name, tensor.to(dtype).contiguous())
        writer.close()
        if writer.total != nbytes:
            raise RuntimeError(f"wrote {writer.total} bytes of weights instead of {nbytes}")
        write_tokenizer(folder, tokenizer, getattr(model.config, "_name_or_path", None))
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(folder)
        # Last: without it nothing takes the folder for a model.
        plan.config.save_pretrained(folder)
        _check_config(folder / "config.json")
    before = sum(module.kv_lora_rank + module.qk_rope_head_dim for module in modules)
    layers = [
        {
            "kv_lora_rank": m.kv_lora_rank,
            "qk_rope_head_dim": m.qk_rope_head_dim,
            "scale": f.scale,
            "fold_error": f.error,
        }
        for m, (f, _) in zip(modules, plan.folds, strict=True)
    ]
    return ExportReport(
        path=os.fspath(path),
        target=target,
        dtype=str(dtype).removeprefix("torch."),
        kv_lora_rank=rank,
        qk_rope_head_dim=rotary.size,
        elements=(rank + rotary.size) * len(modules),
        elements_before=before,
        rope=rotary.parameters["rope_type"],
        fold_error=max(fold.error for pair in plan.folds for fold in pair if fold is not None),
        stream_scale=plan.stream,
        difference=difference,
        nbytes=nbytes,
        layers=layers,
    )


def _modules(model: Any) -> list[MLAAttention]:
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"expected a model that `convert_to_mla` converted, got {type(model).__name__} (merge adapters first: "
            "`hf_kvcache.merge_healed`)"
        )
    modules = [module for module in model.modules() if isinstance(module, MLAAttention)]
    if not modules:
        raise ValueError(
            f"{type(model).__name__} has no converted attention: convert it first (`hf_kvcache.convert_to_mla`; its "
            "form='pre_rope' keeps the original weights, and is exported by saving the original model)"
        )
    return modules


def _check(model: Any, modules: list[MLAAttention], target: str, dtype: torch.dtype) -> None:
    name = type(model).__name__

    def refuse(why: str) -> NotImplementedError:
        return NotImplementedError(f"{name} cannot be exported as DeepSeek-V3 for target={target!r}: {why}")

    if dtype not in (torch.float32, torch.float64, torch.bfloat16):
        raise refuse(
            f"{dtype} has too small a range for latents that are scaled down to fold their norm away (or is no dtype "
            "of weights): give dtype=torch.bfloat16 or torch.float32"
        )
    layers = getattr(getattr(model, "model", None), "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) != len(modules):
        raise refuse("its layers are not where Llama's are (`model.layers`), or some have no converted attention")
    for index, layer in enumerate(layers):
        missing = [part for part in _LAYER if not hasattr(layer, part)]
        missing += [f"mlp.{part}" for part in _MLP if not hasattr(getattr(layer, "mlp", None), part)]
        if missing or layer.self_attn is not modules[index]:
            raise refuse(f"layer {index} is not like Llama's (it has no {', '.join(missing) or 'self_attn'})")
        for part in _MLP:
            if bias_of(getattr(layer.mlp, part)) is not None:
                raise refuse(f"mlp.{part} has a bias, and the format has none there")
    if bias_of(model.lm_head) is not None:
        raise refuse("its lm_head has a bias, and the format has none there")
    window = getattr(model.config, "max_position_embeddings", None) or 0
    for module in modules:
        dims = module.dims
        if dims.q_norm or dims.k_norm:
            raise refuse("queries or keys are normalized by head, and the format has no such norm")
        if dims.extras.get("softcap"):
            raise refuse("its logits have a soft cap, and the format has none")
        if (dims.extras.get("sliding_window") or window) < window:
            raise refuse(
                f"it has a sliding window of {dims.extras['sliding_window']} tokens, and the format has none (its "
                f"contexts are of {window})"
            )
        if target == "vllm":
            biased = [p for p in ("q_proj", "kv_a_proj_with_mqa", "o_proj") if bias_of(getattr(module, p)) is not None]
            if biased:
                raise refuse(
                    f"{', '.join(biased)} has a bias, and vLLM reads none there: use target='hf' (`--export hf`)"
                )
    activation = getattr(model.config, "hidden_act", None) or getattr(model.config, "hidden_activation", None)
    if target == "vllm" and activation != "silu":
        raise refuse(f"its activation is {activation!r}, and vLLM has 'silu' only: use target='hf' (`--export hf`)")
    for key, tensor in model.state_dict().items():
        if tensor.is_meta:
            raise refuse(f"{key} is not in memory (offloaded by `device_map`): load the model where all of it fits")
        if not tensor.is_floating_point() and not key.endswith("self_attn.frequencies"):
            raise refuse(
                f"{key} is quantized ({tensor.dtype}): load the model without quantization, or merge with "
                "`hf_kvcache.merge_healed`, which gives full precision"
            )
    for module in modules:
        for part in ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"):
            if type(getattr(module, part)) is not nn.Linear:
                kind = type(getattr(module, part)).__name__
                raise refuse(f"{part} is a {kind}, not a plain nn.Linear: merge adapters (`hf_kvcache.merge_healed`)")


def _check_config(path: Any) -> None:
    """What was written must say what was meant, whatever the installed transformers makes of its names."""
    written = json.loads(path.read_text(encoding="utf-8"))
    if written.get("model_type") != "deepseek_v3" or written.get("num_nextn_predict_layers") != 0:
        raise RuntimeError(f"this transformers writes a config that was not expected: {sorted(written)}")


class _Plan:
    """Config, folds and tensors of one export."""

    def __init__(
        self,
        model: Any,
        modules: list[MLAAttention],
        rotary: Rotary,
        rank: int,
        target: str,
        dtype: torch.dtype,
        seen: Probe,
    ) -> None:
        self.model, self.modules, self.rotary, self.rank, self.dtype = model, modules, rotary, rank, dtype
        eps = _eps_of(model)
        # vLLM's norm of the latent takes its eps from the config, transformers' has 1e-6: with that, both agree.
        rescaled = target == "vllm" and eps != EPS
        self.stream = (EPS / eps) ** 0.5 if rescaled else 1.0
        self.query_bias = any(bias_of(module.q_proj) is not None for module in modules)
        parts = ("q_proj", "kv_a_proj_with_mqa", "o_proj")
        self.bias = any(bias_of(getattr(module, part)) is not None for module in modules for part in parts)
        self.folds: list[tuple[Fold, Fold | None]] = [
            (fold_of(latent, dtype), fold_of(hidden, dtype) if self.query_bias else None) for latent, hidden in seen.rms
        ]
        self.config = self._config(EPS if rescaled else eps)

    def _config(self, eps: float) -> Any:
        host, first = self.model.config, self.modules[0]
        config = DeepseekV3Config(
            vocab_size=host.vocab_size,
            hidden_size=first.dims.hidden_size,
            intermediate_size=self.model.model.layers[0].mlp.gate_proj.weight.shape[0],
            num_hidden_layers=len(self.modules),
            num_attention_heads=first.num_heads,
            num_key_value_heads=first.num_heads,
            kv_lora_rank=self.rank,
            q_lora_rank=first.dims.hidden_size + 1 if self.query_bias else None,
            qk_rope_head_dim=self.rotary.size,
            qk_nope_head_dim=first.head_dim,
            v_head_dim=first.head_dim,
            # Every layer is dense; readers want numbers of experts all the same.
            first_k_dense_replace=len(self.modules),
            moe_intermediate_size=self.model.model.layers[0].mlp.gate_proj.weight.shape[0],
            n_routed_experts=1,
            n_shared_experts=1,
            num_experts_per_tok=1,
            n_group=1,
            topk_group=1,
            routed_scaling_factor=1.0,
            hidden_act=getattr(host, "hidden_act", None) or getattr(host, "hidden_activation", None),
            max_position_embeddings=host.max_position_embeddings,
            initializer_range=getattr(host, "initializer_range", 0.02),
            rms_norm_eps=eps,
            pad_token_id=host.pad_token_id,
            bos_token_id=host.bos_token_id,
            eos_token_id=host.eos_token_id,
            tie_word_embeddings=False,
            rope_parameters=dict(self.rotary.parameters),
            rope_interleave=True,
            attention_bias=self.bias,
            attention_dropout=float(getattr(host, "attention_dropout", 0.0) or 0.0),
        )
        config.num_nextn_predict_layers = 0
        config.hf_kvcache_norm_folded = True  # `prepare_for_healing` refuses to train it
        config.architectures = ["DeepseekV3ForCausalLM"]
        config.dtype = self.dtype
        return config

    def layer(self, index: int) -> dict[str, torch.Tensor]:
        """Weights of a layer in float64, by their names within it."""
        layer = self.model.model.layers[index]
        tensors = attention_tensors(
            self.modules[index], self.rotary, self.rank, self.folds[index], self.bias, self.stream
        )
        out = {f"self_attn.{name}": tensor for name, tensor in tensors.items()}
        for part in _MLP:
            scale = self.stream if part == "down_proj" else 1.0
            out[f"mlp.{part}.weight"] = getattr(layer.mlp, part).weight.detach().cpu().double() * scale
        for part in ("input_layernorm", "post_attention_layernorm"):
            out[f"{part}.weight"] = getattr(layer, part).weight.detach().cpu().double()
        return out

    def ends(self) -> dict[str, torch.Tensor]:
        """Embedding, last norm and head."""
        model = self.model
        return {
            "model.embed_tokens.weight": model.model.embed_tokens.weight.detach().cpu().double() * self.stream,
            "model.norm.weight": model.model.norm.weight.detach().cpu().double(),
            "lm_head.weight": model.lm_head.weight.detach().cpu().double(),
        }

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        ends = self.ends()
        yield "model.embed_tokens.weight", ends["model.embed_tokens.weight"]
        for index in range(len(self.modules)):
            for name, tensor in self.layer(index).items():
                yield f"model.layers.{index}.{name}", tensor
        yield "model.norm.weight", ends["model.norm.weight"]
        yield "lm_head.weight", ends["lm_head.weight"]

    def nbytes(self) -> int:
        from transformers import DeepseekV3ForCausalLM

        with torch.device("meta"):
            made = DeepseekV3ForCausalLM(self.config)
        return sum(parameter.numel() for parameter in made.parameters()) * self.dtype.itemsize


def _eps_of(model: Any) -> float:
    norms: list[Any] = [model.model.norm]
    for layer in model.model.layers:
        norms += [layer.input_layernorm, layer.post_attention_layernorm]
    found: set[Any] = {getattr(norm, "variance_epsilon", getattr(norm, "eps", None)) for norm in norms}
    if len(found) != 1 or None in found:
        raise NotImplementedError(
            f"{type(model).__name__} has not one RMS norm with one eps for all of it (found "
            f"{sorted(map(str, found))}), so it cannot be exported as DeepSeek-V3"
        )
    return float(found.pop())
