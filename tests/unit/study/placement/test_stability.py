"""Groupings of a few windows, measured on all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError, TraceError
from coterie.placement.driver import prepare
from coterie.placement.metrics import average, measure
from coterie.pruning.routed import linear_devices
from coterie.study.placement.stability import LINEAR, run, windows_of
from coterie.topology import Topology


def test_windows_are_consecutive_and_equal_in_tokens(make_trace: Any) -> None:
    windows = windows_of(make_trace(tokens=650), 200)
    assert [tokens.tolist() for tokens in windows] == [list(range(at, at + 200)) for at in (0, 200, 400)]


def test_windows_of_requests_hold_whole_sequences_in_order_of_beginning(make_trace: Any) -> None:
    sequences = np.array([7, 7, 2, 7, 2, 9, 9, 0, 0, 0] * 3)
    sequences[10:] += 100  # what begins later comes later, whatever it is called
    trace = make_trace(tokens=30, sequence_ids=sequences.astype(np.int32))
    windows = windows_of(trace, 2, requests=True)
    assert [sorted(set(sequences[tokens].tolist())) for tokens in windows] == [[2, 7], [0, 9], [102, 107], [100, 109]]
    assert sorted(np.concatenate(windows).tolist()) == list(range(30))


@pytest.mark.parametrize("size", [0, 301, 600])
def test_fewer_than_two_windows_are_refused(make_trace: Any, size: int) -> None:
    with pytest.raises(ConfigError, match="use 1 to 300"):
        windows_of(make_trace(tokens=600), size)


def test_too_many_windows_and_requests_without_sequences_are_refused(make_trace: Any) -> None:
    with pytest.raises(ConfigError, match="use at least 2 tokens"):
        windows_of(make_trace(tokens=600), 1)
    with pytest.raises(TraceError, match="leave it out"):
        windows_of(make_trace(sequences=0), 2, requests=True)


def test_groupings_are_measured_on_every_window_and_judged_where_they_were_not_fitted(make_trace: Any) -> None:
    topology = Topology.parse("4")
    trace = make_trace(tokens=800)
    result = run(prepare(trace, topology), "toy", 100, methods=("cap",))
    assert list(result["groupings"]) == [LINEAR, "cap w0", "cap w2", "cap w6"]
    assert (len(result["windows"]), result["tokens_in_no_window"]) == (8, 0)
    linear = result["groupings"][LINEAR]
    expected = average(measure(trace, linear_devices(trace.spec, topology), topology, slice(300, 400)))
    assert linear["values"]["dpt"][3] == pytest.approx(expected["dpt"], abs=1e-6)
    found = result["groupings"]["cap w2"]
    others = [value for at, value in enumerate(found["values"]["dpt"]) if at != 2]
    assert found["other_windows"] == 7
    assert found["mean"]["dpt"] == pytest.approx(np.mean(others))
    worst = max(abs(value - np.mean(others)) for value in others) / np.mean(others)
    assert found["variation"]["dpt"] == pytest.approx(worst)
    beaten = sum(mine < base for at, (mine, base) in enumerate(
        zip(found["values"]["dpt"], linear["values"]["dpt"], strict=True)) if at != 2)  # fmt: skip
    assert found["below_linear"]["dpt"] == beaten > 0
