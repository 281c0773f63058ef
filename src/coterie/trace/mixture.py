"""Several traces as one, their sequences interleaved: what a server sees that takes requests of every kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import TraceError
from coterie.trace.routing_trace import ALL_TOKENS, RoutingTrace, TokenSelector

_RUN_TOKENS = 256  # interleaved at a time where a trace has no sequences


def mix(
    traces: Sequence[RoutingTrace],
    parts: Sequence[TokenSelector] | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> tuple[RoutingTrace, NDArray[np.int64]]:
    """One trace of the selected tokens of several, in memory.

    Sequences stay whole and in order, and each stands where the same share of every trace is behind it, so that every
    part of the mixture holds something of every trace (algorithms §1: stratified by domain). Of the fields that a
    token has once only sequences are kept.

    Args:
        traces: of the same model, at least one.
        parts: the tokens of each; None: all.
        provenance: what to say of the mixture.

    Returns:
        The mixture, and for each of its tokens [T] which trace it is from.

    Raises:
        TraceError: when the models' shapes differ.
    """
    spec = traces[0].spec
    for trace in traces[1:]:
        require_same_model(traces[0], trace)
    chosen = parts or [ALL_TOKENS] * len(traces)
    labels = [_labels(trace, part) for trace, part in zip(traces, chosen, strict=True)]
    offset_of = np.cumsum([0, *(int(label_T.max()) + 1 for label_T in labels)])
    end_T = np.concatenate([_ends(label_T) for label_T in labels])
    whose_T = np.repeat(np.arange(len(traces)), [label_T.size for label_T in labels])
    sequence_T = np.concatenate([label_T + offset for label_T, offset in zip(labels, offset_of, strict=False)])
    order_T = np.lexsort((np.arange(end_T.size), sequence_T, whose_T, end_T))
    pairs = list(zip(traces, chosen, strict=True))

    def joined(values: list[NDArray[Any]]) -> NDArray[Any]:
        return np.concatenate(values, axis=1)[:, order_T]

    ids = joined([np.asarray(trace.expert_ids[:, part]) for trace, part in pairs])
    weights = kept = None
    if all(trace.weights is not None for trace in traces):
        weights = joined([np.asarray(trace.weights[:, part]) for trace, part in pairs if trace.weights is not None])
    if any(trace.kept is not None for trace in traces):
        kept = joined([_kept(trace, part) for trace, part in pairs])
    mixture = RoutingTrace(
        ids, spec, weights, kept, sequence_T[order_T].astype(np.int32),
        weight_ordered=weights is not None and all(trace.weight_ordered for trace in traces),
        provenance=dict(provenance or {}),
    )  # fmt: skip
    return mixture, whose_T[order_T]


def require_same_model(first: RoutingTrace, other: RoutingTrace) -> None:
    """Refuse traces of models of different shapes.

    Raises:
        TraceError: naming both.
    """
    mine, theirs = first.spec, other.spec
    shapes = [(spec.num_layers, spec.num_experts, spec.top_k) for spec in (mine, theirs)]
    if shapes[0] != shapes[1]:
        said = [
            f"{spec.model} ({layers} layers, {experts} experts, top-{top_k})"
            for spec, (layers, experts, top_k) in zip((mine, theirs), shapes, strict=True)
        ]
        raise TraceError(f"the traces are of {said[0]} and {said[1]}; give traces of one model")


def _kept(trace: RoutingTrace, part: TokenSelector) -> NDArray[Any]:
    if trace.kept is None:
        return np.ones(trace.expert_ids[:, part].shape, dtype=np.bool_)
    return np.asarray(trace.kept[:, part])


def _labels(trace: RoutingTrace, part: TokenSelector) -> NDArray[np.int64]:
    """The sequence of every selected token, [T], from 0 in the order in which they begin."""
    if trace.sequence_ids is None:
        return np.arange(np.arange(trace.num_tokens)[part].size, dtype=np.int64) // _RUN_TOKENS
    _, first, inverse = np.unique(np.asarray(trace.sequence_ids[part]), return_index=True, return_inverse=True)
    label = np.empty(first.size, dtype=np.int64)
    label[np.argsort(first, kind="stable")] = np.arange(first.size)
    labels: NDArray[np.int64] = label[inverse.ravel()]
    return labels


def _ends(label_T: NDArray[np.int64]) -> NDArray[np.float64]:
    """For every token the share of its trace that is behind the end of its sequence, [T]."""
    counts = np.bincount(label_T)
    ends: NDArray[np.float64] = (np.cumsum(counts) / label_T.size)[label_T]
    return ends
