"""Whether a trace's decisions are possible at all, read a bounded piece at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import TraceError
from coterie.trace.routing_trace import RoutingTrace

_TOKENS_AT_ONCE = 65_536


def pieces(num_tokens: int) -> Iterator[slice]:
    """Slices that cover `num_tokens`, each small enough to hold."""
    for start in range(0, num_tokens, _TOKENS_AT_ONCE):
        yield slice(start, min(start + _TOKENS_AT_ONCE, num_tokens))


def check_decisions(trace: RoutingTrace) -> None:
    """Raise for the first impossible decision, naming its layer and token.

    Raises:
        TraceError: for an id >= E, an expert twice in one token's set, or a weight that is no finite number >= 0.
    """
    for layer in range(trace.num_layers):
        for tokens in pieces(trace.num_tokens):
            routing = trace.layer(layer, tokens)
            kept = routing.kept_TK
            check_ids(routing.expert_ids_TK, kept, trace.spec.num_experts, layer, tokens.start)
            if routing.weights_TK is not None:
                check_weights(routing.weights_TK, kept, layer, tokens.start)


def check_ids(
    ids_TK: NDArray[Any], kept_TK: NDArray[np.bool_] | None, num_experts: int, layer: int, start: int
) -> None:
    """Raise for an id outside 0 .. num_experts-1, or an expert kept twice by one token.

    Args:
        ids_TK: [T, K] expert ids, any integer type.
        kept_TK: [T, K] which of them count, or None: all. The others must be ids too, but may repeat.
        num_experts: E.
        layer: MoE layer, for the message.
        start: index of the first token, for the message.
    """
    outside = (ids_TK >= num_experts) if ids_TK.dtype.kind == "u" else ((ids_TK < 0) | (ids_TK >= num_experts))
    if outside.any():
        token, slot = np.argwhere(outside)[0]
        value = int(ids_TK[token, slot])
        raise TraceError(
            f"expert id {value} in layer {layer}, token {start + token}; "
            f"ids run from 0 to {num_experts - 1}: check the model and, for engine dumps, the physical-to-logical map"
        )
    ids = ids_TK.astype(np.int32)
    if kept_TK is not None:  # what is not kept gets a number of its own, so that it repeats nothing
        ids = np.where(kept_TK, ids, -1 - np.arange(ids.shape[1], dtype=np.int32))
    ordered = np.sort(ids, axis=1)
    repeated = (ordered[:, 1:] == ordered[:, :-1]).any(axis=1)
    if repeated.any():
        token = int(np.argmax(repeated))
        raise TraceError(
            f"layer {layer}, token {start + token} names an expert twice: {ids_TK[token].tolist()}; "
            "a token's experts are distinct: check the importer's axis order"
        )


def check_weights(weights_TK: NDArray[Any], kept_TK: NDArray[np.bool_] | None, layer: int, start: int) -> None:
    """Raise for a weight of a kept expert that is not a finite number >= 0; arguments as in `check_ids`."""
    bad = ~(np.isfinite(weights_TK) & (weights_TK >= 0))
    if kept_TK is not None:
        bad &= kept_TK
    if bad.any():
        token, slot = np.argwhere(bad)[0]
        value = float(weights_TK[token, slot])
        raise TraceError(
            f"routing weight {value} in layer {layer}, token {start + token}; "
            "weights are finite numbers >= 0: record the router's weights after its softmax or sigmoid"
        )
