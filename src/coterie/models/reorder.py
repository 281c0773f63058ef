"""Neurons in another order, in memory: a model computes the same, and what matters most stands first."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from coterie.checkpoint.expert_tensors import Along
from coterie.checkpoint.reorder import Order, along_axis
from coterie.errors import ConfigError
from coterie.models.identity import ORDER_KEY, order_digest
from coterie.models.layers import find_moe_layers

if TYPE_CHECKING:
    from torch import Tensor

    from coterie.ops.gated_ffn import ExpertWeights


@contextmanager
def reordered(model: Any, order_LEI: Order) -> Iterator[None]:
    """The neurons of every expert in this order while the block runs; afterwards, bit for bit as before.

    Rows of gate and up, their biases and columns of down move alike, so outputs change by rounding alone. The weights
    stay where they lie, and one expert's are copied at a time. Inside the block the model's config tells the order,
    as that of a reordered checkpoint does. Shared experts stay as they are.

    Source: CRISP §3.2.

    Args:
        model: a Transformers model.
        order_LEI: [L, E, I] integers: neuron r is to be what neuron order[r] is now.

    Raises:
        CheckpointError: when its MoE layers are not recognised, or their experts are not gated and fused.
        ConfigError: when the order is not one of this model's neurons.
    """
    layout = importlib.import_module("coterie.ops.gated_ffn").ExpertWeights
    experts_L = [layout.of(layer.experts) for layer in find_moe_layers(model)]
    require_order(order_LEI, (len(experts_L), experts_L[0].num_experts, experts_L[0].width))
    undo: dict[tuple[int, int, int], Callable[[], object]] = {}
    before = vars(model.config).get(ORDER_KEY)
    try:
        for layer, experts in enumerate(experts_L):
            for expert in range(experts.num_experts):
                _move(experts, layer, expert, order_LEI[layer, expert], undo)
        setattr(model.config, ORDER_KEY, order_digest(order_LEI))
        yield
    finally:
        for restore in undo.values():
            restore()
        if before is not None:
            setattr(model.config, ORDER_KEY, before)
        elif hasattr(model.config, ORDER_KEY):
            delattr(model.config, ORDER_KEY)


def require_order(order_LEI: Order, shape: tuple[int, int, int]) -> None:
    """Refuse what is no order of the neurons of [L, E, I] = `shape`.

    Raises:
        ConfigError: for another shape, or a row that does not name every neuron once.
    """
    if tuple(order_LEI.shape) != shape:
        raise ConfigError(
            f"an order of {list(order_LEI.shape)} (layers, experts, neurons) for a model of {list(shape)}; "
            "make it from a profile of this model"
        )
    wrong = np.argwhere((np.sort(order_LEI, axis=-1) != np.arange(shape[-1])).any(axis=-1))
    if len(wrong):
        layer, expert = wrong[0]
        raise ConfigError(f"the order of layer {layer}, expert {expert} does not name each of {shape[-1]} neurons once")


def neuron_axes(experts: ExpertWeights, expert: int) -> list[tuple[Tensor, int, Along]]:
    """Every tensor of an expert that has a neuron axis: a view, the axis, and what lies along it.

    What lies along an axis is told as in `checkpoint.expert_tensors.NeuronAxis`.
    """
    both: Along = "pairs" if experts.interleaved else "halves"
    tensors: list[tuple[Tensor, int, Along]] = [
        (experts.gate_up[expert], 1 if experts.transposed else 0, both),
        (experts.down[expert], 0 if experts.transposed else 1, "one"),
    ]
    if experts.gate_up_bias is not None:
        tensors.append((experts.gate_up_bias[expert], 0, both))
    return tensors


def _move(
    experts: ExpertWeights, layer: int, expert: int, order_I: Order, undo: dict[tuple[int, int, int], Any]
) -> None:
    """Reorder one expert; `undo` holds at every moment what brings back what was moved so far."""
    torch = importlib.import_module("torch")
    with torch.no_grad():
        for number, (tensor, axis, along) in enumerate(neuron_axes(experts, expert)):
            view = tensor.detach()
            index = torch.from_numpy(along_axis(order_I, along)).to(view.device)
            original, key = view.clone(), (layer, expert, number)
            undo[key] = lambda view=view, original=original: view.copy_(original)
            view.copy_(original.index_select(axis, index))
            undo[key] = _back(view, axis, torch.argsort(index))


def _back(view: Tensor, axis: int, inverse: Tensor) -> Callable[[], object]:
    return lambda: view.copy_(view.index_select(axis, inverse))
