"""Every family: importance, dominance and counts against one token and one expert at a time, and autograd by hand."""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from coterie.families import FAMILIES

pytestmark = [pytest.mark.needs("torch"), pytest.mark.needs("transformers")]

TOKENS, WINDOW = 80, 32  # two whole windows and a shorter one
NAME = "one_token_at_a_time"


def expert_output(module: Any, expert: int, x_H: Any, mask_I: Any) -> tuple[Any, Any]:
    """Activations and output of one expert for one token, its activations multiplied by a mask."""
    import torch

    gate_up, down = module.gate_up_proj[expert], module.down_proj[expert]
    if type(module).__name__ == "GptOssExperts":
        both = x_H @ gate_up + module.gate_up_proj_bias[expert]
        gate, up = both[0::2].clamp(max=7.0), both[1::2].clamp(-7.0, 7.0)
        a_I = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        return a_I, (a_I * mask_I) @ down + module.down_proj_bias[expert]
    half = gate_up.shape[0] // 2
    a_I = torch.nn.functional.silu(gate_up[:half] @ x_H) * (gate_up[half:] @ x_H)
    return a_I, down @ (a_I * mask_I)


@contextmanager
def watched(model: Any):
    """The model computed token by token; what each call of an experts module saw, with leaves to differentiate by."""
    import torch
    from transformers.integrations.moe import ExpertsInterface

    calls: list[SimpleNamespace] = []

    def forward(module: Any, hidden_TH: Any, ids_TK: Any, weights_TK: Any) -> Any:
        size = module.down_proj.shape[1 if module.is_transposed else 2]
        neurons = torch.ones(*ids_TK.shape, size, requires_grad=True)
        choices = torch.ones(ids_TK.shape, requires_grad=True)
        a_TKI = np.zeros((*ids_TK.shape, size))
        rows = []
        for t, x_H in enumerate(hidden_TH):
            total = torch.zeros_like(x_H)
            for k, expert in enumerate(ids_TK[t].tolist()):
                a_I, y_H = expert_output(module, expert, x_H, neurons[t, k])
                a_TKI[t, k] = a_I.detach()
                total = total + weights_TK[t, k] * choices[t, k] * y_H
            rows.append(total)
        weights = weights_TK.detach().double().numpy()
        calls.append(SimpleNamespace(a=a_TKI, ids=ids_TK.numpy(), w=weights, neurons=neurons, choices=choices))
        return torch.stack(rows)

    ExpertsInterface.register(NAME, forward)
    before = model.config._experts_implementation
    try:
        model.set_experts_implementation(NAME)
        yield calls
    finally:
        model.set_experts_implementation(before)


def expected(model: Any, windows: Any, spec: Any, width: int) -> dict[str, np.ndarray]:
    """Everything a profile holds but what it derives by down's norms, from plain loops."""
    import torch

    shape = (spec.num_layers, spec.num_experts)
    found = {name: np.zeros((*shape, width)) for name in ("mean_abs", "rms", "weighted_mean_abs", "first_order")}
    found |= {name: np.zeros((*shape, spec.num_experts)) for name in ("pairs", "fisher", "weight")}
    found["load"] = np.zeros(shape)
    for window in windows:
        with watched(model) as calls:
            logits = model(input_ids=torch.tensor([list(window.inputs)]), use_cache=False).logits[0]
        chances = torch.log_softmax(logits, dim=-1)
        loss = -sum(chances[t, target] for t, target in enumerate(window.targets))
        leaves = [leaf for call in calls for leaf in (call.neurons, call.choices)]
        gradients = iter(torch.autograd.grad(loss, leaves))
        for layer, call in enumerate(calls):
            add(found, layer, call, next(gradients).double().numpy(), next(gradients).double().numpy())
    tokens = np.maximum(found["load"], 1)[:, :, None]
    for name in ("mean_abs", "rms", "weighted_mean_abs", "first_order"):
        found[name] = np.sqrt(found[name] / tokens) if name == "rms" else found[name] / tokens
    for name in ("fisher", "weight"):
        found[name] = np.where(found["pairs"] > 0, found[name] / np.maximum(found["pairs"], 1), np.nan)
    return found


def add(found: dict[str, np.ndarray], layer: int, call: Any, by_neuron: np.ndarray, by_choice: np.ndarray) -> None:
    for t, ids in enumerate(call.ids):
        share = call.w[t] / call.w[t].sum()
        for k, expert in enumerate(ids):
            found["load"][layer, expert] += 1
            found["mean_abs"][layer, expert] += abs(call.a[t, k])
            found["rms"][layer, expert] += call.a[t, k] ** 2
            found["weighted_mean_abs"][layer, expert] += share[k] * abs(call.a[t, k])
            found["first_order"][layer, expert] += by_neuron[t, k] ** 2
        anchor = int(np.argmax(call.w[t]))
        for k in range(len(ids)):
            if k != anchor:
                for one, other in itertools.permutations((anchor, k)):
                    found["pairs"][layer, ids[one], ids[other]] += 1
                    found["fisher"][layer, ids[one], ids[other]] += by_choice[t, one] ** 2
                    found["weight"][layer, ids[one], ids[other]] += share[one]


@pytest.mark.parametrize("family", list(FAMILIES))
def test_profile_is_what_plain_loops_and_autograd_give(family, load, text, profiled):
    import torch

    from coterie.calibration.text_windows import text_windows
    from coterie.models.layers import find_moe_layers

    model, tokenizer = load(family)
    model.requires_grad_(True)
    for layer in find_moe_layers(model):  # gpt_oss's begin as zero
        for name, parameter in layer.experts.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(layer.index))
    words = text(TOKENS + 1)
    made = profiled(model, tokenizer, words, tokens=TOKENS, window=WINDOW)
    windows = text_windows(model, tokenizer, {"text": words}, TOKENS, WINDOW, 0).windows
    wanted = expected(model, windows, made.spec, made.width)

    np.testing.assert_array_equal(made.load_LE, wanted["load"])
    np.testing.assert_array_equal(made.pairs_LEE, wanted["pairs"])
    for name in ("mean_abs", "rms", "weighted_mean_abs", "first_order"):
        close(made.importance[name], wanted[name])
    for name in ("fisher", "weight"):
        close(made.dominance[name], wanted[name])
    layers = find_moe_layers(model)
    for layer, expert in ((0, 1), (len(layers) - 1, 6)):
        down = layers[layer].experts.down_proj[expert].detach().double().numpy()
        norms = np.sqrt((down**2).sum(axis=1 if family == "gpt_oss" else 0))
        for name in ("mean_abs", "rms", "weighted_mean_abs"):
            close(made.importance[f"{name}_down"][layer, expert], wanted[name][layer, expert] * norms)
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def close(actual: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(actual, wanted, rtol=2e-3, atol=2e-4 * np.nanmax(wanted))


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_without_gradients_the_rest_is_the_same(family, load, text, profiled):
    model, tokenizer = load(family)
    both = [
        profiled(model, tokenizer, text(TOKENS + 1), tokens=TOKENS, window=WINDOW, gradients=wanted)
        for wanted in (True, False)
    ]
    assert set(both[0].importance) - set(both[1].importance) == {"first_order", "first_order_rms_down"}
    assert set(both[0].dominance) - set(both[1].dominance) == {"fisher"}
    np.testing.assert_array_equal(both[0].pairs_LEE, both[1].pairs_LEE)
    for name, values in both[1].importance.items():
        np.testing.assert_allclose(both[0].importance[name], values, rtol=1e-4, atol=1e-7)
