"""CAP's Algorithm 1 against a plain restatement of the paper's listing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from coterie.placement.greedy import algorithm_1, groups_to_nodes, grow_groups
from coterie.topology import Topology


def restated(p: np.ndarray, k: int) -> list[list[int]]:
    """Algorithm 1 of the paper for n experts on k GPUs, where no score is zero; the lower number wins a tie."""
    n = len(p)
    degree = [sum(p[i][j] for j in range(n) if j != i) for i in range(n)]
    order = sorted(range(n), key=lambda i: -degree[i])
    groups = [[order[g]] for g in range(k)]
    unassigned = set(range(n)) - set(order[:k])
    g = 0
    while unassigned:
        scores = {e: sum(p[v][e] for v in groups[g]) for e in unassigned}
        best = min(unassigned, key=lambda e: (-scores[e], e))
        assert scores[best] > 0
        groups[g].append(best)
        unassigned.remove(best)
        g = (g + 1) % k
    return groups


def affinity(experts: int, seed: int) -> np.ndarray:
    """Symmetric, positive off the diagonal; sums of its values are exact."""
    values = np.random.default_rng(seed).integers(1, 2**20, (experts, experts)) / 2**22
    upper = np.triu(values, 1)
    return upper + upper.T


def members(part_E: np.ndarray) -> list[set[int]]:
    return [set(np.flatnonzero(part_E == g).tolist()) for g in range(int(part_E.max()) + 1)]


@pytest.mark.parametrize(("experts", "parts"), [(16, 4), (12, 6), (9, 3), (8, 1), (5, 5)])
@pytest.mark.parametrize("seed", range(4))
def test_it_is_the_paper_s_algorithm(experts: int, parts: int, seed: int) -> None:
    p_EE = affinity(experts, seed)
    capacity = np.full(parts, experts // parts)
    part_E = grow_groups(p_EE, capacity, np.random.default_rng(0))
    assert members(part_E) == [set(group) for group in restated(p_EE, parts)]


def test_ties_go_to_the_lower_number() -> None:
    p_EE = np.ones((6, 6)) - np.eye(6)
    part_E = grow_groups(p_EE, np.array([3, 3]), np.random.default_rng(0))
    assert members(part_E) == [{0, 2, 4}, {1, 3, 5}]


@pytest.mark.parametrize("capacity", [[1, 5, 2], [4, 3, 3], [1, 1, 9]])
def test_a_full_part_is_passed_over(capacity: list[int]) -> None:
    part_E = grow_groups(affinity(sum(capacity), 1), np.array(capacity), np.random.default_rng(0))
    assert np.bincount(part_E).tolist() == capacity


def test_at_zero_affinity_the_seed_draws_uniformly() -> None:
    nothing = np.zeros((6, 6))
    capacity = np.array([3, 3])
    first, again = (grow_groups(nothing, capacity, np.random.default_rng(3)) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    partner: Counter[int] = Counter()
    for seed in range(400):
        part_E = grow_groups(nothing, capacity, np.random.default_rng(seed))
        assert part_E[:2].tolist() == [0, 1]  # the seeds: all degrees are equal
        partner.update(np.flatnonzero(part_E[2:] == 0).tolist())
    assert set(partner) == {0, 1, 2, 3}
    assert all(abs(count - 200) < 50 for count in partner.values())  # five standard deviations


def test_only_experts_without_company_are_drawn() -> None:
    """Two hubs with two companions each, and two loners: companions follow their hub whatever the seed."""
    p_EE = np.zeros((8, 8))
    for hub, companion, value in ((0, 2, 0.5), (0, 4, 0.3), (1, 3, 0.4), (1, 5, 0.35)):
        p_EE[hub, companion] = p_EE[companion, hub] = value
    loners = set()
    for seed in range(20):
        part_E = grow_groups(p_EE, np.array([4, 4]), np.random.default_rng(seed))
        assert part_E[:6].tolist() == [0, 1, 0, 1, 0, 1]
        loners.add(tuple(part_E[6:].tolist()))
    assert loners == {(0, 1), (1, 0)}


def test_second_stage_is_the_same_rule_on_groups(make_problem: Any) -> None:
    problem = make_problem("2x3", experts=18, top_k=5)
    group_E = grow_groups(problem.jaccard_EE, problem.slots_G, np.random.default_rng(0))
    device_E = groups_to_nodes(problem, group_E, np.random.default_rng(0))
    between = np.zeros((6, 6))
    for g in range(6):
        for h in range(6):
            if g != h:
                between[g, h] = problem.jaccard_EE[group_E == g][:, group_E == h].sum()
    nodes = restated(between, 2)
    for node, groups in enumerate(nodes):
        experts = {e for e in range(18) if group_E[e] in groups}
        assert experts == {e for e in range(18) if device_E[e] // 3 == node}
    assert sorted(map(sorted, members(device_E))) == sorted(map(sorted, members(group_E)))  # groups stay whole


@pytest.mark.parametrize("topology", ["4", "4x1", Topology(2, 2, slots_per_device=(5, 3, 4, 4))])
def test_second_stage_has_nothing_to_do(make_problem: Any, topology: Any) -> None:
    problem = make_problem(topology)
    group_E = grow_groups(problem.jaccard_EE, problem.slots_G, np.random.default_rng(0))
    np.testing.assert_array_equal(groups_to_nodes(problem, group_E, np.random.default_rng(0)), group_E)


def test_algorithm_1_is_both_stages_from_one_seed(make_problem: Any) -> None:
    problem = make_problem("2x2")
    rng = np.random.default_rng(5)
    expected = groups_to_nodes(problem, grow_groups(problem.jaccard_EE, problem.slots_G, rng), rng)
    np.testing.assert_array_equal(algorithm_1(problem, 5), expected)
    np.testing.assert_array_equal(np.bincount(expected), problem.slots_G)
