"""Whether a placement still fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError, InfeasiblePlacement
from coterie.placement.drift import _verdict, drift
from coterie.placement.driver import place, prepare
from coterie.topology import Topology
from coterie.trace.splits import split

FOUR = Topology.parse("4")


def placed(trace: Any, **options: Any) -> Any:
    return place(prepare(trace, FOUR), "cap", **options)


def test_the_same_traffic_keeps_the_placement(make_trace: Any) -> None:
    trace = make_trace(layers=6, tokens=2000)
    result = drift(placed(trace, heldout=0.5), trace)
    assert not result["redo"]
    assert result["gain"] == pytest.approx(0, abs=1e-9)  # the same tokens, method and seed
    now, then = result["placements"]["now"], result["placements"]["then"]
    assert now["dpt"] == pytest.approx(then["dpt"], abs=1e-6)
    assert result["method"] == "cap"


def test_other_traffic_asks_for_a_new_one(make_trace: Any) -> None:
    new = make_trace(layers=6, tokens=2000, seed=5)
    result = drift(placed(make_trace(layers=6, tokens=2000)), new)
    assert result["redo"]
    assert result["gain"] > 0.05
    rows = result["placements"]
    assert rows["fresh"]["score"] < rows["now"]["score"]
    assert rows["fresh"]["dpt"] < rows["now"]["dpt"]
    assert result["trace"]["heldout_tokens"] == split(new, 0.5).num_second
    assert drift(placed(make_trace(layers=6, tokens=2000)), new, worth=0.9)["redo"] is False


def test_a_gain_within_chance_is_none() -> None:
    now, fresh = np.array([2.0, 2.0, 2.0, 2.0]), np.array([1.0, 2.9, 1.2, 2.6])
    found = _verdict(now, fresh, now + 1, 0.02)
    assert found["gain"] == pytest.approx(0.0375)
    assert not found["redo"]
    assert "chance" in found["reason"]
    assert "linear" in _verdict(now, fresh, now, 0.02)["reason"]
    assert "no less" in _verdict(fresh, now, now + 1, 0.02)["reason"]


def test_a_linear_placement_is_compared_with_the_default_method(make_trace: Any) -> None:
    trace = make_trace(tokens=400)
    assert drift(place(prepare(trace, FOUR), "linear"), trace)["method"] == "coterie"


def test_what_does_not_belong_together_is_refused(make_trace: Any) -> None:
    trace = make_trace(tokens=400)
    old = placed(trace)
    with pytest.raises(InfeasiblePlacement, match="the new trace is of"):
        drift(old, make_trace(layers=3))
    with pytest.raises(ConfigError, match="numbers experts"):
        drift(old, replace(trace, provenance={"coterie_expert_order": "0123456789abcdef"}))
    with pytest.raises(ConfigError, match="worth = 1"):
        drift(old, trace, worth=1.0)


def test_a_placement_with_copies_is_compared_with_one_that_has_as_many(make_trace: Any) -> None:
    trace = make_trace(layers=4, tokens=1000)
    old = place(prepare(trace, FOUR, redundant=4), "eplb", heldout=0.5)
    result = drift(old, trace)
    assert result["method"] == "eplb"
    assert result["gain"] == pytest.approx(0, abs=1e-9)
    assert result["placements"]["now"]["balance"] == pytest.approx(old.metrics["heldout"]["balance"], abs=1e-6)
    assert result["placements"]["linear"]["balance"] > result["placements"]["now"]["balance"]
