"""Refinement: tabu search over swaps on what tokens really cost, the devices and nodes they visit.

Source: algorithms §2, "what goes beyond the paper". The cost of a placement is

    (w_device * visits to devices + w_node * visits to nodes + w_peak * visits to the busiest device) / tokens

where a visit counts as much as its device's link is slow, and a load as much as its device is slow.

Routing drifts: what is balanced on average need not be so at any time, and held-out traffic is another time. So
the tokens are cut into windows, and the busiest device (and the load balance B) is taken in each window and
averaged. A limit on B is kept by a penalty on the excess, so that the search may pass through unbalanced
placements. Every placement it passes is offered to an archive that holds, for each limit, the cheapest
placement with B within it: one run serves a whole spectrum.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from coterie.placement.state import Hypergraph, Level, all_changes, apply_swap, build_level, visit_changes

_EPSILON = 1e-9
_PENALTY = 4.0  # cost of one mean device load above the limit; a few device visits per token


class Weights(NamedTuple):
    """What a placement costs; all in visits per token."""

    device: float
    node: float
    peak: float


class Archive(NamedTuple):
    """For each limit on B the cheapest placement seen; A limits, falling.

    Attributes:
        limit_A: [A] float64.
        cost_A: [A] float64, infinite where none was seen.
        device_AE: [A, E] int32, device of each expert.
    """

    limit_A: NDArray[np.float64]
    cost_A: NDArray[np.float64]
    device_AE: NDArray[np.int32]


class Situation(NamedTuple):
    """What does not change during a search.

    Attributes:
        graph: token sets.
        node_G: [G] int32, node of each device.
        group_E: [E] int32, only experts of one group are swapped.
        share_WE: [W, E] float64, load of each expert in each window as a share of what a device of speed 1 would
            have there if all were busy equally long.
        num_tokens: T.
        weights: what a visit costs.
        slowness_G: [G] float64, 1 / speed of each device; what multiplies a load is how long it takes.
        price_G: [G] float64, what a visit to each device costs in visits; all 1 on equal links.
    """

    graph: Hypergraph
    node_G: NDArray[np.int32]
    group_E: NDArray[np.int32]
    share_WE: NDArray[np.float64]
    num_tokens: int
    weights: Weights
    slowness_G: NDArray[np.float64]
    price_G: NDArray[np.float64]


def new_archive(limit_A: NDArray[np.float64], num_experts: int) -> Archive:
    """An archive that has seen nothing."""
    return Archive(limit_A, np.full(limit_A.size, np.inf), np.zeros((limit_A.size, num_experts), dtype=np.int32))


@njit(cache=True, nogil=True)
def cost_of(situation: Situation, devices: Level, nodes: Level) -> float:
    """Cost of the current placement, visits per token."""
    weights = situation.weights
    price_G = situation.price_G
    total = weights.device * (devices.visits_VP[0] * price_G).sum() + weights.node * nodes.visits_VP[0].sum()
    for view in _windows(devices):
        total += weights.peak * (devices.visits_VP[view] * price_G).max()
    return float(total / situation.num_tokens)


@njit(cache=True, nogil=True)
def _windows(devices: Level) -> range:
    """The views that are windows; the one view of all tokens when there are none."""
    views = len(devices.visits_VP)
    return range(0, 1) if views == 1 else range(1, views)


@njit(cache=True, nogil=True)
def _balance(load_WG: NDArray[np.float64], slowness_G: NDArray[np.float64]) -> float:
    """B, averaged over windows."""
    total = 0.0
    for load_G in load_WG:
        total += (load_G * slowness_G).max()
    return total / len(load_WG)


@njit(cache=True, nogil=True)
def _offer(archive: Archive, cost: float, balance: float, device_E: NDArray[np.int32]) -> bool:
    """Keep a placement wherever it is the cheapest within a limit; whether it was kept anywhere."""
    kept = False
    for k in range(archive.limit_A.size):
        if balance <= archive.limit_A[k] + _EPSILON and cost < archive.cost_A[k] - _EPSILON:
            archive.cost_A[k] = cost
            archive.device_AE[k] = device_E
            kept = True
    return kept


@njit(cache=True, nogil=True)
def _max_without(values_G: NDArray[np.float64], largest_GG: NDArray[np.float64]) -> None:
    """For each pair of devices the largest value on any other device into [G, G]; 0 when there is none."""
    order = np.argsort(-values_G)[:3]
    for g in range(values_G.size):
        for h in range(values_G.size):
            largest_GG[g, h] = 0
            for candidate in order:
                if candidate not in (g, h):
                    largest_GG[g, h] = values_G[candidate]
                    break


@njit(cache=True, nogil=True)
def _excess(load: float, limit: float) -> float:
    return max(0.0, load - limit)


@njit(cache=True, nogil=True)
def _peak_and_balance(
    situation: Situation, devices: Level, load_WG: NDArray[np.float64], limit: float,
    others_VGG: NDArray[np.float64], a: int, b: int,
) -> float:  # fmt: skip
    """The peak's cost and the penalty of both devices if `a` and `b` swapped, summed over windows."""
    g, h = devices.part_E[a], devices.part_E[b]
    price_g, price_h = situation.price_G[g], situation.price_G[h]
    slow_g, slow_h = situation.slowness_G[g], situation.slowness_G[h]
    first = len(devices.visits_VP) - len(load_WG)
    peaks, excess = 0.0, 0.0
    for window in range(len(load_WG)):
        view = first + window
        change_g, change_h = visit_changes(devices, view, a, b)
        visits_g = (devices.visits_VP[view, g] + change_g) * price_g
        visits_h = (devices.visits_VP[view, h] + change_h) * price_h
        peaks += max(visits_g, visits_h, others_VGG[view, g, h])
        shift = situation.share_WE[window, b] - situation.share_WE[window, a]
        excess += _excess((load_WG[window, g] + shift) * slow_g, limit)
        excess += _excess((load_WG[window, h] - shift) * slow_h, limit)
    return situation.weights.peak / situation.num_tokens * peaks + _PENALTY / len(load_WG) * excess


