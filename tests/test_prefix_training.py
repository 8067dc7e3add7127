"""Training over a template that is computed once: loss and gradients of the whole texts, or a clear refusal."""

from __future__ import annotations

import pytest
import torch
from test_storage import gemma3, llama

from hf_kvcache import KVCache, prefix_training

TEMPLATE = torch.randint(3, 64, (1, 40), generator=torch.Generator().manual_seed(2))
TEXTS = torch.randint(3, 64, (3, 21), generator=torch.Generator().manual_seed(3))
LENGTHS = (21, 9, 15)


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def batch(side):
    ids, mask = TEXTS.clone(), torch.zeros_like(TEXTS)
    if side == "none":
        return ids, None, ids
    for row, length in enumerate(LENGTHS):
        mask[row, slice(length) if side == "right" else slice(21 - length, None)] = 1
    ids = ids * mask
    return ids, mask, ids.masked_fill(mask == 0, -100)


def whole(model, ids, mask, labels):
    """The same texts, template and all, in one pass."""
    template = TEMPLATE.expand(3, -1)
    everything = torch.cat([template, ids], dim=1)
    full_mask = None if mask is None else torch.cat([torch.ones_like(template), mask], dim=1)
    positions = None if full_mask is None else full_mask.cumsum(1) - 1
    left_out = torch.cat([torch.full_like(template, -100), labels], dim=1)
    output = model(everything, attention_mask=full_mask, position_ids=positions, labels=left_out, use_cache=False)
    return output.loss, output.logits[:, 39:]


def train_only(model, *parts):
    for name, parameter in model.named_parameters():
        parameter.requires_grad = any(part in name for part in parts)
    return model


UPPER = ("layers.1.self_attn.q_proj", "layers.1.self_attn.o_proj", "layers.1.mlp", "model.norm", "lm_head")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["none", "right", "left"])
def test_exact_where_the_template_is_frozen(side, attention) -> None:
    model = train_only(llama().double().train(), *UPPER)
    model.set_attn_implementation(attention)
    prefix = prefix_training(model, TEMPLATE)
    assert prefix.exact and prefix.stale_layers == []
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    ids, mask, labels = batch(side)
    for _ in range(3):  # weights move, and the template's rows stay right
        expected, logits = whole(model, ids, mask, labels)
        expected.backward()
        wanted = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        output = prefix(ids, attention_mask=mask, labels=labels)
        assert torch.allclose(output.loss, expected, rtol=1e-6)
        real = slice(None) if mask is None else mask.bool()
        assert torch.allclose(output.logits[:, 1:][real], logits[:, 1:][real], atol=1e-5)
        assert torch.allclose(output.logits[:, 0], logits[:, 0], atol=1e-5)
        output.loss.backward()
        assert set(wanted) == {n for n, p in model.named_parameters() if p.grad is not None} and len(wanted) >= 7
        for name, parameter in model.named_parameters():
            if name in wanted:
                assert torch.allclose(parameter.grad, wanted[name], rtol=1e-4, atol=1e-7), name
        optimizer.step()
        model.zero_grad()


def test_layers_with_windows_too() -> None:
    upper = ("layers.2.self_attn.q_proj", "layers.2.self_attn.o_proj", "layers.2.mlp", "lm_head")
    model = train_only(gemma3().double().train(), *upper)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())  # not that of the embedding
    prefix = prefix_training(model, TEMPLATE)
    ids, mask, labels = batch("right")
    expected, _ = whole(model, ids, mask, labels)
    assert torch.allclose(prefix(ids, attention_mask=mask, labels=labels).loss, expected, rtol=1e-6)


def test_an_approximation_has_to_be_asked_for() -> None:
    model = train_only(llama().train(), "layers.0.mlp", "layers.1.self_attn.q_proj")
    with pytest.raises(ValueError, match=r"in layers \[1\]"):
        prefix_training(model, TEMPLATE)
    prefix = prefix_training(model, TEMPLATE, refresh_every=2)
    assert not prefix.exact and prefix.stale_layers == [1]
    ids, mask, labels = batch("right")
    gaps = []
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=2.0)
    for _ in range(4):
        output = prefix(ids, attention_mask=mask, labels=labels)
        with torch.no_grad():
            gaps.append(abs(float(output.loss - whole(model, ids, mask, labels)[0])))
        output.loss.backward()
        optimizer.step()
        model.zero_grad()
    assert max(gaps[0], gaps[2]) < 1e-5 < min(gaps[1], gaps[3]), "right after each refresh, and only then"
    prefix_training(model, TEMPLATE, approximate=True)


def test_adapters_of_upper_layers() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"], layers_to_transform=[1], init_lora_weights=False)
    model = peft.get_peft_model(llama(), config).train()
    prefix = prefix_training(model, TEMPLATE)
    ids, mask, labels = batch("right")
    loss = prefix(ids, attention_mask=mask, labels=labels).loss
    assert torch.allclose(loss, whole(model, ids, mask, labels)[0], rtol=1e-5)
    loss.backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if "lora" in n)
    everywhere = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])).train()
    with pytest.raises(ValueError, match="approximation"):
        prefix_training(everywhere, TEMPLATE)


def test_the_template_is_held_once() -> None:
    model = train_only(llama().train(), *UPPER)
    prefix = prefix_training(model, TEMPLATE)
    alone = KVCache(model)
    with torch.no_grad():
        model(TEMPLATE[:, :-1], past_key_values=alone)
    assert prefix.nbytes == alone.nbytes
    ids, mask, labels = batch("right")
    assert prefix(ids, attention_mask=mask, labels=labels).get("past_key_values") is None
    assert prefix.nbytes == alone.nbytes


def test_bad_use() -> None:
    model = train_only(llama().train(), *UPPER)
    with pytest.raises(ValueError, match="prefix_ids"):
        prefix_training(model, TEXTS)
    with pytest.raises(ValueError, match="refresh_every"):
        prefix_training(model, TEMPLATE, refresh_every=0)
    prefix = prefix_training(model, TEMPLATE)
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="gradient_checkpointing_disable"):
        prefix(TEXTS)
