"""The default method: refine on what tokens visit, for a whole range of limits on balance at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.placement.adjust import adjustment, load_imbalance
from coterie.placement.balance import eplb
from coterie.placement.greedy import algorithm_1, grow_groups
from coterie.placement.groups import coarsen, nodes_as_devices, place_in_groups
from coterie.placement.objective import Objective
from coterie.placement.problem import NO_EXPERT, LayerProblem
from coterie.placement.search import Situation, new_archive, tabu_search
from coterie.placement.state import build_hypergraph

NUM_LIMITS = 6
NUM_TAIL_LIMITS = 6
PATIENCE = 30
_MOST_SWAPS = 20_000
_UNLIMITED = 1e9


def refine(problem: LayerProblem, objective: Objective, seed: int, num_limits: int = NUM_LIMITS) -> NDArray[np.int64]:
    """The cheapest placements found for limits on B, from none to better than EPLB's, [A, E].

    Source: algorithms §2. From CAP's Algorithm 1, without a limit, then limit by limit towards the best balance,
    each search starting from the best placement the earlier ones passed.

    Args:
        problem: the layer.
        objective: what a visit costs.
        seed: of the start's ties and the search.
        num_limits: A, limits on B.
    """
    if problem.num_groups > 1:
        return _refine_in_groups(problem, objective, seed, num_limits)
    starts = [algorithm_1(problem, seed)]
    if problem.topology.num_nodes > 1:
        starts.append(_nodes_first(problem, objective, seed))
    return search_from(problem, objective, seed, num_limits, starts, eplb(problem))


def search_from(
    problem: LayerProblem, objective: Objective, seed: int, num_limits: int,
    starts: Sequence[NDArray[np.int64]], balanced_E: NDArray[np.int64],
) -> NDArray[np.int64]:  # fmt: skip
    """`refine` from starts of the caller's, [A, E]; a balanced placement says how far balance can go."""
    every_expert = np.zeros(problem.num_experts, dtype=np.int32)
    return _search(problem, objective, seed, num_limits, starts, balanced_E, every_expert)


def _nodes_first(problem: LayerProblem, objective: Objective, seed: int) -> NDArray[np.int64]:
    """Experts onto nodes by the nodes they make tokens visit alone, then CAP's groups on each, [E].

    Swaps between devices hardly ever find the way to another division between nodes.
    """
    topology = problem.topology
    slots_N = problem.slots_G.reshape(topology.num_nodes, -1).sum(axis=1)
    nodes = replace(problem, topology=nodes_as_devices(topology), slots_G=slots_N)
    visits = Objective(device=1.0, node=0.0, peak=0.0, balance=0.0)
    node_E, rng = refine(nodes, visits, seed, 1)[0], np.random.default_rng(seed)
    device_E = np.empty(problem.num_experts, dtype=np.int64)
    for node in range(topology.num_nodes):
        experts, devices = np.flatnonzero(node_E == node), np.flatnonzero(topology.node_of_device() == node)
        affinity_EE = problem.jaccard_EE[np.ix_(experts, experts)]
        device_E[experts] = devices[grow_groups(affinity_EE, problem.slots_G[devices], rng)]
    return device_E


def _refine_in_groups(problem: LayerProblem, objective: Objective, seed: int, num_limits: int) -> NDArray[np.int64]:
    """The same with routing groups kept whole: groups first, then experts within each (see `groups`)."""
    coarse = coarsen(problem)
    if coarse is not None and coarse.device_blocks:
        candidates = refine(coarse.problem, objective, seed, num_limits)
        expanded: NDArray[np.int64] = np.stack([coarse.expand(device_of_group) for device_of_group in candidates])
        return expanded

    def cheapest(part: LayerProblem) -> NDArray[np.int64]:
        best_E: NDArray[np.int64] = refine(part, objective, seed, 1)[0]
        return best_E

    size = problem.num_experts // problem.num_groups
    start_E = place_in_groups(problem, cheapest, lambda part: algorithm_1(part, seed))
    balanced_E = place_in_groups(problem, cheapest, eplb)
    group_E = np.repeat(np.arange(problem.num_groups, dtype=np.int32), size)
    return _search(problem, objective, seed, num_limits, [start_E], balanced_E, group_E)