@njit(cache=True, nogil=True)
def _bounds(
    situation: Situation, devices: Level, load_WG: NDArray[np.float64], limit: float, others_VGG: NDArray[np.float64]
) -> NDArray[np.float64]:
    """For each pair of devices what the peak and the penalty of both cost now, and at least after a swap, [2, G, G]."""
    num_devices = load_WG.shape[1]
    peak_scale, penalty = situation.weights.peak / situation.num_tokens, _PENALTY / len(load_WG)
    bounds_2GG = np.zeros((2, num_devices, num_devices), dtype=np.float64)
    slowness_G = situation.slowness_G
    for window, view in enumerate(_windows(devices)):
        visits_G = devices.visits_VP[view] * situation.price_G
        _max_without(visits_G, others_VGG[view])
        top = visits_G.max()
        for g in range(num_devices):
            for h in range(num_devices):
                slow_g, slow_h = slowness_G[g], slowness_G[h]
                over = _excess(load_WG[window, g] * slow_g, limit) + _excess(load_WG[window, h] * slow_h, limit)
                speed = 1 / slow_g + 1 / slow_h  # together they are busy for at least load / speed
                least = _excess((load_WG[window, g] + load_WG[window, h]) / speed, limit)
                least *= speed * min(slow_g, slow_h)
                bounds_2GG[0, g, h] += peak_scale * top + penalty * over
                bounds_2GG[1, g, h] += peak_scale * others_VGG[view, g, h] + penalty * least
    return bounds_2GG


