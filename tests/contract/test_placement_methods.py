"""What every placement method promises, on ordinary layers and on degenerate ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError
from coterie.placement.methods import METHODS, get_method
from coterie.placement.objective import Objective
from coterie.placement.problem import LayerProblem, build_problem
from coterie.spec import MoESpec
from coterie.topology import Topology
from coterie.trace.routing_trace import RoutingTrace

TOPOLOGIES = ["1", "4", "5", "2x2", "3x2,inter=2", "4x1", Topology(1, 3, slots_per_device=(9, 1, 6))]
every_method = pytest.mark.parametrize("method", METHODS)


def candidates(method: str, problem: LayerProblem, seed: int = 0) -> np.ndarray:
    return METHODS[method](problem, Objective.for_topology(problem.topology), seed)


def assert_sound(found: np.ndarray, problem: LayerProblem) -> None:
    """Candidates [A, E] that put as many experts on each device as it has slots."""
    assert found.ndim == 2
    assert len(found) >= 1
    assert found.shape[1] == problem.num_experts
    assert found.dtype == np.int64
    for device_E in found:
        np.testing.assert_array_equal(np.bincount(device_E, minlength=problem.num_devices), problem.slots_G)


def problem_of(ids_TK: Any, experts: int, topology: str, kept: Any = None, groups: int = 1) -> LayerProblem:
    """The problem of one layer, from plain lists."""
    ids = np.asarray(ids_TK, dtype=np.uint8)[None]
    kept_LTK = None if kept is None else np.asarray(kept, dtype=bool)[None]
    spec = MoESpec("toy", 1, experts, ids.shape[2], num_groups=groups)
    trace = RoutingTrace(ids, spec, kept=kept_LTK)
    return build_problem(trace, 0, Topology.parse(topology), keep_groups=groups > 1)


@every_method
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_capacities_are_exact(make_problem: Any, method: str, topology: Any, groups: int) -> None:
    problem = make_problem(topology, groups=groups, keep_groups=groups > 1)
    assert_sound(candidates(method, problem), problem)


@every_method
@pytest.mark.parametrize("keep_groups", [False, True])
def test_the_same_seed_gives_the_same_placements(make_problem: Any, method: str, keep_groups: bool) -> None:
    problem = make_problem("2x2", groups=2, keep_groups=keep_groups)
    np.testing.assert_array_equal(candidates(method, problem, 5), candidates(method, problem, 5))


@every_method
def test_the_problem_is_left_as_it_was(make_problem: Any, method: str) -> None:
    problem, untouched = make_problem("2x2"), make_problem("2x2")
    candidates(method, problem)
    for name in ("sets_UK", "multiplicity_U", "window_U", "load_E", "coactivation_EE", "slots_G"):
        np.testing.assert_array_equal(getattr(problem, name), getattr(untouched, name))


DEGENERATE: dict[str, Any] = {
    "one token": {"ids_TK": [[3, 1]]},
    "all tokens alike": {"ids_TK": [[3, 1]] * 50},
    "an expert never used": {"ids_TK": [[0, 1], [1, 2], [2, 0], [4, 5], [6, 5]] * 9},
    "most experts never used": {"ids_TK": [[7, 0]] * 600},
    "top-1": {"ids_TK": [[e % 8] for e in range(600)]},
    "every expert at once": {"ids_TK": [list(range(8))] * 20},
    "some tokens keep nothing": {"ids_TK": [[0, 1], [2, 3]] * 30, "kept": [[True, True], [False, False]] * 30},
    "nothing is kept": {"ids_TK": [[0, 1]] * 20, "kept": [[False, False]] * 20},
    "the last window keeps nothing": {"ids_TK": [[0, 1]] * 600, "kept": [[True, True]] * 300 + [[False, False]] * 300},
    "the first window keeps nothing": {"ids_TK": [[0, 1]] * 600, "kept": [[False, False]] * 300 + [[True, True]] * 300},
}  # fmt: skip


@every_method
@pytest.mark.parametrize("topology", ["3", "8", "2x2", "1"])
@pytest.mark.parametrize("name", DEGENERATE)
def test_degenerate_layers_are_placed_too(method: str, topology: str, name: str) -> None:
    problem = problem_of(experts=8, topology=topology, **DEGENERATE[name])
    assert_sound(candidates(method, problem), problem)


@every_method
@pytest.mark.parametrize("topology", ["4", "2x2", "8"])
@pytest.mark.parametrize("name", ["one token", "an expert never used", "nothing is kept", "top-1"])
def test_degenerate_layers_with_groups(method: str, topology: str, name: str) -> None:
    problem = problem_of(experts=8, topology=topology, groups=2, **DEGENERATE[name])
    assert_sound(candidates(method, problem), problem)


@every_method
def test_one_expert_on_one_device(method: str) -> None:
    problem = problem_of([[0]] * 5, 1, "1")
    assert candidates(method, problem).tolist() == [[0]]


@every_method
def test_methods_are_found_by_name(method: str) -> None:
    assert get_method(method) is METHODS[method]
    with pytest.raises(ConfigError, match=f"did you mean '{method}'"):
        get_method(method[:-1] + "_")


def test_what_each_method_is_for(make_problem: Any) -> None:
    """EPLB is the most balanced, the default visits the fewest devices; linear is as engines do."""
    problem = make_problem("4", experts=32, top_k=6, tokens=1000)

    def visits(device_E: np.ndarray) -> float:
        hosts = [len({int(device_E[e]) for e in row if e >= 0}) for row in problem.sets_UK]
        return float(np.average(hosts, weights=problem.multiplicity_U))

    def balance(device_E: np.ndarray) -> float:
        return float(np.bincount(device_E, weights=problem.load_E).max())

    visits_alone = Objective(device=1, node=0, peak=0, balance=0)
    found = {name: method(problem, visits_alone, 0) for name, method in METHODS.items()}
    fewest = {name: min(map(visits, rows)) for name, rows in found.items()}
    flattest = {name: min(map(balance, rows)) for name, rows in found.items()}
    assert fewest["coterie"] < min(fewest[name] for name in METHODS if name != "coterie")
    assert flattest["eplb"] <= flattest["linear"]
    assert flattest["cap-spectrum"] < flattest["cap"]
    assert fewest["cap"] < fewest["linear"]
    assert found["linear"].tolist() == [np.repeat(np.arange(4), 8).tolist()]
