"""Candidates of every layer and what they are judged by."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from coterie.placement.candidates import measure_candidates, propose
from coterie.placement.driver import prepare
from coterie.placement.methods import METHODS
from coterie.placement.metrics import measure_layer
from coterie.placement.problem import build_problem, windows
from coterie.topology import Topology


@pytest.mark.parametrize("tokens", [slice(0, 900), np.arange(1, 1800, 2)])
def test_costs_are_of_windows_and_balances_of_both(
    make_trace: Any, monkeypatch: pytest.MonkeyPatch, tokens: Any
) -> None:
    monkeypatch.setattr("coterie.placement.problem.WINDOW_TOKENS", 256)
    trace, topology = make_trace(layers=2, tokens=1800), Topology.parse("2x2")
    setting = prepare(trace, topology, seed=4)
    found = propose(setting, "coterie", tokens)
    selected = np.arange(1800)[tokens]
    parts = [selected[cut] for cut in windows(len(selected))]
    assert len(parts) == 3
    for layer in range(2):
        problem = build_problem(trace, layer, topology, tokens)
        np.testing.assert_array_equal(found.devices[layer], METHODS["coterie"](problem, setting.objective, 4 + layer))
        for candidate, device_E in enumerate(found.devices[layer]):
            whole, *each = (measure_layer(trace, layer, device_E, topology, part) for part in (selected, *parts))
            assert found.fit.layers[layer][candidate].dpt == whole.dpt
            cost = np.mean([setting.objective.cost(one) for one in each])
            assert found.costs[layer][candidate] == pytest.approx(cost)
            balance = (whole.balance + np.mean([one.balance for one in each])) / 2
            assert found.balances[layer][candidate] == pytest.approx(balance)


def test_the_path_leads_from_the_cheapest_to_the_most_balanced(make_trace: Any) -> None:
    setting = prepare(make_trace(layers=3), Topology.parse("4"))
    found = propose(setting, "coterie", slice(None))
    ends = found.path.choice(0), found.path.choice(found.path.num_points - 1)
    for layer in range(3):
        assert found.costs[layer][ends[0][layer]] == found.costs[layer].min()
        assert found.balances[layer][ends[1][layer]] == found.balances[layer].min()
    for point, choice in ((0, ends[0]), (found.path.num_points - 1, ends[1])):
        rows = [found.devices[layer][chosen] for layer, chosen in enumerate(choice)]
        np.testing.assert_array_equal(found.placement(point), np.stack(rows))
    score = found.score(setting.objective)
    expected = [found.costs[layer][chosen] for layer, chosen in enumerate(ends[0])]
    balances = [found.balances[layer][chosen] for layer, chosen in enumerate(ends[0])]
    assert score[0] == pytest.approx(np.mean(expected) + setting.objective.balance * np.mean(balances))


def test_candidates_are_measured_on_other_tokens(make_trace: Any) -> None:
    trace, topology = make_trace(layers=2), Topology.parse("4")
    setting = prepare(trace, topology)
    found = propose(setting, "cap-spectrum", slice(0, 300))
    measured = measure_candidates(setting, found, slice(300, 600))
    for layer in range(2):
        expected = [measure_layer(trace, layer, row, topology, slice(300, 600)) for row in found.devices[layer]]
        assert measured.values("dpt")[layer].tolist() == [one.dpt for one in expected]
        assert measured.costs(setting.objective)[layer].tolist() == [setting.objective.cost(one) for one in expected]
    chosen = np.array([len(rows) - 1 for rows in found.devices])
    assert [one.balance for one in measured.at(chosen)] == [layer[-1].balance for layer in measured.layers]
