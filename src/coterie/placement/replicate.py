"""Copies where they lower the objective most, and experts around them: the default method with slots to spare.

Tokens choose copies and copies choose devices, in turns, as in k-means. Given who uses which copy, copies are vertices
like experts are, and `refine`'s search places them; given where copies are, the dispatch rule says who uses which. What
the search passes is measured with the choice made again, so nothing is taken on trust.

Source: algorithms §2, "Replication".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from coterie.placement.balance import eplb
from coterie.placement.copies import FEWEST_DEVICES, Copies, choose_fewest, own_slots
from coterie.placement.groups import on_other_vertices
from coterie.placement.objective import Objective
from coterie.placement.problem import NO_EXPERT, LayerProblem
from coterie.placement.refine import NUM_LIMITS, refine, search_from

ROUNDS = 3
_TRIED = 6  # copies measured, of those that look best
_SHARPNESS = 20.0  # how surely the busiest device alone decides


@dataclass(frozen=True)
class Choice:
    """What the token sets make of a layer's copies.

    Attributes:
        copies: the copies.
        copy_UK: [U, K] the copy each set uses of each of its experts.
        load_WG: [W, G] token-expert pairs.
        visits_WG: [W, G] tokens that visit.
        node_visits: visits to nodes.
    """

    copies: Copies
    copy_UK: NDArray[np.int32]
    load_WG: NDArray[np.int64]
    visits_WG: NDArray[np.int64]
    node_visits: int


def replicate(problem: LayerProblem, objective: Objective, seed: int) -> NDArray[np.bool_]:
    """Placements with copies in all slots, from the cheapest to the most balanced, [A, E, G].

    Args:
        problem: the layer, with more slots than experts.
        objective: what a visit costs, and what B is worth when a start is chosen.
        seed: of the searches.
    """
    own = replace(problem, slots_G=own_slots(problem.slots_G, problem.num_experts))
    found: list[NDArray[np.bool_]] = []
    eye = np.eye(problem.num_devices, dtype=bool)
    starts = [eye[device_E] for device_E in refine(own, objective, seed)]
    for turn in range(ROUNDS):
        start_EG = min(starts, key=lambda hosts_EG: score(problem, objective, hosts_EG))
        start_EG = fill(problem, objective, start_EG)
        found.append(start_EG)
        choice = choose(problem, start_EG)
        vertices, copies = _as_vertices(problem, choice), choice.copies
        placed = search_from(vertices, objective, seed + turn + 1, NUM_LIMITS, [copies.device_P], eplb(vertices))
        starts = []
        for device_P in placed:
            hosts_EG = np.zeros_like(start_EG)
            hosts_EG[copies.expert_P, device_P] = True
            starts.append(fill(problem, objective, hosts_EG))
        found += starts
    distinct: NDArray[np.bool_] = np.unique(np.stack(found), axis=0)
    return distinct


def score(problem: LayerProblem, objective: Objective, hosts_EG: NDArray[np.bool_]) -> float:
    """The objective on the token sets, balance included, busiest devices averaged over windows."""
    return _score(problem, objective, choose(problem, hosts_EG))


def _score(problem: LayerProblem, objective: Objective, choice: Choice) -> float:
    price_G, _ = problem.topology.visit_prices()
    paid_WG, tokens = choice.visits_WG * price_G, max(problem.num_tokens, 1)
    cost = objective.device * paid_WG.sum() + objective.node * choice.node_visits
    cost += objective.peak * paid_WG.max(axis=1).sum()
    time_WG = choice.load_WG / problem.speed_G
    mean_W = choice.load_WG.sum(axis=1) / problem.speed_G.sum()
    balance = np.mean(time_WG.max(axis=1) / np.maximum(mean_W, 1e-9))
    return float(cost / tokens + objective.balance * balance)


def choose(problem: LayerProblem, hosts_EG: NDArray[np.bool_]) -> Choice:
    """Have every token set choose its copies."""
    copies, kept_UK = Copies.of(hosts_EG), problem.sets_UK != NO_EXPERT
    copy_UK = np.full(problem.sets_UK.shape, NO_EXPERT, dtype=np.int32)
    num_windows, node_G = int(problem.window_U.max(initial=0)) + 1, problem.topology.node_of_device()
    by_company = problem.dispatch == FEWEST_DEVICES
    rule = choose_fewest if by_company else _choose_in_turn
    rule(
        problem.sets_UK, kept_UK, problem.multiplicity_U, copies.start_E, copies.device_P, node_G, 1 / problem.speed_G,
        np.zeros(problem.num_devices), copy_UK,
    )  # fmt: skip
    load_WG, visits_WG = (np.zeros((num_windows, problem.num_devices), dtype=np.int64) for _ in range(2))
    nodes = _count(copy_UK, problem.multiplicity_U, problem.window_U, copies.device_P, node_G, load_WG, visits_WG)
    return Choice(copies, copy_UK, load_WG, visits_WG, nodes)


def fill(problem: LayerProblem, objective: Objective, hosts_EG: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Put copies into all free slots, one after another, each where it lowers the objective most, [E, G]."""
    hosts_EG = hosts_EG.copy()
    while True:
        free_G = hosts_EG.sum(axis=0) < problem.slots_G
        if not free_G.any():
            return hosts_EG
        gain_EG = np.where(free_G & ~hosts_EG, _gains(problem, objective, choose(problem, hosts_EG)), -np.inf)
        tried = np.argsort(-gain_EG, axis=None, kind="stable")[:_TRIED]
        options = [divmod(int(index), problem.num_devices) for index in tried if np.isfinite(gain_EG.flat[index])]
        scores = []
        for expert, device in options:
            hosts_EG[expert, device] = True
            scores.append(score(problem, objective, hosts_EG))
            hosts_EG[expert, device] = False
        hosts_EG[options[int(np.argmin(scores))]] = True


