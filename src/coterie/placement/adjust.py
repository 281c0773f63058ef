"""CAP's adjustment: from a communication-oriented placement towards balance, a swap at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.placement.balance import imbalance
from coterie.placement.metrics import communication_cost
from coterie.placement.problem import LayerProblem

_MOST_STEPS = 10_000


def communication_objective(problem: LayerProblem, device_E: NDArray[np.int64]) -> float:
    """C(pi) = sum over i < j of p_ij d(pi(i), pi(j)), CAP eq. 2, divided by the sum of p_ij."""
    return communication_cost(problem.jaccard_EE, problem.topology.cost_matrix(), device_E)


def load_imbalance(
    load_E: NDArray[Any], device_E: NDArray[np.int64], num_devices: int, speed_G: NDArray[np.float64] | None = None
) -> float:
    """B(pi) = max_g L_g / mean_g L_g, CAP eq. 4, of devices at these speeds (None: equal); see `imbalance`."""
    load_G = np.bincount(device_E, weights=load_E, minlength=num_devices)
    return imbalance(load_G, np.ones(num_devices) if speed_G is None else speed_G)


def swap_costs(problem: LayerProblem, device_E: NDArray[np.int64]) -> NDArray[np.float64]:
    """Change of the normalised C if experts i and j swapped devices, [E, E]."""
    p_EE, cost_GG = problem.jaccard_EE, problem.topology.cost_matrix()
    pull_EG = p_EE @ np.eye(problem.num_devices)[device_E]  # affinity of each expert to each device
    here_EG = pull_EG @ cost_GG  # what each expert pays if it lives on each device
    paid_E = here_EG[np.arange(device_E.size), device_E]
    moved_EE = here_EG[:, device_E]  # i at j's device
    between_EE = p_EE * cost_GG[np.ix_(device_E, device_E)]
    change_EE = moved_EE + moved_EE.T - paid_E[:, None] - paid_E[None, :] + 2 * between_EE
    total = p_EE.sum() / 2
    return change_EE / total if total > 0 else change_EE


def adjustment(problem: LayerProblem, start_E: NDArray[np.int64], trade_off: float = 0.5) -> NDArray[np.int64]:
    """Every placement on the way from `start_E` to balance, the start included, [steps + 1, E].

    Source: CAP §V-B. Each step swaps an expert of a device with the highest load with one of a device below
    the mean load, so that B (or, at equal B, the number of devices that have it) falls, by the swap that lowers
    `trade_off * C + (1 - trade_off) * B` most; C is divided by the sum of p_ij (algorithms §2). What the paper says
    of loads holds here of the time they take, load / speed.

    Args:
        problem: the layer.
        start_E: [E] device of each expert.
        trade_off: lambda of CAP eq. 5, in [0, 1].
    """
    device_E = start_E.copy()
    path = [device_E.copy()]
    load_G = np.bincount(device_E, weights=problem.load_E, minlength=problem.num_devices)
    speed_G = problem.speed_G
    mean = load_G.sum() / speed_G.sum()
    for _ in range(_MOST_STEPS):
        busy_G = load_G / speed_G
        highest = int(np.argmax(busy_G))
        first = np.flatnonzero(device_E == highest)
        second = np.flatnonzero(busy_G[device_E] < mean)
        if not second.size:
            break
        shift = (problem.load_E[first, None] - problem.load_E[None, second]).astype(np.float64)
        low = device_E[second]
        new_high = (load_G[highest] - shift) / speed_G[highest]
        new_low = (load_G[low][None, :] + shift) / speed_G[low][None, :]
        better = (shift > 0) & (np.maximum(new_high, new_low) < busy_G[highest])
        if not better.any():
            break
        rest = np.delete(busy_G, highest).max()  # an upper bound: the low device's own load is below the mean
        balance = np.maximum(np.maximum(new_high, new_low), rest) / mean
        score = trade_off * swap_costs(problem, device_E)[np.ix_(first, second)] + (1 - trade_off) * balance
        i, j = np.unravel_index(np.argmin(np.where(better, score, np.inf)), score.shape)
        a, b = first[i], second[j]
        load_G[highest] -= shift[i, j]
        load_G[device_E[b]] += shift[i, j]
        device_E[a], device_E[b] = device_E[b], device_E[a]
        path.append(device_E.copy())
    return np.stack(path)
