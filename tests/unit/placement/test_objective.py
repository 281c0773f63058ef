"""What is minimised."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from coterie.placement.metrics import measure_layer
from coterie.placement.objective import Objective
from coterie.topology import Topology
from coterie.trace.routing_trace import ALL_TOKENS


def test_a_node_costs_what_its_link_costs_more() -> None:
    assert Objective.for_topology(Topology.parse("8")).node == 0
    assert Objective.for_topology(Topology.parse("2x4,inter=5")).node == 4
    assert Objective.for_topology(Topology.parse("2x4,inter=1")).node == 0


def test_visits_over_dear_links_cost_more(make_trace: Any) -> None:
    costs = ((0.0, 1.0, 3.0), (1.0, 0.0, 3.0), (3.0, 3.0, 0.0))
    topology = Topology(1, 3, link_costs=costs)
    objective = Objective.for_topology(topology)
    assert objective.prices == pytest.approx((6 / 7, 6 / 7, 9 / 7))
    trace = make_trace()
    device_E = np.arange(trace.spec.num_experts) % 3
    metrics = measure_layer(trace, 0, device_E, topology, ALL_TOKENS)
    paid_G = metrics.traffic_GG.sum(axis=0) * objective.prices
    assert objective.cost(metrics) == pytest.approx(paid_G.sum() + 0.75 * 3 * paid_G.max())
    assert Objective(**{**objective.to_json(), "prices": tuple(objective.to_json()["prices"])}) == objective


def test_the_cost_is_the_weighted_sum_without_balance(make_trace: Any) -> None:
    metrics = measure_layer(make_trace(tokens=60), 0, np.arange(16) % 4, Topology.parse("2x2"), ALL_TOKENS)
    objective = Objective(device=2, node=3, peak=5, balance=7)
    expected = 2 * metrics.dpt + 3 * metrics.npt + 5 * metrics.peak_traffic
    assert objective.cost(metrics) == pytest.approx(expected)
    assert replace(objective, balance=100).cost(metrics) == objective.cost(metrics)
    assert objective.weights() == (2.0, 3.0, 5.0)
    assert all(isinstance(weight, float) for weight in objective.weights())
    assert Objective(**objective.to_json()) == objective
