"""The pruning rules as compiled loops over tokens; `reference.py` says the same in plain Python.

Every sum runs one term after the other in float64: a device's weight in the order of the token's K slots, the kept
weight in the order in which devices are kept. Comparisons are exact, so any form that adds in this order agrees.

A token's home is a device, or -1 where there is none (every device then costs 1). Weights that are not kept on
entry are never read.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

TOLERANCE = 1e-6
"""Slack on a token's weight, so that rounding does not decide whether 0.1 + 0.2 is within 0.3."""


@njit(cache=True, nogil=True)
def _shares(weight_K: Any, before_K: Any, share_K: Any) -> int:
    """Fill the kept slots' shares of the token's weight (equal where all weights are zero); how many are kept."""
    count, total = 0, 0.0
    for k in range(before_K.size):
        if before_K[k]:
            count += 1
            total += weight_K[k]
    for k in range(before_K.size):
        if before_K[k]:
            share_K[k] = weight_K[k] / total if total > 0 else 1.0 / count
    return count


@njit(cache=True, nogil=True)
def _destinations(
    device_K: Any, share_K: Any, before_K: Any, home: int, cost_GG: Any, dev_D: Any, a_D: Any, c_D: Any
) -> int:
    """Fill the token's distinct devices in order of first use, their weight and cost; how many there are."""
    count = 0
    for k in range(before_K.size):
        if not before_K[k]:
            continue
        d = 0
        while d < count and dev_D[d] != device_K[k]:
            d += 1
        if d == count:
            dev_D[d] = device_K[k]
            a_D[d] = 0.0
            c_D[d] = 1.0 if home < 0 else cost_GG[home, device_K[k]]
            count += 1
        a_D[d] += share_K[k]
    return count


@njit(cache=True, nogil=True)
def _comes_first(i: int, j: int, ratio_D: Any, dev_D: Any, c_D: Any) -> bool:
    """Whether destination i is kept before j: falling a/c, then lower cost, then lower device."""
    if ratio_D[i] != ratio_D[j]:
        return bool(ratio_D[i] > ratio_D[j])
    if c_D[i] != c_D[j]:
        return bool(c_D[i] < c_D[j])
    return bool(dev_D[i] < dev_D[j])


@njit(cache=True, nogil=True)
def _goes_first(i: int, j: int, dev_D: Any, a_D: Any, c_D: Any) -> bool:
    """Whether destination i is tried for dropping before j: falling c, then rising a, then higher device."""
    if c_D[i] != c_D[j]:
        return bool(c_D[i] > c_D[j])
    if a_D[i] != a_D[j]:
        return bool(a_D[i] < a_D[j])
    return bool(dev_D[i] > dev_D[j])


@njit(cache=True, nogil=True)
def _order_to_keep(count: int, home: int, dev_D: Any, a_D: Any, c_D: Any, ratio_D: Any, order_D: Any) -> None:
    """Fill `order_D` with the destinations, home first."""
    for n in range(count):
        ratio_D[n] = np.inf if dev_D[n] == home else a_D[n] / c_D[n]
        m = n
        while m > 0 and _comes_first(n, order_D[m - 1], ratio_D, dev_D, c_D):
            order_D[m] = order_D[m - 1]
            m -= 1
        order_D[m] = n


@njit(cache=True, nogil=True)
def _order_to_drop(count: int, dev_D: Any, a_D: Any, c_D: Any, order_D: Any) -> None:
    """Fill `order_D` with the destinations, the first to be tried for dropping first."""
    for n in range(count):
        m = n
        while m > 0 and _goes_first(n, order_D[m - 1], dev_D, a_D, c_D):
            order_D[m] = order_D[m - 1]
            m -= 1
        order_D[m] = n


@njit(cache=True, nogil=True)
def _write_kept(device_K: Any, before_K: Any, count: int, dev_D: Any, keep_D: Any, after_K: Any) -> None:
    """A slot stays kept when its device is."""
    for k in range(before_K.size):
        after_K[k] = False
        if before_K[k]:
            for d in range(count):
                if dev_D[d] == device_K[k]:
                    after_K[k] = keep_D[d]


@njit(cache=True, nogil=True)
def cap_tokens(
    device_TK: Any, weight_TK: Any, before_TK: Any, home_T: Any, cost_GG: Any, p: float
) -> NDArray[np.bool_]:
    """CAP's rule for each token; 0 < p < 1. See `destinations.Cap`."""
    num_tokens, top_k = before_TK.shape
    after_TK = np.empty((num_tokens, top_k), np.bool_)
    share_K, a_D, c_D, ratio_D = np.empty(top_k), np.empty(top_k), np.empty(top_k), np.empty(top_k)
    dev_D, order_D, keep_D = np.empty(top_k, np.int64), np.empty(top_k, np.int64), np.empty(top_k, np.bool_)
    need = 1.0 - p
    for t in range(num_tokens):
        home = home_T[t]
        _shares(weight_TK[t], before_TK[t], share_K)
        count = _destinations(device_TK[t], share_K, before_TK[t], home, cost_GG, dev_D, a_D, c_D)
        _order_to_keep(count, home, dev_D, a_D, c_D, ratio_D, order_D)
        kept = 0.0
        for n in range(count):
            d = order_D[n]
            keep_D[d] = dev_D[d] == home or kept < need
            if keep_D[d]:
                kept += a_D[d]
        droppable = False
        for d in range(count):
            droppable |= keep_D[d] and dev_D[d] != home and kept - a_D[d] >= need - TOLERANCE
        if droppable:
            _order_to_drop(count, dev_D, a_D, c_D, order_D)
            for n in range(count):
                d = order_D[n]
                if keep_D[d] and dev_D[d] != home and kept - a_D[d] >= need - TOLERANCE:
                    keep_D[d] = False
                    kept -= a_D[d]
        _write_kept(device_TK[t], before_TK[t], count, dev_D, keep_D, after_TK[t])
    return after_TK


