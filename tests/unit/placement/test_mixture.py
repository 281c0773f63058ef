"""Placing for several workloads at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError, TraceError
from coterie.placement.driver import place
from coterie.placement.metrics import average, measure
from coterie.placement.mixture import prepare_mixture
from coterie.topology import Topology

FOUR = Topology.parse("4")


def test_each_workload_is_a_window(make_trace: Any) -> None:
    setting = prepare_mixture([make_trace(tokens=300), make_trace(tokens=200, seed=1)], FOUR)
    assert setting.domain_T is not None
    assert np.bincount(setting.domain_T).tolist() == [300, 200]
    assert len(setting.trace.provenance["mixture_of"]) == 2


def test_a_placement_of_the_mixture_serves_the_worse_served_better(make_trace: Any) -> None:
    traces = [make_trace(layers=4, tokens=1200, seed=seed) for seed in (1, 2)]
    mixed = prepare_mixture(traces, FOUR)

    def worst(setting: Any) -> float:
        device_LE = place(setting, heldout=0).device_of_expert()
        return max(average(measure(trace, device_LE, FOUR, slice(None)))["peak_traffic"] for trace in traces)

    assert worst(mixed) < worst(replace(mixed, domain_T=None))


def test_what_cannot_be_mixed_is_refused(make_trace: Any) -> None:
    with pytest.raises(TraceError, match="traces of one model"):
        prepare_mixture([make_trace(), make_trace(layers=3)], FOUR)
    with pytest.raises(ConfigError, match="a further trace numbers experts"):
        prepare_mixture([make_trace(), make_trace(provenance={"coterie_expert_order": "0123456789abcdef"})], FOUR)