@njit(cache=True, nogil=True)
def _best_swap(
    situation: Situation, devices: Level, nodes: Level, load_WG: NDArray[np.float64], limit: float,
    tabu_EG: NDArray[np.int64], now: int, aspiration: float,
) -> tuple[int, int, float]:  # fmt: skip
    """The swap that changes the penalised cost least (or lowers it most), tabu swaps only below `aspiration`.

    Most pairs are dismissed by their visits alone: what peak and balance can give back is bounded.
    """
    num_devices = load_WG.shape[1]
    others_VGG = np.empty((len(devices.visits_VP), num_devices, num_devices), dtype=np.float64)
    now_GG, least_GG = _bounds(situation, devices, load_WG, limit, others_VGG)
    node_G, group_E = situation.node_G, situation.group_E
    device_scale = situation.weights.device / situation.num_tokens
    node_scale = situation.weights.node / situation.num_tokens
    price_G = situation.price_G
    priced = price_G.min() < price_G.max()
    best_a, best_b, best_change = -1, -1, np.inf
    devices_EE = np.empty((group_E.size, group_E.size), dtype=np.int32)
    all_changes(devices, devices_EE)
    nodes_EE = devices_EE
    if node_scale > 0.0:
        nodes_EE = np.empty((group_E.size, group_E.size), dtype=np.int32)
        all_changes(nodes, nodes_EE)
    for a in range(group_E.size):
        g = devices.part_E[a]
        bound_G = least_GG[g] - now_GG[g]
        for b in range(a + 1, group_E.size):
            h = devices.part_E[b]
            change = device_scale * devices_EE[a, b]
            if priced:
                change_g, change_h = visit_changes(devices, 0, a, b)
                change = device_scale * (change_g * price_G[g] + change_h * price_G[h])
            if node_G[g] != node_G[h]:
                change += node_scale * nodes_EE[a, b]
            if change + bound_G[h] >= best_change or g == h or group_E[a] != group_E[b]:
                continue
            change -= now_GG[g, h]
            change += _peak_and_balance(situation, devices, load_WG, limit, others_VGG, a, b)
            tabu = tabu_EG[a, h] > now and tabu_EG[b, g] > now
            if change < best_change and (not tabu or change < aspiration):
                best_a, best_b, best_change = a, b, change
    return best_a, best_b, best_change


@njit(cache=True, nogil=True)
def tabu_search(
    situation: Situation, start_E: NDArray[np.int32], limit: float, patience: int, most: int, seed: int,
    archive: Archive,
) -> int:  # fmt: skip
    """Search from `start_E` under a limit on B until `patience` swaps in a row bring nothing new; swaps made.

    Args:
        situation: what does not change.
        start_E: [E] int32, device of each expert.
        limit: largest wanted B.
        patience: swaps without a better penalised cost or a better archive before it stops.
        most: swaps at most.
        seed: of the tabu tenures.
        archive: filled along the way.
    """
    np.random.seed(seed)
    graph, node_G, share_WE = situation.graph, situation.node_G, situation.share_WE
    num_experts = start_E.size
    devices = build_level(graph, start_E, node_G.size, True)
    nodes = build_level(graph, node_G[start_E], node_G.max() + 1, False)
    load_WG = np.zeros((len(share_WE), node_G.size))
    for e in range(num_experts):
        load_WG[:, start_E[e]] += share_WE[:, e]
    tabu_EG = np.zeros((num_experts, node_G.size), dtype=np.int64)
    cost = cost_of(situation, devices, nodes)
    slowness_G = situation.slowness_G
    current = cost + _PENALTY * np.maximum(load_WG * slowness_G - limit, 0.0).sum() / len(load_WG)
    best, idle, swaps = current, 0, 0
    _offer(archive, cost, _balance(load_WG, slowness_G), devices.part_E)
    while swaps < most and idle < patience:
        a, b, change = _best_swap(
            situation, devices, nodes, load_WG, limit, tabu_EG, swaps, best - current - _EPSILON
        )  # fmt: skip
        if a < 0:
            break
        g, h = devices.part_E[a], devices.part_E[b]
        apply_swap(devices, graph, a, b)
        if node_G[g] != node_G[h]:
            apply_swap(nodes, graph, a, b)
        load_WG[:, g] += share_WE[:, b] - share_WE[:, a]
        load_WG[:, h] += share_WE[:, a] - share_WE[:, b]
        swaps += 1
        tabu_EG[a, g] = swaps + num_experts // 8 + np.random.randint(0, num_experts // 4 + 2)
        tabu_EG[b, h] = swaps + num_experts // 8 + np.random.randint(0, num_experts // 4 + 2)
        current += change
        balance = _balance(load_WG, slowness_G)
        kept = _offer(archive, cost_of(situation, devices, nodes), balance, devices.part_E)
        idle = 0 if kept or current < best - _EPSILON else idle + 1
        best = min(best, current)
    return swaps
