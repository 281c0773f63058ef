"""Group-limited routing: every router group stays a run of slots, and freedom is known when there is none."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest

from coterie.placement.groups import coarsen, has_freedom, place_in_groups
from coterie.placement.methods import METHODS
from coterie.placement.objective import Objective
from coterie.placement.placement import Placement
from coterie.placement.problem import build_problem
from coterie.spec import MoESpec
from coterie.topology import Topology
from coterie.trace.routing_trace import RoutingTrace

# name: topology, experts, groups
CASES = {
    "devices hold whole groups": ("4", 16, 8),
    "one group a device": ("4", 16, 4),
    "several devices a group": ("8", 16, 2),
    "a group over nodes": ("4x2", 16, 2),
    "nodes hold whole groups": ("2x3,inter=3", 24, 4),
    "uneven devices hold whole groups": (Topology(1, 3, slots_per_device=(8, 4, 4)), 16, 4),
    "misaligned": ("5", 24, 4),
    "misaligned on nodes": ("2x3", 20, 4),
    "every expert a group": ("4", 16, 16),
    "one device": ("1", 16, 4),
}


def problem_of(name: str, make_problem: Any, **fields: Any) -> Any:
    topology, experts, groups = CASES[name]
    return make_problem(topology, experts=experts, groups=groups, keep_groups=True, top_k=5, **fields)


def assert_groups_are_runs(device_E: np.ndarray, topology: Topology, num_groups: int) -> None:
    """The renumbered checkpoint: expert `row[slot]` becomes number `slot`; groups must map to groups."""
    experts = device_E.size
    placement = Placement.from_devices(device_E[None], topology, MoESpec("toy", 1, experts, 1))
    old_group_of_slot = placement.physical_to_logical_map[0].reshape(num_groups, -1) // (experts // num_groups)
    assert (old_group_of_slot == old_group_of_slot[:, :1]).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", CASES)
def test_every_placement_keeps_groups_whole(make_problem: Any, name: str, method: str) -> None:
    problem = problem_of(name, make_problem)
    found = METHODS[method](problem, Objective.for_topology(problem.topology), 0)
    for device_E in found:
        assert_groups_are_runs(device_E, problem.topology, problem.num_groups)
        np.testing.assert_array_equal(np.bincount(device_E, minlength=problem.num_devices), problem.slots_G)


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("one group a device", "one device")])
def test_where_there_is_freedom_it_is_used(make_problem: Any, name: str) -> None:
    """The default method visits fewer devices, or burdens the busiest less, than experts in order do."""
    problem = problem_of(name, make_problem)
    objective = Objective(device=1, node=1, peak=0, balance=0)
    node_G = problem.topology.node_of_device()

    def visited(device_E: np.ndarray) -> float:
        hosts = [{int(device_E[e]) for e in row if e >= 0} for row in problem.sets_UK]
        costs = [len(found) + len({int(node_G[g]) for g in found}) for found in hosts]
        return float(np.average(costs, weights=problem.multiplicity_U))

    linear = METHODS["linear"](problem, objective, 0)[0]
    assert min(visited(row) for row in METHODS["coterie"](problem, objective, 0)) < visited(linear)


@pytest.mark.parametrize("kept", [None, 0.7])
def test_the_coarse_problem_counts_groups(make_problem: Any, kept: float | None) -> None:
    problem = problem_of("devices hold whole groups", make_problem, kept=kept)
    coarse = coarsen(problem)
    assert coarse is not None
    assert coarse.device_blocks
    small = coarse.problem
    expected: Counter[tuple[int, frozenset[int]]] = Counter()
    for row, tokens, window in zip(problem.sets_UK, problem.multiplicity_U, problem.window_U, strict=True):
        expected[int(window), frozenset(int(e) // 2 for e in row if e >= 0)] += int(tokens)
    found = {
        (int(window), frozenset(int(g) for g in row if g >= 0)): int(tokens)
        for row, tokens, window in zip(small.sets_UK, small.multiplicity_U, small.window_U, strict=True)
    }
    assert found == expected
    assert len(found) == len(small.sets_UK)
    assert small.load_E.tolist() == problem.load_E.reshape(8, 2).sum(axis=1).tolist()
    assert small.slots_G.tolist() == [2, 2, 2, 2]
    assert small.num_tokens == problem.num_tokens
    for g, h in itertools.product(range(8), repeat=2):
        both = sum(tokens for (_, groups), tokens in expected.items() if {g, h} <= groups)
        assert small.coactivation_EE[g, h] == both


def test_nodes_are_the_parts_where_only_they_hold_whole_groups(make_problem: Any) -> None:
    coarse = coarsen(problem_of("nodes hold whole groups", make_problem))
    assert coarse is not None
    assert not coarse.device_blocks
    assert coarse.problem.slots_G.tolist() == [2, 2]
    device_E = coarse.expand(np.array([1, 0, 1, 0]))  # groups 1 and 3 come first, then 0 and 2
    assert device_E.reshape(4, 6).tolist() == [
        [3, 3, 3, 3, 4, 4], [0, 0, 0, 0, 1, 1], [4, 4, 5, 5, 5, 5], [1, 1, 2, 2, 2, 2],
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["misaligned", "misaligned on nodes", "one device"])
def test_where_nothing_holds_whole_groups_they_stay_in_order(make_problem: Any, name: str) -> None:
    problem = problem_of(name, make_problem)
    assert coarsen(problem) is None
    start_E = METHODS["linear"](problem, Objective.for_topology(problem.topology), 0)[0]
    size = problem.num_experts // problem.num_groups
    placed = place_in_groups(
        problem, lambda part: 1 / 0, lambda part: np.repeat(np.arange(part.num_devices), part.slots_G)
    )
    np.testing.assert_array_equal(np.sort(placed.reshape(-1, size)), np.sort(start_E.reshape(-1, size)))


def test_within_a_group_only_its_tokens_count(make_problem: Any) -> None:
    problem = problem_of("several devices a group", make_problem)
    seen = []

    def within(part: Any) -> np.ndarray:
        seen.append(part)
        return np.repeat(np.arange(part.num_devices), part.slots_G)

    coarse_calls = []
    place_in_groups(problem, lambda part: coarse_calls.append(part) or np.arange(2), within)
    assert not coarse_calls  # no device holds a whole group, and there is but one node
    assert [part.slots_G.tolist() for part in seen] == [[2, 2, 2, 2]] * 2
    for first, part in zip((0, 8), seen, strict=True):
        assert part.load_E.tolist() == problem.load_E[first : first + 8].tolist()
        expected = Counter[frozenset[int]]()
        for row, tokens in zip(problem.sets_UK, problem.multiplicity_U, strict=True):
            expected[frozenset(int(e) - first for e in row if first <= e < first + 8)] += int(tokens)
        del expected[frozenset()]
        found = Counter[frozenset[int]]()
        for row, tokens in zip(part.sets_UK, part.multiplicity_U, strict=True):
            found[frozenset(int(e) for e in row if e >= 0)] += int(tokens)
        assert found == expected


def test_a_group_that_is_never_used(make_problem: Any, make_trace: Any) -> None:
    ids = make_trace(layers=1, experts=8, top_k=3).expert_ids  # experts 8 to 15, the second group, are never chosen
    trace = RoutingTrace(ids, MoESpec("toy", 1, 16, 3, num_groups=2))
    problem = build_problem(trace, 0, Topology.parse("4"), keep_groups=True)
    for method in METHODS.values():
        for device_E in method(problem, Objective.for_topology(problem.topology), 0):
            assert_groups_are_runs(device_E, problem.topology, 2)


def partitions(experts: int, groups: int, topology: Topology) -> set[Any]:
    """What every renumbering that keeps groups whole makes of the devices, device and node names aside."""
    size, slots = experts // groups, topology.slots(experts)
    found = set()
    inner = list(itertools.permutations(range(size)))
    for order in itertools.permutations(range(groups)):
        for within in itertools.product(inner, repeat=groups):
            row = [group * size + e for group, one in zip(order, within, strict=True) for e in one]
            ends = np.cumsum(slots)
            devices = [frozenset(row[end - slot : end]) for slot, end in zip(slots, ends, strict=True)]
            per_node = topology.devices_per_node
            nodes = [frozenset(devices[i : i + per_node]) for i in range(0, len(devices), per_node)]
            found.add(frozenset(nodes))
    return found


@pytest.mark.parametrize(("experts", "groups"), [(4, 2), (6, 2), (6, 3), (4, 4), (8, 4), (5, 1)])
@pytest.mark.parametrize("topology", ["1", "2", "3", "2x1", "2x2", "3x1", "4", "uneven"])
def test_freedom_is_more_than_one_way(experts: int, groups: int, topology: str) -> None:
    uneven = Topology(1, 3, slots_per_device=(experts - 2, 1, 1))
    devices = uneven if topology == "uneven" else Topology.parse(topology)
    assert has_freedom(experts, groups, devices) == (len(partitions(experts, groups, devices)) > 1)
