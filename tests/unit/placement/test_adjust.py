"""CAP's objectives and its adjustment, recomputed at every step."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from coterie.placement.adjust import adjustment, communication_objective, load_imbalance, swap_costs
from coterie.placement.greedy import algorithm_1
from coterie.placement.problem import LayerProblem

TOPOLOGIES = ["4", "2x2,inter=5", "2x3,inter=2"]


def plain_c(problem: LayerProblem, device_E: np.ndarray) -> float:
    """CAP eq. 2 with the distances of eq. 3, divided by the sum of p_ij."""
    topology = problem.topology
    total = weighted = 0.0
    for i, j in itertools.combinations(range(problem.num_experts), 2):
        g, h = int(device_E[i]), int(device_E[j])
        same_node = g // topology.devices_per_node == h // topology.devices_per_node
        distance = 0 if g == h else 1 if same_node else topology.inter_cost
        weighted += problem.jaccard_EE[i, j] * distance
        total += problem.jaccard_EE[i, j]
    return weighted / total


def swapped(device_E: np.ndarray, i: int, j: int) -> np.ndarray:
    result = device_E.copy()
    result[[i, j]] = result[[j, i]]
    return result


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_objective_and_the_cost_of_every_swap(make_problem: Any, topology: str) -> None:
    problem = make_problem(topology, experts=12, tokens=200)
    device_E = np.random.default_rng(0).permutation(np.repeat(np.arange(problem.num_devices), problem.slots_G))
    now = plain_c(problem, device_E)
    assert communication_objective(problem, device_E) == pytest.approx(now)
    changes_EE = swap_costs(problem, device_E)
    for i, j in itertools.product(range(12), repeat=2):
        assert changes_EE[i, j] == pytest.approx(plain_c(problem, swapped(device_E, i, j)) - now, abs=1e-12)


def test_normalised_the_objective_lies_between_the_distances(make_problem: Any) -> None:
    problem = make_problem("2x2,inter=5")
    together = np.zeros(16, dtype=np.int64)
    assert communication_objective(problem, together) == 0
    assert communication_objective(problem, np.arange(16) % 2) <= 1
    assert communication_objective(problem, np.arange(16) % 4) <= 5


def test_without_any_company_nothing_costs(make_problem: Any) -> None:
    problem = make_problem("4", top_k=1)
    device_E = np.repeat(np.arange(4), 4)
    assert communication_objective(problem, device_E) == 0
    assert not swap_costs(problem, device_E).any()


def test_imbalance_is_the_largest_load_over_the_mean() -> None:
    device_E = np.array([0, 0, 1, 1])
    assert load_imbalance(np.array([1, 2, 3, 6]), device_E, 2) == 9 / 6
    assert load_imbalance(np.array([1, 2, 3, 6]), device_E, 3) == 9 / 4  # a device without experts counts
    assert load_imbalance(np.zeros(4), device_E, 2) == 1


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("trade_off", [0.0, 0.5, 1.0])
def test_every_step_is_the_swap_that_the_rule_names(make_problem: Any, topology: str, trade_off: float) -> None:
    problem = make_problem(topology, experts=18, seed=2)
    start_E = algorithm_1(problem, 0)
    path = adjustment(problem, start_E, trade_off)
    np.testing.assert_array_equal(path[0], start_E)
    assert len(path) > 2

    def loads(device_E: np.ndarray) -> np.ndarray:
        return np.bincount(device_E, weights=problem.load_E, minlength=problem.num_devices)

    def better_swaps(device_E: np.ndarray) -> dict[tuple[int, int], float]:
        """Swaps between the busiest device and one below the mean, both less busy after; what the rule minimises."""
        load_G, result = loads(device_E), {}
        high = int(load_G.argmax())
        for i, j in itertools.product(range(problem.num_experts), repeat=2):
            if device_E[i] == high and load_G[device_E[j]] < load_G.mean():
                then = swapped(device_E, i, j)
                if max(loads(then)[[high, device_E[j]]]) < load_G[high]:
                    balance = loads(then).max() / load_G.mean()
                    result[i, j] = trade_off * plain_c(problem, then) + (1 - trade_off) * balance
        return result

    for before, after in itertools.pairwise(path):
        swap = np.flatnonzero(before != after)
        assert swap.size == 2
        scores = better_swaps(before)
        i, j = sorted(swap.tolist(), key=lambda e: before[e] != loads(before).argmax())
        np.testing.assert_array_equal(after, swapped(before, i, j))
        assert scores[i, j] == pytest.approx(min(scores.values()))
        most, fewer = loads(before).max(), loads(after)
        assert fewer.max() < most or (fewer == most).sum() < (loads(before) == most).sum()
    assert not better_swaps(path[-1])


def test_with_nothing_routed_there_is_nothing_to_adjust(make_problem: Any) -> None:
    problem = replace(make_problem("4"), load_E=np.zeros(16, dtype=np.int64))
    start_E = np.repeat(np.arange(4), 4)
    np.testing.assert_array_equal(adjustment(problem, start_E), start_E[None])


def test_one_device_has_nowhere_to_go(make_problem: Any) -> None:
    problem = make_problem("1")
    assert len(adjustment(problem, np.zeros(16, dtype=np.int64))) == 1
