"""The default method: refine on what tokens visit, for a whole range of limits on balance at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie.placement.adjust import load_imbalance
from coterie.placement.balance import eplb
from coterie.placement.greedy import algorithm_1
from coterie.placement.groups import coarsen, place_in_groups
from coterie.placement.objective import Objective
from coterie.placement.problem import NO_EXPERT, LayerProblem
from coterie.placement.search import Archive, Situation, new_archive, tabu_search
from coterie.placement.state import build_hypergraph

NUM_LIMITS = 8
PATIENCE = 50
_MOST_SWAPS = 20_000
_UNLIMITED = 1e9


def refine(problem: LayerProblem, objective: Objective, seed: int, num_limits: int = NUM_LIMITS) -> NDArray[np.int64]:
    """The cheapest placements found for limits on B from none to EPLB's, [A, E].

    Source: algorithms §2. From CAP's Algorithm 1, without a limit, then limit by limit towards EPLB's balance,
    each search starting from the best placement the earlier ones passed.

    Args:
        problem: the layer.
        objective: what a visit costs.
        seed: of the start's ties and the search.
        num_limits: A, limits on B.
    """
    if problem.num_groups > 1:
        return _refine_in_groups(problem, objective, seed, num_limits)
    every_expert = np.zeros(problem.num_experts, dtype=np.int32)
    return _search(problem, objective, seed, num_limits, algorithm_1(problem, seed), eplb(problem), every_expert)


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
    return _search(problem, objective, seed, num_limits, start_E, balanced_E, group_E)


def _search(
    problem: LayerProblem, objective: Objective, seed: int, num_limits: int,
    start_E: NDArray[np.int64], balanced_E: NDArray[np.int64], group_E: NDArray[np.int32],
) -> NDArray[np.int64]:  # fmt: skip
    """Search under falling limits; `start_E` begins, `balanced_E` says how far balance can go."""
    situation, share_WE = _situation(problem, objective, group_E), _window_shares(problem)

    def run(from_E: NDArray[np.int64], limit: float, archive: Archive, turn: int) -> None:
        tabu_search(
            situation, from_E.astype(np.int32), limit, PATIENCE, _MOST_SWAPS, (seed * 7919 + turn) % 2**31, archive
        )

    def balance(device_E: NDArray[np.int64]) -> float:
        return float(np.mean([load_imbalance(share_E, device_E, problem.num_devices) for share_E in share_WE]))

    free = new_archive(np.array([_UNLIMITED]), problem.num_experts)
    run(start_E, _UNLIMITED, free, 0)
    cheapest_E = free.device_AE[0].astype(np.int64)
    loosest = balance(cheapest_E)
    tightest = min(balance(balanced_E), loosest)
    archive = new_archive(np.geomspace(loosest, tightest, num_limits), problem.num_experts)
    for turn, limit in enumerate(archive.limit_A):
        found = np.isfinite(archive.cost_A[turn])
        run(archive.device_AE[turn].astype(np.int64) if found else cheapest_E, limit, archive, turn + 1)
    run(balanced_E, archive.limit_A[-1], archive, num_limits + 1)  # whatever happens, EPLB's balance is reached
    candidates: NDArray[np.int64] = np.unique(archive.device_AE.astype(np.int64), axis=0)
    return candidates


def _situation(problem: LayerProblem, objective: Objective, group_E: NDArray[np.int32]) -> Situation:
    graph = build_hypergraph(problem.sets_UK, problem.multiplicity_U, problem.window_U, problem.num_experts)
    node_G = problem.topology.node_of_device().astype(np.int32)
    tokens = max(problem.num_tokens, 1)
    return Situation(graph, node_G, group_E, _window_shares(problem), tokens, objective.weights())


def _window_shares(problem: LayerProblem) -> NDArray[np.float64]:
    """Load of each expert in each window as a share of the mean device load there, [W, E].

    The token sets say how an expert's load spreads over windows, `load_E` how large it is: a vertex that stands
    for several experts is in a set once, and the sets may be a sample.
    """
    num_windows = int(problem.window_U.max(initial=0)) + 1
    sets_WE = np.zeros((num_windows, problem.num_experts))
    rows, columns = np.nonzero(problem.sets_UK != NO_EXPERT)
    np.add.at(sets_WE, (problem.window_U[rows], problem.sets_UK[rows, columns]), problem.multiplicity_U[rows])
    load_WE = sets_WE * (problem.load_E / np.maximum(sets_WE.sum(axis=0), 1))
    share_WE: NDArray[np.float64] = load_WE * problem.num_devices / np.maximum(load_WE.sum(axis=1, keepdims=True), 1)
    return share_WE