def _gains(problem: LayerProblem, objective: Objective, choice: Choice) -> NDArray[np.float64]:
    """What a copy of each expert on each device would save about, in visits, [E, G].

    A visit to a device costs more, the nearer that is to being the busiest; so does a pair.
    """
    price_G, _ = problem.topology.visit_prices()
    busy_WG, time_WG = choice.visits_WG * price_G, choice.load_WG / problem.speed_G
    visit_WG = objective.device * price_G + objective.peak * price_G * _likely_busiest(busy_WG)
    pairs = max(choice.load_WG.sum() / max(problem.num_tokens, 1), 1e-9)
    pair_WG = objective.balance * problem.speed_G.sum() / problem.speed_G / pairs * _likely_busiest(time_WG)
    gain_EG = np.zeros((problem.num_experts, problem.num_devices))
    _add_gains(
        problem.sets_UK, choice.copy_UK, problem.multiplicity_U, problem.window_U, choice.copies.device_P,
        problem.topology.node_of_device(), visit_WG, pair_WG, objective.node, problem.dispatch == FEWEST_DEVICES,
        gain_EG,
    )  # fmt: skip
    if problem.dispatch != FEWEST_DEVICES:  # a new copy gets its share of the tokens, whatever that does for them
        gain_EG /= np.diff(choice.copies.start_E)[:, None] + 1
    return gain_EG


