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
def rounded(model: Any) -> Iterator[None]:
    """Round the experts' weights inside the block; afterwards they are as they were, bit for bit.

    The plain form of what stores in eight bits compute: every gate row, up row and down column of a neuron is rounded
    to 127 steps of its largest element each way. In bfloat16 and float16 the rounded weights are rounded once more.

    Args:
        model: a Transformers model, its experts gated and fused.

    Raises:
        CheckpointError: when the model's MoE layers are not recognised, or their experts are not gated and fused.
    """
    gated = importlib.import_module("coterie.ops.gated_ffn").ExpertWeights
    with ExitStack() as stack:
        for layer in find_moe_layers(model):
            experts: Any = layer.experts
            gated.of(experts)  # refuses what is laid out otherwise
            along = 1 if experts.is_transposed else 2
            stack.enter_context(_replaced(experts.gate_up_proj, along))
            stack.enter_context(_replaced(experts.down_proj, 3 - along))
        yield


@contextmanager
def _replaced(weights: Any, along: int) -> Iterator[None]:
    """One tensor [E, ., .], rows running along an axis."""
    before = weights.data
    try:
        weights.data = _rounded(before, along)
        yield
    finally:
        weights.data = before


def _rounded(weights: Tensor, along: int) -> Tensor:
    exact = weights.float()
    scale = exact.abs().amax(along, keepdim=True) / LARGEST
    steps = (exact / scale.where(scale > 0, 1.0)).round().clamp(-LARGEST, LARGEST)
    return (steps * scale).to(weights.dtype)
