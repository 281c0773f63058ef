"""What a trace holds and how uneven its routing is, as a person wants to know it first."""

from __future__ import annotations

from typing import Any

import numpy as np

from coterie.profile.combinations import combination_counts, natural_pairs, shares_needed, top_share
from coterie.profile.load import expert_load, imbalance
from coterie.progress import Progress, silent
from coterie.trace.routing_trace import DECODE, PREFILL, RoutingTrace


def summarise(trace: RoutingTrace, progress: Progress = silent) -> dict[str, Any]:
    """Shape, origin, load imbalance and skew of a trace, read one layer at a time.

    Source: the skew is CRISP section 2.1's, the share of the uses that the top 25% of the combinations hold.

    Args:
        trace: the trace.
        progress: told of every layer.

    Returns:
        A dictionary ready for JSON. `load_imbalance`, `skew`, `pairs_for_60` and `pairs_for_90` (the shares of all
        pairs that hold 60% and 90% of the uses) are means over layers and stand for each layer under `per_layer`;
        `pairs` says which pairs they are of: "anchor pairs", or all "pairs" where the trace cannot tell the anchor.
        The last three are None for top-1 routing, which has no pairs.
    """
    layers = []
    for layer in range(trace.num_layers):
        layers.append(_layer(trace, layer))
        progress("summarising the trace", layer + 1, trace.num_layers)
    spec = trace.spec
    return {
        "model": spec.model,
        "layers": trace.num_layers,
        "experts": spec.num_experts,
        "top_k": spec.top_k,
        "tokens": trace.num_tokens,
        "sequences": trace.num_sequences,
        "phases": _phases(trace),
        "weights": trace.weights is not None,
        "weight_ordered": trace.weight_ordered,
        "kept": float(np.mean([layer["kept"] for layer in layers])),
        "pairs": natural_pairs(trace),
        **{name: _mean([layer[name] for layer in layers]) for name in _MEANS},
        "synthetic": bool(trace.provenance.get("synthetic", False)),
        "dropped": dict(trace.provenance.get("dropped", {})),
        "provenance": dict(trace.provenance),
        "fingerprint": trace.fingerprint(),
        "per_layer": layers,
    }


_MEANS = ("load_imbalance", "skew", "pairs_for_60", "pairs_for_90")


def _layer(trace: RoutingTrace, layer: int) -> dict[str, Any]:
    routing = trace.layer(layer)
    load_E = expert_load(routing.expert_ids_TK, routing.kept_TK, trace.spec.num_experts)
    counts_EE = combination_counts(trace, layer, pairs=natural_pairs(trace))
    has_pairs = bool(counts_EE.any())
    for_60, for_90 = shares_needed(counts_EE) if has_pairs else (None, None)
    return {
        "layer": layer,
        "model_layer": trace.spec.layer_ids[layer] if trace.spec.layer_ids else None,
        "kept": float(load_E.sum() / routing.expert_ids_TK.size),
        "load_imbalance": imbalance(load_E),
        "unused_experts": int((load_E == 0).sum()),
        "skew": top_share(counts_EE) if has_pairs else None,
        "pairs_for_60": for_60,
        "pairs_for_90": for_90,
    }


def _mean(values: list[float | None]) -> float | None:
    """Mean over the layers that have a value."""
    present = [value for value in values if value is not None]
    return float(np.mean(present)) if present else None


def _phases(trace: RoutingTrace) -> dict[str, int] | None:
    if trace.phase is None:
        return None
    return {
        "prefill": int(np.count_nonzero(trace.phase == PREFILL)),
        "decode": int(np.count_nonzero(trace.phase == DECODE)),
    }
