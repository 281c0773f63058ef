"""Neurons in another order: the same outputs, the right neurons in the right places, and an exact way back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError
from coterie.families import FAMILIES
from coterie.models.identity import ORDER_KEY, order_digest

pytestmark = pytest.mark.needs("transformers")


@pytest.fixture(scope="module")
def load(tiny_checkpoint: Any) -> Any:
    """Loads each family's tiny model once; every test leaves it as it was."""
    import torch

    from coterie.models.load import load_model

    made: dict[str, Any] = {}

    def get(family: str) -> Any:
        if family not in made:
            made[family] = load_model(tiny_checkpoint(family)).requires_grad_(False)
            for name, tensor in made[family].named_parameters():
                if ".experts." in name and name.endswith("bias"):
                    torch.nn.init.normal_(tensor)
        return made[family]

    return get


def some_order(model: Any, seed: int = 0) -> np.ndarray:
    from coterie.models.layers import find_moe_layers
    from coterie.ops.gated_ffn import ExpertWeights

    layers = find_moe_layers(model)
    weights = ExpertWeights.of(layers[0].experts)
    rng = np.random.default_rng(seed)
    each = [rng.permutation(weights.width) for _ in range(len(layers) * weights.num_experts)]
    return np.reshape(each, (len(layers), weights.num_experts, weights.width))


def snapshot(model: Any) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def logits(model: Any) -> Any:
    import torch

    ids = torch.from_numpy(np.random.default_rng(3).integers(3, 260, (2, 9)))
    with torch.inference_mode():
        return model(input_ids=ids, use_cache=False).logits


def require_equal(model: Any, before: dict[str, Any]) -> None:
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert [name for name, tensor in before.items() if not after[name].equal(tensor)] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_stay_and_the_way_back_is_exact(family: str, load: Any) -> None:
    import torch

    from coterie.models.layers import find_moe_layers
    from coterie.models.reorder import reordered

    model = load(family)
    before, expected, order = snapshot(model), logits(model), some_order(model)
    with reordered(model, order):
        torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
        assert getattr(model.config, ORDER_KEY) == order_digest(order)
        changed = {name for name, tensor in before.items() if not model.state_dict()[name].equal(tensor)}
        assert all(".experts." in name for name in changed)
        assert len(changed) == len(order) * (3 if family == "gpt_oss" else 2)
        for layer in find_moe_layers(model):
            name = next(name for name, module in model.named_modules() if module is layer.experts)
            for expert in (0, 5):
                check_places(family, layer.experts, before, name, expert, order[layer.index, expert])
    require_equal(model, before)
    assert not hasattr(model.config, ORDER_KEY)


def check_places(family: str, experts: Any, before: dict[str, Any], name: str, expert: int, order: np.ndarray) -> None:
    """Neuron by neuron: what stands at each place."""
    gate_up, down = before[f"{name}.gate_up_proj"][expert], before[f"{name}.down_proj"][expert]
    for place, neuron in enumerate(order):
        if family == "gpt_oss":
            bias = before[f"{name}.gate_up_proj_bias"][expert]
            for part in (0, 1):
                assert experts.gate_up_proj[expert, :, 2 * place + part].equal(gate_up[:, 2 * neuron + part])
                assert experts.gate_up_proj_bias[expert, 2 * place + part] == bias[2 * neuron + part]
            assert experts.down_proj[expert, place].equal(down[neuron])
        else:
            for start in (0, len(order)):
                assert experts.gate_up_proj[expert, start + place].equal(gate_up[start + neuron])
            assert experts.down_proj[expert, :, place].equal(down[:, neuron])


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_an_error_in_the_block_or_in_between_undoes_everything(
    family: str, load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coterie.models import reorder

    model = load(family)
    before, order = snapshot(model), some_order(model)
    with pytest.raises(ZeroDivisionError), reorder.reordered(model, order):
        raise ZeroDivisionError
    require_equal(model, before)

    moved, real = [], reorder.along_axis

    def interrupted(*arguments: Any) -> Any:
        moved.append(arguments)
        if len(moved) == 12:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(reorder, "along_axis", interrupted)
    with pytest.raises(KeyboardInterrupt), reorder.reordered(model, order):
        pass
    assert len(moved) == 12
    require_equal(model, before)
    assert not hasattr(model.config, ORDER_KEY)


def test_orders_nest_and_the_config_tells_the_innermost(load: Any) -> None:
    from coterie.models.reorder import reordered

    model = load("qwen3_moe")
    first, second, before = some_order(model, 1), some_order(model, 2), snapshot(model)
    with reordered(model, first):
        between = snapshot(model)
        with reordered(model, second):
            assert getattr(model.config, ORDER_KEY) == order_digest(second)
        require_equal(model, between)
        assert getattr(model.config, ORDER_KEY) == order_digest(first)
    require_equal(model, before)


def test_what_is_no_order_of_this_model_is_refused(load: Any) -> None:
    from coterie.models.reorder import reordered

    model = load("qwen3_moe")
    before, order = snapshot(model), some_order(model)
    twice = order.copy()
    twice[1, 3, 0] = twice[1, 3, 1]
    for wrong, message in (
        (order[:2], r"\[2, 8, 24\] .* for a model of \[3, 8, 24\]"),
        (twice, "layer 1, expert 3 does not name each of 24"),
    ):
        with pytest.raises(ConfigError, match=message), reordered(model, wrong):
            pass
    require_equal(model, before)
