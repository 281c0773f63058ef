"""How often each expert was chosen, and how unevenly."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from coterie.profile.entries import entries
from coterie.progress import Progress, silent
from coterie.trace.routing_trace import ALL_TOKENS, RoutingTrace, TokenSelector


def expert_load(ids_TK: NDArray[Any], kept_TK: NDArray[np.bool_] | None, num_experts: int) -> NDArray[np.int64]:
    """Tokens that chose each expert.

    Source: the load L_g of CAP section V-B is its sum over the experts of device g.

    Args:
        ids_TK: [T, K] expert ids, all below `num_experts`.
        kept_TK: [T, K] which of them count, or None: all.
        num_experts: E.

    Returns:
        [E] int64, tokens; sums to the kept entries.
    """
    load_E = np.zeros(num_experts, dtype=np.int64)
    for _, ids, kept in entries(ids_TK, kept_TK, num_experts):
        _add_load(ids, kept, load_E)
    return load_E


def trace_load(
    trace: RoutingTrace, tokens: TokenSelector = ALL_TOKENS, progress: Progress = silent
) -> NDArray[np.int64]:
    """`expert_load` of every layer of a trace, read one layer at a time.

    Args:
        trace: the trace.
        tokens: which tokens count.
        progress: told of every layer.

    Returns:
        [L, E] int64, tokens.
    """
    load_LE = np.zeros((trace.num_layers, trace.spec.num_experts), dtype=np.int64)
    for layer in range(trace.num_layers):
        routing = trace.layer(layer, tokens)
        load_LE[layer] = expert_load(routing.expert_ids_TK, routing.kept_TK, trace.spec.num_experts)
        progress("counting loads", layer + 1, trace.num_layers)
    return load_LE


def imbalance(load_E: NDArray[Any]) -> float:
    """Largest load over mean load: 1 when even, E when one expert takes everything.

    Source: CAP section V-B, eq. 4, which applies it to devices.

    Args:
        load_E: [E] loads, tokens.

    Returns:
        The ratio; 1.0 when nothing was chosen at all, since nothing is uneven then.
    """
    mean = float(load_E.mean())
    return float(load_E.max()) / mean if mean > 0 else 1.0


@njit(cache=True, nogil=True)
def _add_load(ids_TK: NDArray[np.int32], kept_TK: NDArray[np.bool_], load_E: NDArray[np.int64]) -> None:
    for t in range(ids_TK.shape[0]):
        for k in range(ids_TK.shape[1]):
            if kept_TK[t, k]:
                load_E[ids_TK[t, k]] += 1
