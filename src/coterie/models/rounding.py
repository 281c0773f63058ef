"""A live model whose experts' weights are rounded to eight bits, as a store of `coterie pack --bits 8` holds them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from coterie.checkpoint.eight_bits import LARGEST
from coterie.models.layers import find_moe_layers

if TYPE_CHECKING:
    from torch import Tensor


@contextmanager
def rounded(model: Any, kept: dict[int, Tensor] | None = None) -> Iterator[None]:
    """Round the experts' weights inside the block; afterwards they are as they were, bit for bit.

    Rounded weights are held beside the others, so experts take twice their memory.

    The plain form of what stores in eight bits compute: every gate row, up row and down column of a neuron is rounded
    to 127 steps of its largest element each way. In bfloat16 and float16 the rounded weights are rounded once more.

    Args:
        model: a Transformers model, its experts gated and fused.
        kept: filled with the rounded weights, for the next time that the same model is rounded.

    Raises:
        CheckpointError: when the model's MoE layers are not recognised, or their experts are not gated and fused.
    """
    gated = importlib.import_module("coterie.ops.gated_ffn").ExpertWeights
    kept = {} if kept is None else kept
    with ExitStack() as stack:
        for layer in find_moe_layers(model):
            experts: Any = layer.experts
            gated.of(experts)  # refuses what is laid out otherwise
            along = 1 if experts.is_transposed else 2
            stack.enter_context(_replaced(experts.gate_up_proj, along, kept))
            stack.enter_context(_replaced(experts.down_proj, 3 - along, kept))
        yield


@contextmanager
def _replaced(weights: Any, along: int, kept: dict[int, Tensor]) -> Iterator[None]:
    """One tensor [E, ., .], rows running along an axis."""
    before = weights.data
    try:
        if id(weights) not in kept:
            kept[id(weights)] = _rounded(before, along)
        weights.data = kept[id(weights)]
        yield
    finally:
        weights.data = before


def _rounded(weights: Tensor, along: int) -> Tensor:
    exact = weights.float()
    scale = exact.abs().amax(along, keepdim=True) / LARGEST
    steps = (exact / scale.where(scale > 0, 1.0)).round().clamp(-LARGEST, LARGEST)
    return (steps * scale).to(weights.dtype)
