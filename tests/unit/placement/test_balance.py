"""Placement by load alone against EPLB's rule restated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError
from coterie.placement.balance import eplb, imbalance, linear, pack
from coterie.topology import Topology


def restated(loads: list[float], capacity: list[int]) -> list[int]:
    """Heaviest first, into the lightest pack with room; lower numbers win ties."""
    packs: list[list[int]] = [[] for _ in capacity]
    for item in sorted(range(len(loads)), key=lambda i: (-loads[i], i)):
        open_packs = [g for g in range(len(capacity)) if len(packs[g]) < capacity[g]]
        lightest = min(open_packs, key=lambda g: (sum(loads[i] for i in packs[g]), g))
        packs[lightest].append(item)
    return [next(g for g, held in enumerate(packs) if i in held) for i in range(len(loads))]


@pytest.mark.parametrize("capacity", [[4, 4, 4, 4], [1, 2, 3], [7], [1] * 9, [5, 1, 1, 5]])
@pytest.mark.parametrize("largest", [0, 1, 3, 1000])
def test_packing_is_eplb_s(capacity: list[int], largest: int) -> None:
    for seed in range(5):
        load_E = np.random.default_rng(seed).integers(0, largest + 1, sum(capacity))
        assert pack(load_E, np.array(capacity)).tolist() == restated(load_E.tolist(), capacity)


def test_a_slow_device_is_busy_for_longer() -> None:
    load_G = np.array([6, 3, 3])
    assert imbalance(load_G, np.ones(3)) == 6 / 4
    assert imbalance(load_G, np.array([1, 0.5, 1])) == pytest.approx(6 / (12 / 2.5))
    assert imbalance(load_G, np.array([2, 1, 1])) == 1  # each is busy for 3
    assert imbalance(np.zeros(3), np.array([2, 1, 1])) == 1


def test_packing_goes_by_when_a_pack_is_done() -> None:
    """The 4 would keep the slow device busy for 8; later it gets what is left for it to hold."""
    load_E, speed_G = np.array([4, 3, 2, 1]), np.array([1, 0.5])
    assert pack(load_E, np.array([2, 2]), speed_G).tolist() == [0, 1, 0, 1]
    assert pack(load_E, np.array([2, 2]), np.ones(2)).tolist() == pack(load_E, np.array([2, 2])).tolist()


def test_equal_loads_give_one_definite_answer() -> None:
    assert pack(np.zeros(6), np.array([2, 2, 2])).tolist() == [0, 0, 1, 1, 2, 2]
    assert pack(np.ones(6), np.array([2, 2, 2])).tolist() == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf, -np.inf])
def test_impossible_loads_are_refused(bad: float) -> None:
    with pytest.raises(ConfigError, match="negative, infinite or not a number"):
        pack(np.array([1.0, bad, 2.0, 3.0]), np.array([2, 2]))


def test_linear_is_consecutive() -> None:
    assert linear(np.array([2, 1, 3])).tolist() == [0, 0, 1, 2, 2, 2]


def test_without_groups_it_packs_over_all_devices(make_problem: Any) -> None:
    for topology in ("3", "2x2", "16"):
        problem = make_problem(topology)
        assert eplb(problem).tolist() == restated(problem.load_E.tolist(), problem.slots_G.tolist())


def test_groups_go_to_nodes_first(make_problem: Any) -> None:
    """The hierarchical rule: whole groups onto nodes, then experts onto the node's devices."""
    problem = make_problem("2x4", groups=8, experts=32)
    device_E = eplb(problem)
    loads = problem.load_E.reshape(8, 4).sum(axis=1).tolist()
    node_of_group = restated(loads, [4, 4])
    for node in range(2):
        experts = [e for e in range(32) if node_of_group[e // 4] == node]
        inside = restated([int(problem.load_E[e]) for e in experts], [4] * 4)
        assert device_E[experts].tolist() == [node * 4 + g for g in inside]


@pytest.mark.parametrize(
    ("topology", "groups"),
    [
        ("4", 4),  # one node
        ("3x2", 4),  # four groups on three nodes
        (Topology(2, 2, slots_per_device=(5, 3, 4, 4)), 4),  # uneven devices
    ],
)
def test_groups_that_do_not_divide_are_packed_together(make_problem: Any, topology: Any, groups: int) -> None:
    problem = make_problem(topology, groups=groups)
    assert eplb(problem).tolist() == restated(problem.load_E.tolist(), problem.slots_G.tolist())


def test_nothing_routed_at_all_still_fills_every_slot(make_problem: Any) -> None:
    problem = replace(make_problem("2x2", groups=4), load_E=np.zeros(16, dtype=np.int64))
    np.testing.assert_array_equal(np.bincount(eplb(problem)), problem.slots_G)
