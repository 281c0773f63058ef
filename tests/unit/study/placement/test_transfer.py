"""Placements used where they were not made."""

from __future__ import annotations

from typing import Any

import pytest

from coterie.errors import ConfigError, TraceError
from coterie.placement.driver import prepare
from coterie.placement.metrics import average, measure
from coterie.pruning.routed import linear_devices
from coterie.study.placement.transfer import claims, columns, rows, run
from coterie.topology import Topology
from coterie.trace.splits import split

FOUR = Topology.parse("4")


def test_every_source_meets_every_target(make_trace: Any) -> None:
    traces = {"a": make_trace(seed=1), "b": make_trace(seed=2)}
    result = run(prepare(traces["a"], FOUR), traces, methods=("eplb", "cap"))
    assert columns(result) == ["measured on", "a", "b", "mixture", "EPLB, own", "linear"]
    later = split(traces["b"], 0.5).second
    linear = average(measure(traces["b"], linear_devices(traces["b"].spec, FOUR), FOUR, later))
    table = rows(result, "cap", "dpt")
    assert [row[0] for row in table] == ["a", "b"]
    assert table[1][-1] == pytest.approx(linear["dpt"])
    assert table[0][1] < table[0][2]  # toys of two seeds have nothing in common: the matched one wins
    assert table[1][2] < table[1][1]
    assert result["tokens"]["mixture"]["fit_tokens"] == sum(result["tokens"][name]["fit_tokens"] for name in "ab")
    assert set(result["claims"]) == {"cap"}


def test_claims_take_the_worst_pair() -> None:
    def row(**peaks: float) -> dict[str, Any]:
        return {source: {"peak_traffic": peak} for source, peak in peaks.items()}

    found = {
        "mine": {"a": row(a=0.4, b=0.5, mixture=0.42), "b": row(a=0.6, b=0.3, mixture=0.3)},
        "eplb": {"a": row(a=0.45, b=0.7, mixture=0.5), "b": row(a=0.8, b=0.5, mixture=0.5)},
    }
    linear = {"a": {"peak_traffic": 1.0}, "b": {"peak_traffic": 0.75}}
    claimed = claims(found, linear, "mine")
    assert claimed["worst_pair"]["linear"] == {"ratio": pytest.approx(0.8), "fitted_on": "a", "measured_on": "b"}
    assert claimed["worst_pair"]["eplb"]["ratio"] == pytest.approx(0.75)
    assert claimed["worst_pair"]["eplb_of_target"]["ratio"] == pytest.approx(1.2)
    assert claimed["below_linear_and_eplb_in_every_pair"]
    assert claimed["mixture_over_matched"] == {"a": pytest.approx(1.05), "b": pytest.approx(1.0)}
    linear["b"]["peak_traffic"] = 0.6
    assert not claims(found, linear, "mine")["below_linear_and_eplb_in_every_pair"]


def test_what_cannot_be_compared_is_refused(make_trace: Any) -> None:
    trace = make_trace()
    setting = prepare(trace, FOUR)
    with pytest.raises(ConfigError, match="at least two"):
        run(setting, {"a": trace})
    with pytest.raises(TraceError, match="traces of one model"):
        run(setting, {"a": trace, "b": make_trace(layers=3)})
    with pytest.raises(ConfigError, match="rename it"):
        run(setting, {"a": trace, "mixture": trace})
    baked = make_trace(provenance={"coterie_expert_order": "0123456789abcdef"})
    with pytest.raises(ConfigError, match="numbers experts by the baked placement"):
        run(setting, {"a": trace, "b": baked})