def _search(
    problem: LayerProblem, objective: Objective, seed: int, num_limits: int,
    starts: Sequence[NDArray[np.int64]], balanced_E: NDArray[np.int64], group_E: NDArray[np.int32],
) -> NDArray[np.int64]:  # fmt: skip
    """Search under falling limits; the cheapest found from `starts` begins, `balanced_E` says how far balance can go.

    First with B averaged over windows, which drift cannot surprise; from the most balanced of these on with B of all
    tokens, which can fall further.
    """
    windowed = _situation(problem, objective, group_E, problem.window_U)
    free = new_archive(np.array([_UNLIMITED]), problem.num_experts)
    for start_E in starts:
        tabu_search(windowed, start_E.astype(np.int32), _UNLIMITED, PATIENCE, _MOST_SWAPS, _turn_seed(seed, 0), free)
    candidates = _chain(windowed, free.device_AE[0], balanced_E, num_limits, _turn_seed(seed, 1))
    if num_limits > 1:
        pooled = _situation(problem, objective, group_E, np.zeros_like(problem.window_U))
        most_balanced_E = min(candidates, key=lambda device_E: _balance(pooled, device_E))
        balanced = [balanced_E]
        if problem.num_groups == 1:  # CAP's swaps can go further than EPLB, but would break groups
            balanced.append(adjustment(problem, most_balanced_E.astype(np.int64))[-1])
        best_E = min(balanced, key=lambda device_E: _balance(pooled, device_E))
        tail = _chain(pooled, most_balanced_E, best_E, NUM_TAIL_LIMITS, _turn_seed(seed, 2))
        candidates = np.concatenate([candidates, tail, np.stack(balanced).astype(np.int32)])
    distinct: NDArray[np.int64] = np.unique(candidates.astype(np.int64), axis=0)
    return distinct


def _chain(
    situation: Situation, start_E: NDArray[np.int32], balanced_E: NDArray[np.int64], num_limits: int, seed: int
) -> NDArray[np.int32]:
    """The cheapest placements for limits on B from `start_E`'s to `balanced_E`'s, limit by limit, [A, E]."""
    loosest = _balance(situation, start_E)
    tightest = min(_balance(situation, balanced_E), loosest)
    archive = new_archive(np.geomspace(loosest, tightest, num_limits), start_E.size)
    for turn, limit in enumerate(archive.limit_A):
        from_E = archive.device_AE[turn].copy() if np.isfinite(archive.cost_A[turn]) else start_E
        tabu_search(situation, from_E, limit, PATIENCE, _MOST_SWAPS, _turn_seed(seed, turn), archive)
    # whatever happens, the balance of `balanced_E` is reached
    last = archive.limit_A[-1]
    tabu_search(
        situation, balanced_E.astype(np.int32), last, PATIENCE, _MOST_SWAPS, _turn_seed(seed, num_limits), archive
    )
    return archive.device_AE


def _turn_seed(seed: int, turn: int) -> int:
    return (seed * 7919 + turn) % 2**31


def _balance(situation: Situation, device_E: NDArray[Any]) -> float:
    """B, averaged over the windows of a situation."""
    num_devices, speed_G = situation.node_G.size, 1 / situation.slowness_G
    return float(np.mean([load_imbalance(share_E, device_E, num_devices, speed_G) for share_E in situation.share_WE]))


def _situation(
    problem: LayerProblem, objective: Objective, group_E: NDArray[np.int32], window_U: NDArray[np.int32]
) -> Situation:
    graph = build_hypergraph(problem.sets_UK, problem.multiplicity_U, window_U, problem.num_experts)
    node_G = problem.topology.node_of_device().astype(np.int32)
    tokens = max(problem.num_tokens, 1)
    share_WE, (price_G, _) = _window_shares(problem, window_U), problem.topology.visit_prices()
    return Situation(graph, node_G, group_E, share_WE, tokens, objective.weights(), 1 / problem.speed_G, price_G)


def _window_shares(problem: LayerProblem, window_U: NDArray[np.int32]) -> NDArray[np.float64]:
    """Load of each expert in each window as a share of the load of a device of speed 1 in balance, [W, E].

    The token sets say how an expert's load spreads over windows, `load_E` how large it is: a vertex that stands
    for several experts is in a set once, and the sets may be a sample.
    """
    num_windows = int(window_U.max(initial=0)) + 1
    sets_WE = np.zeros((num_windows, problem.num_experts))
    rows, columns = np.nonzero(problem.sets_UK != NO_EXPERT)
    np.add.at(sets_WE, (window_U[rows], problem.sets_UK[rows, columns]), problem.multiplicity_U[rows])
    load_WE = sets_WE * (problem.load_E / np.maximum(sets_WE.sum(axis=0), 1))
    speed = problem.speed_G.sum()
    share_WE: NDArray[np.float64] = load_WE * speed / np.maximum(load_WE.sum(axis=1, keepdims=True), 1)
    return share_WE