def _likely_busiest(value_WG: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of each window, how likely each device is the busiest, [W, G]: a soft maximum."""
    top_W1 = np.maximum(value_WG.max(axis=1, keepdims=True), 1e-9)
    weight_WG = np.exp(_SHARPNESS * (value_WG / top_W1 - 1))
    likely_WG: NDArray[np.float64] = weight_WG / weight_WG.sum(axis=1, keepdims=True)
    return likely_WG


def _as_vertices(problem: LayerProblem, choice: Choice) -> LayerProblem:
    """The problem with copies as vertices, each used by the tokens that chose it."""
    kept_UK, copies = choice.copy_UK != NO_EXPERT, choice.copies
    used_P = np.zeros(copies.expert_P.size)
    rows, columns = np.nonzero(kept_UK)
    np.add.at(used_P, choice.copy_UK[rows, columns], problem.multiplicity_U[rows])
    used_E = np.bincount(copies.expert_P, weights=used_P, minlength=problem.num_experts)
    share_P = used_P / np.maximum(used_E[copies.expert_P], 1)
    load_P = np.rint(problem.load_E[copies.expert_P] * share_P).astype(np.int64)
    ids_UK = np.where(kept_UK, choice.copy_UK, 0)
    return on_other_vertices(problem, ids_UK, kept_UK, copies.expert_P.size, problem.topology, problem.slots_G, load_P)


@njit(cache=True, nogil=True)
def _choose_in_turn(
    sets_UK: Any, kept_UK: Any, multiplicity_U: Any, start_E: Any, device_P: Any, node_G: Any, slowness_G: Any,
    load_G: Any, copy_UK: Any,
) -> None:  # fmt: skip
    """Sets take an expert's copies in turn: what the rules nearest and random come to over many homes."""
    turn_E = np.zeros(start_E.size - 1, dtype=np.int64)
    for u in range(len(sets_UK)):
        for k in range(sets_UK.shape[1]):
            if kept_UK[u, k]:
                e = sets_UK[u, k]
                copy_UK[u, k] = start_E[e] + turn_E[e] % (start_E[e + 1] - start_E[e])
                turn_E[e] += 1


@njit(cache=True, nogil=True)
def _count(
    copy_UK: Any, multiplicity_U: Any, window_U: Any, device_P: Any, node_G: Any, load_WG: Any, visits_WG: Any
) -> int:
    """Add up loads and visits of devices; returns visits to nodes."""
    seen_G = np.full(node_G.size, -1, dtype=np.int64)
    seen_N = np.full(node_G.max() + 1, -1, dtype=np.int64)
    nodes = 0
    for u in range(len(copy_UK)):
        for p in copy_UK[u]:
            if p < 0:
                continue
            g = device_P[p]
            load_WG[window_U[u], g] += multiplicity_U[u]
            if seen_G[g] != u:
                seen_G[g] = u
                visits_WG[window_U[u], g] += multiplicity_U[u]
                if seen_N[node_G[g]] != u:
                    seen_N[node_G[g]] = u
                    nodes += multiplicity_U[u]
    return int(nodes)


@njit(cache=True, nogil=True)
def _add_gains(
    sets_UK: Any, copy_UK: Any, multiplicity_U: Any, window_U: Any, device_P: Any, node_G: Any, visit_WG: Any,
    pair_WG: Any, node_cost: float, by_company: bool, gain_EG: Any,
) -> None:  # fmt: skip
    """Add what each set would save with a new copy of one of its experts on another device.

    With `by_company` only sets that save take it; else all would.
    """
    num_devices = visit_WG.shape[1]
    for u in range(len(copy_UK)):
        count_G = np.zeros(num_devices, dtype=np.int64)
        count_N = np.zeros(node_G.max() + 1, dtype=np.int64)
        for p in copy_UK[u]:
            if p >= 0:
                count_G[device_P[p]] += 1
                count_N[node_G[device_P[p]]] += 1
        visit_G, pair_G = visit_WG[window_U[u]], pair_WG[window_U[u]]
        for k in range(copy_UK.shape[1]):
            if copy_UK[u, k] < 0:
                continue
            here = device_P[copy_UK[u, k]]
            paid = pair_G[here] + (visit_G[here] if count_G[here] == 1 else 0.0)
            paid += node_cost if count_N[node_G[here]] == 1 else 0.0
            for g in range(num_devices):
                there = pair_G[g] + (visit_G[g] if count_G[g] == 0 else 0.0)
                there += node_cost if count_N[node_G[g]] == 0 else 0.0
                if there < paid or not by_company:
                    gain_EG[sets_UK[u, k], g] += multiplicity_U[u] * (paid - there)
