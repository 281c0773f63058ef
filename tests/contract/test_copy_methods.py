"""What every placement method promises on machines with slots to spare."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError
from coterie.placement.copy_baselines import copy_counts, eplb_copies, pack_copies
from coterie.placement.methods import COPY_METHODS, get_copy_method
from coterie.placement.objective import Objective
from coterie.placement.problem import LayerProblem, build_problem
from coterie.placement.replicate import choose, fill, score
from coterie.topology import Topology

TOPOLOGIES = ["4", "5", "2x2,inter=3", Topology(1, 3, slots_per_device=(9, 2, 11))]
every_method = pytest.mark.parametrize("method", COPY_METHODS)


def problem_of(make_trace: Any, topology: Any, redundant: int = 6, **trace: Any) -> LayerProblem:
    parsed = Topology.parse(topology) if isinstance(topology, str) else topology
    return build_problem(make_trace(layers=1, **trace), 0, parsed, redundant=redundant)


def candidates(method: str, problem: LayerProblem, seed: int = 0) -> np.ndarray:
    return COPY_METHODS[method](problem, Objective.for_topology(problem.topology), seed)


@every_method
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_slots_are_full_every_expert_is_there_and_none_twice(make_trace: Any, method: str, topology: Any) -> None:
    problem = problem_of(make_trace, topology)
    for hosts_EG in candidates(method, problem):
        assert hosts_EG.dtype == bool
        np.testing.assert_array_equal(hosts_EG.sum(axis=0), problem.slots_G)
        assert (hosts_EG.sum(axis=1) >= 1).all()


@every_method
@pytest.mark.parametrize(
    "trace", [{"tokens": 1}, {"top_k": 1}, {"kept": 0.0}, {"experts": 4, "top_k": 4}, {"experts": 4, "top_k": 1}]
)
def test_degenerate_layers_are_placed_too(make_trace: Any, method: str, trace: dict[str, Any]) -> None:
    problem = problem_of(make_trace, "4", redundant=4, **trace)
    for hosts_EG in candidates(method, problem):
        np.testing.assert_array_equal(hosts_EG.sum(axis=0), problem.slots_G)
        assert (hosts_EG.sum(axis=1) >= 1).all()


@every_method
def test_every_expert_everywhere(make_trace: Any, method: str) -> None:
    problem = problem_of(make_trace, "3", redundant=16, experts=8)
    assert candidates(method, problem).all()


@every_method
def test_the_same_seed_gives_the_same_placements(make_trace: Any, method: str) -> None:
    problem = problem_of(make_trace, "2x2")
    np.testing.assert_array_equal(candidates(method, problem, 5), candidates(method, problem, 5))


def test_methods_by_name() -> None:
    assert get_copy_method("eplb") is eplb_copies
    with pytest.raises(ConfigError, match="cap-spectrum places every expert once; with --redundant use linear, eplb"):
        get_copy_method("cap-spectrum")
    with pytest.raises(ConfigError, match="did you mean 'eplb'"):
        get_copy_method("eplp")


def test_eplb_copies_the_heaviest_a_copy() -> None:
    assert copy_counts(np.array([10, 4, 3]), 6, 4).tolist() == [3, 2, 1]  # 10, 5, 4 and then 10 / 3 < 4 for 1
    assert copy_counts(np.array([100, 1, 1]), 6, 3).tolist() == [3, 2, 1]  # one a device at most
    assert copy_counts(np.array([0, 0]), 3, 2).tolist() == [2, 1]


def test_where_only_devices_with_the_expert_have_room_another_expert_moves(make_trace: Any) -> None:
    problem = problem_of(make_trace, Topology(1, 2, slots_per_device=(2, 2)), redundant=0, experts=4, top_k=2)
    hosts_EG = np.array([[1, 0], [0, 1], [0, 1]], dtype=bool)  # room on device 0 alone, which holds expert 0
    found = pack_copies(hosts_EG, np.array([0]), np.array([5.0]), problem, np.ones(3))
    assert found.sum(axis=0).tolist() == [2, 2]
    assert found[0].all()
    assert (found.sum(axis=1) >= 1).all()


def test_the_default_visits_fewer_devices_than_the_others(make_trace: Any) -> None:
    problem = problem_of(make_trace, "4", experts=32, top_k=6, tokens=1500, redundant=8)
    objective = Objective.for_topology(problem.topology)
    best = {name: min(score(problem, objective, hosts) for hosts in candidates(name, problem)) for name in COPY_METHODS}
    assert best["coterie"] < 0.97 * min(best[name] for name in COPY_METHODS if name != "coterie")


def test_filling_lowers_the_objective_with_every_copy(make_trace: Any) -> None:
    problem = problem_of(make_trace, "4", experts=32, top_k=6, tokens=1500, redundant=8)
    objective = Objective.for_topology(problem.topology)
    hosts_EG = np.eye(4, dtype=bool)[np.arange(32) % 4]
    full_EG = fill(problem, objective, hosts_EG)
    assert (full_EG & hosts_EG).sum() == 32
    assert full_EG.sum() == 40
    assert score(problem, objective, full_EG) < 0.95 * score(problem, objective, hosts_EG)


def test_what_the_sets_choose_adds_up(make_trace: Any) -> None:
    problem = problem_of(make_trace, "2x2", tokens=900)
    hosts_EG = eplb_copies(problem, Objective.for_topology(problem.topology), 0)[0]
    choice = choose(problem, hosts_EG)
    device_UK = np.where(choice.copy_UK >= 0, choice.copies.device_P[choice.copy_UK], -1)
    expert_UK = np.where(choice.copy_UK >= 0, choice.copies.expert_P[choice.copy_UK], -1)
    np.testing.assert_array_equal(expert_UK, problem.sets_UK)
    assert choice.load_WG.sum() == problem.load_E.sum()
    visits = sum(
        len(set(row[row >= 0].tolist())) * int(times)
        for row, times in zip(device_UK, problem.multiplicity_U, strict=True)
    )
    nodes = sum(
        len(set((row[row >= 0] // 2).tolist())) * int(times)
        for row, times in zip(device_UK, problem.multiplicity_U, strict=True)
    )
    assert choice.visits_WG.sum() == visits
    assert choice.node_visits == nodes