@njit(cache=True, nogil=True)
def priced_tokens(
    device_TK: Any, weight_TK: Any, before_TK: Any, home_T: Any, cost_GG: Any, theta_G: Any, floor: float
) -> NDArray[np.bool_]:
    """The priced rule for each token. See `destinations.Priced`."""
    num_tokens, top_k = before_TK.shape
    after_TK = np.empty((num_tokens, top_k), np.bool_)
    share_K, a_D, c_D, ratio_D = np.empty(top_k), np.empty(top_k), np.empty(top_k), np.empty(top_k)
    dev_D, order_D, keep_D = np.empty(top_k, np.int64), np.empty(top_k, np.int64), np.empty(top_k, np.bool_)
    for t in range(num_tokens):
        home = home_T[t]
        _shares(weight_TK[t], before_TK[t], share_K)
        count = _destinations(device_TK[t], share_K, before_TK[t], home, cost_GG, dev_D, a_D, c_D)
        kept = 0.0
        for d in range(count):
            keep_D[d] = dev_D[d] == home or a_D[d] >= theta_G[dev_D[d]] * c_D[d]
            if keep_D[d]:
                kept += a_D[d]
        if kept < floor:
            _order_to_keep(count, home, dev_D, a_D, c_D, ratio_D, order_D)
            for n in range(count):
                d = order_D[n]
                if not keep_D[d] and kept < floor:
                    keep_D[d] = True
                    kept += a_D[d]
        _write_kept(device_TK[t], before_TK[t], count, dev_D, keep_D, after_TK[t])
    return after_TK


@njit(cache=True, nogil=True)
def naive_tokens(weight_TK: Any, before_TK: NDArray[np.bool_], p: float) -> NDArray[np.bool_]:
    """Naive pruning of each token; 0 < p < 1. See `destinations.Naive`."""
    num_tokens, top_k = before_TK.shape
    after_TK = before_TK.copy()
    share_K = np.empty(top_k)
    for t in range(num_tokens):
        count = _shares(weight_TK[t], before_TK[t], share_K)
        dropped = 0.0
        for _ in range(count):
            lowest = -1
            for k in range(top_k):  # of equal weights the later slot goes first
                if after_TK[t, k] and (lowest < 0 or share_K[k] <= share_K[lowest]):
                    lowest = k
            dropped += share_K[lowest]
            if dropped > p + TOLERANCE:
                break
            after_TK[t, lowest] = False
    return after_TK


@njit(cache=True, nogil=True)
def visit_weights(device_TK: Any, weight_TK: Any, before_TK: Any) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Every visit before pruning, the home's too, in token order: its device and its weight a, two arrays [visits]."""
    num_tokens, top_k = before_TK.shape
    device_V, a_V = np.empty(num_tokens * top_k, np.int64), np.empty(num_tokens * top_k)
    share_K, a_D, c_D, dev_D = np.empty(top_k), np.empty(top_k), np.empty(top_k), np.empty(top_k, np.int64)
    no_cost_GG = np.empty((0, 0))
    visits = 0
    for t in range(num_tokens):
        _shares(weight_TK[t], before_TK[t], share_K)
        count = _destinations(device_TK[t], share_K, before_TK[t], -1, no_cost_GG, dev_D, a_D, c_D)
        for d in range(count):
            device_V[visits], a_V[visits] = dev_D[d], a_D[d]
            visits += 1
    return device_V[:visits].copy(), a_V[:visits].copy()


@njit(cache=True, nogil=True)
def kept_weight(weight_TK: Any, before_TK: Any, after_TK: Any) -> NDArray[np.float64]:
    """Share of each token's weight that pruning kept, [T]; 1 for a token that had no expert to lose."""
    num_tokens, top_k = before_TK.shape
    kept_T = np.empty(num_tokens)
    share_K = np.empty(top_k)
    for t in range(num_tokens):
        count = _shares(weight_TK[t], before_TK[t], share_K)
        kept_T[t] = 0.0 if count else 1.0
        for k in range(top_k):
            if after_TK[t, k]:
                kept_T[t] += share_K[k]
    return kept_T


@njit(cache=True, nogil=True)
def count_remote_visits(device_TK: Any, kept_TK: Any, home_T: Any, num_devices: int) -> NDArray[np.int64]:
    """Tokens that visit each device and do not live there, [G]."""
    visits_G = np.zeros(num_devices, np.int64)
    last_token_G = np.full(num_devices, -1, np.int64)
    for t in range(kept_TK.shape[0]):
        for k in range(kept_TK.shape[1]):
            d = device_TK[t, k]
            if kept_TK[t, k] and d != home_T[t] and last_token_G[d] != t:
                last_token_G[d] = t
                visits_G[d] += 1
    return visits_G
