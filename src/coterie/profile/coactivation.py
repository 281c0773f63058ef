"""How often two experts are chosen by the same token."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from coterie.profile.entries import entries


def coactivation_counts(ids_TK: NDArray[Any], kept_TK: NDArray[np.bool_] | None, num_experts: int) -> NDArray[np.int64]:
    """Tokens that chose both of two experts.

    Args:
        ids_TK: [T, K] expert ids, distinct within a token, all below `num_experts`.
        kept_TK: [T, K] which of them count, or None: all.
        num_experts: E.

    Returns:
        [E, E] int64, tokens; symmetric, the diagonal is each expert's load.
    """
    counts_EE = np.zeros((num_experts, num_experts), dtype=np.int64)
    for _, ids, kept in entries(ids_TK, kept_TK, num_experts):
        _add_pairs(ids, kept, counts_EE)
    upper = np.triu(counts_EE, 1)
    counts_EE += upper.T
    return counts_EE


def jaccard(counts_EE: NDArray[np.int64]) -> NDArray[np.float64]:
    """Co-activation probability of every pair: tokens with both over tokens with either.

    Source: CAP section IV-B, p_ij.

    Args:
        counts_EE: [E, E] from `coactivation_counts`.

    Returns:
        [E, E] float64 within [0, 1], symmetric; zero where neither expert occurs, and on the diagonal, which
        no use is made of.
    """
    load_E = np.diagonal(counts_EE)
    either_EE = load_E[:, None] + load_E[None, :] - counts_EE
    p_EE = np.zeros(counts_EE.shape, dtype=np.float64)
    np.divide(counts_EE, either_EE, out=p_EE, where=either_EE > 0)
    np.fill_diagonal(p_EE, 0.0)
    return p_EE


@njit(cache=True, nogil=True)
def _add_pairs(ids_TK: NDArray[np.int32], kept_TK: NDArray[np.bool_], counts_EE: NDArray[np.int64]) -> None:
    """Count each kept pair once, at [smaller id, larger id], and each kept expert on the diagonal."""
    num_slots = ids_TK.shape[1]
    for t in range(ids_TK.shape[0]):
        for a in range(num_slots):
            if not kept_TK[t, a]:
                continue
            i = ids_TK[t, a]
            counts_EE[i, i] += 1
            for b in range(a + 1, num_slots):
                if kept_TK[t, b]:
                    j = ids_TK[t, b]
                    counts_EE[min(i, j), max(i, j)] += 1
