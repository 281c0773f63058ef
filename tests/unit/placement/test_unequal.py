"""Machines whose devices and links differ: what speeds and costs change, and that equal ones change nothing."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from coterie.placement.driver import place, prepare
from coterie.placement.methods import METHODS
from coterie.placement.metrics import measure, measure_layer
from coterie.placement.objective import Objective
from coterie.topology import Topology
from coterie.trace.routing_trace import ALL_TOKENS

SLOW_FIRST = (0.5, 1.0, 1.0, 1.0)


def candidates(method: str, problem: Any) -> np.ndarray:
    return METHODS[method](problem, Objective.for_topology(problem.topology), 3)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("text", ["4", "2x2,inter=3"])
def test_equal_speeds_and_the_default_costs_written_out_change_nothing(
    make_problem: Any, method: str, text: str
) -> None:
    plain = Topology.parse(text)
    costs = tuple(map(tuple, plain.cost_matrix().tolist()))
    written = replace(plain, speed_per_device=(1.0,) * 4, link_costs=costs)
    expected = candidates(method, make_problem(plain, experts=18))
    np.testing.assert_array_equal(candidates(method, make_problem(written, experts=18)), expected)


@pytest.mark.parametrize(
    ("text", "digest"), [("4", "99593dbf7807ad9e"), ("5", "371a07b2dd720ad3"), ("2x2,inter=5", "f7b64d164f966492")]
)
def test_placements_of_equal_devices_are_what_they_always_were(make_problem: Any, text: str, digest: str) -> None:
    """Integers decide nearly everything, so the digests hold on any machine."""
    found = hashlib.sha256()
    for method in METHODS:
        found.update(np.ascontiguousarray(candidates(method, make_problem(text, experts=24))).tobytes())
    assert found.hexdigest()[:16] == digest


@pytest.mark.parametrize("method", ["linear", "eplb", "cap", "cap-spectrum"])
def test_the_published_methods_do_not_know_of_speeds(make_problem: Any, method: str) -> None:
    slow = make_problem(Topology(1, 4, speed_per_device=SLOW_FIRST))
    np.testing.assert_array_equal(candidates(method, slow), candidates(method, make_problem("4")))


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_slow_device_is_given_less_to_do(make_trace: Any, nodes: int) -> None:
    trace = make_trace(tokens=3000, experts=32)
    # with dear links between nodes this fixture's few busy experts rather stay together
    topology = Topology(nodes, 4 // nodes, inter_cost=2, speed_per_device=SLOW_FIRST)
    aware = place(prepare(trace, topology))
    ignorant = place(prepare(trace, replace(topology, speed_per_device=None)))
    for layer in range(trace.num_layers):
        load_GE = np.eye(4)[:, aware.device_of_expert()[layer]]
        load_E = np.bincount(trace.layer(layer, ALL_TOKENS).expert_ids_TK.ravel(), minlength=32)
        load_G = load_GE @ load_E
        assert load_G[0] < 0.75 * load_G[1:].max()
    busy, busy_ignorant = (
        np.mean([measure_layer(trace, layer, each.device_of_expert()[layer], topology, ALL_TOKENS).balance
                 for layer in range(trace.num_layers)])
        for each in (aware, ignorant)
    )  # fmt: skip
    assert busy < 0.8 * busy_ignorant


def test_groups_on_nodes_of_unequal_speed(make_trace: Any) -> None:
    trace = make_trace(tokens=2000, experts=32, groups=4)
    topology = Topology(2, 2, speed_per_device=(0.5, 0.5, 1.0, 1.0))
    placement = place(prepare(trace, topology))
    load_E = np.bincount(trace.layer(0, ALL_TOKENS).expert_ids_TK.ravel(), minlength=32)
    load_G = np.bincount(placement.device_of_expert()[0], weights=load_E, minlength=4)
    assert load_G[:2].sum() < load_G[2:].sum()


def test_a_device_behind_a_dear_link_is_visited_less(make_trace: Any) -> None:
    """Device 3 is reached at six times the cost of the others."""
    far = np.ones((4, 4))
    far[3] = far[:, 3] = 6
    np.fill_diagonal(far, 0)
    topology = Topology(1, 4, link_costs=tuple(map(tuple, far.tolist())))
    trace = make_trace(tokens=3000, experts=32)
    aware, ignorant = place(prepare(trace, topology)), place(prepare(trace, Topology(1, 4)))
    visits, costs = [], []
    for placement in (aware, ignorant):
        layers = measure(trace, placement.device_of_expert(), topology, ALL_TOKENS)
        visits.append(np.mean([layer.traffic_GG[:, 3].sum() for layer in layers]))
        costs.append(np.mean([Objective.for_topology(topology).cost(layer) for layer in layers]))
    assert visits[0] < 0.9 * visits[1]
    assert costs[0] < 0.95 * costs[1]
    assert aware.metrics["fit"]["link_cost"] > 0
    assert "link_cost" not in ignorant.metrics["fit"]
