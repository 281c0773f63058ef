"""More tokens until they change little."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError
from coterie.placement.driver import prepare
from coterie.study.placement.common import fit, means
from coterie.study.placement.tokens import doublings, run, settled, stable_from
from coterie.topology import Topology
from coterie.trace.splits import split


def row(tokens: int, value: float) -> dict[str, Any]:
    return {"tokens": tokens, "dpt": value, "peak_traffic": 0.5}


def test_stable_is_near_the_end_from_there_on() -> None:
    assert stable_from([row(1, 3.0), row(2, 3.2), row(3, 3.01), row(4, 3.0)]) == 3  # the first was near by luck
    assert stable_from([row(1, 3.0), row(2, 3.2)]) == 2
    assert stable_from([row(1, 3.2), row(2, 3.2)]) == 1


def test_counts_double() -> None:
    assert doublings(2000) == [250, 500, 1000]
    assert doublings(200) == []


def test_every_point_is_fitted_on_the_first_tokens_and_measured_on_the_same_later_ones(make_trace: Any) -> None:
    setting = prepare(make_trace(tokens=1200), Topology.parse("4"))
    result = run(setting, "toy", methods=("cap",))
    points = result["methods"]["cap"]["points"]
    assert [point["tokens"] for point in points] == [250, 500, 600]
    parts = split(setting.trace, 0.5)
    again = means(setting.trace, fit(setting, "cap", np.arange(250)), setting.topology, parts.second)
    assert {name: points[0][name] for name in again} == again
    with pytest.raises(ConfigError, match="unknown placement method"):
        run(setting, "toy", methods=("cap", "none"))


def test_settling_in_words() -> None:
    points = [{"tokens": count} for count in (250, 500, 600)]
    assert settled("m", {"points": points, "stable_from": 500}).endswith("all 600 earlier tokens from 500 on")
    assert "m: not settled" in settled("m", {"points": points, "stable_from": 600})
    assert "4 earlier tokens are too few" in settled("m", {"points": [{"tokens": 4}], "stable_from": 4})
