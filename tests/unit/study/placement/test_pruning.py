"""Pruning's effect on loads and costs, and whom it spares."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from coterie.errors import TraceError
from coterie.placement.driver import prepare
from coterie.spec import MoESpec
from coterie.study.placement import pruning
from coterie.topology import Topology
from coterie.trace.routing_trace import RoutingTrace


def test_popular_experts_are_told_apart_by_their_weight() -> None:
    ids = np.zeros((1, 100, 2), dtype=np.uint8)
    ids[0, :, 1] = 1 + np.arange(100) % 9  # expert 0 in every token, with three quarters of its weight
    weights = np.tile(np.array([0.6, 0.2]), (1, 100, 1))
    found = pruning.popularity(RoutingTrace(ids, MoESpec("toy", 1, 10, 2), weights))
    assert len(found) == 10
    assert found[-1]["uses"] == pytest.approx(0.5)
    assert found[-1]["weight"] == pytest.approx(0.75)
    assert all(each["weight"] == pytest.approx(0.25) for each in found[:-1])


def test_the_study_measures_all_rules_before_and_after(make_trace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning, "RULE_THRESHOLDS", (0.3,))
    monkeypatch.setattr(pruning, "THRESHOLDS", (0.0, 0.3))
    rng = np.random.default_rng(0)
    weights = -np.sort(-rng.random((2, 600, 4)), axis=2)
    trace = make_trace(weights=weights)
    result = pruning.run(prepare(trace, Topology.parse("4")), "toy", method="cap")
    assert [(each["rule"], each["placed"]) for each in result["rules"]] == [
        (rule, placed) for rule in ("cap", "naive", "priced") for placed in ("before", "after")
    ]
    for each in result["rules"]:
        assert 0.6 < each["kept_weight"] <= 1
        assert each["dpt"] <= result["unpruned"]["dpt"] * 1.1
    cap = next(each for each in result["rules"] if each["rule"] == "cap")
    assert 0.7 <= cap["kept_weight"] < 1
    assert cap["remote_dpt"] < result["unpruned"]["remote_dpt"]
    assert result["imbalance"][0]["devices_placed"] == pytest.approx(result["unpruned"]["balance"])
    assert pruning.rows(result)[0][:4] == ["none", 0.0, "-", 1.0]


def test_a_trace_without_weights_is_refused(make_trace: Any) -> None:
    with pytest.raises(TraceError, match="the pruning study needs routing weights"):
        pruning.run(prepare(make_trace(), Topology.parse("4")), "toy")
