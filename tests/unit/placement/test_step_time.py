"""Predicted step times: by hand, and how they must move."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import ConfigError
from coterie.placement.metrics import measure_layer
from coterie.placement.step_time import StepCounts, StepModel, count_step
from coterie.topology import Topology
from coterie.trace.routing_trace import ALL_TOKENS

ONE = Topology(1, 2, intra_bandwidth_bytes_per_s=1000.0, intra_latency_s=0.5, compute_base_s=1.0, compute_pair_s=0.25)
TWO = Topology(
    2, 2, intra_bandwidth_bytes_per_s=1000.0, inter_bandwidth_bytes_per_s=400.0, intra_latency_s=0.5,
    inter_latency_s=2.0, compute_base_s=1.0, compute_pair_s=0.25,
)  # fmt: skip


def counts(copies: Any, load: Any) -> StepCounts:
    return StepCounts(np.asarray(load), np.asarray(copies))


def test_one_node_by_hand() -> None:
    """Device 0 sends 3 copies, gets 1; 300 and 100 bytes out, 150 and 50 back; its own 7 tokens cost nothing."""
    time = StepModel(ONE, 100, 50).layer(counts([[7, 3], [1, 2]], [8, 6]))
    assert time.compute == pytest.approx(1 + 8 * 0.25)
    assert time.dispatch == pytest.approx(0.5 + 0.3)
    assert time.combine == pytest.approx(0.5 + 0.15)
    assert time.total == pytest.approx(3 + 0.8 + 0.65)
    assert time.communication == pytest.approx(1.45)


def test_the_uplink_binds_where_it_is_the_slowest() -> None:
    """Node 0 sends 4 copies up: 400 bytes at 400 bytes/s; no device sends or gets more than 300 bytes at 1000."""
    copies = np.zeros((4, 4), dtype=int)
    copies[0, 2], copies[1, 3], copies[2, 3] = 3, 1, 2
    time = StepModel(TWO, 100, 100).layer(counts(copies, [0, 0, 3, 3]))
    assert time.dispatch == pytest.approx(2.0 + 1.0)
    inside = np.zeros((4, 4), dtype=int)
    inside[0, 1] = 5
    assert StepModel(TWO, 100, 100).exchange(inside, 100) == pytest.approx(0.5 + 0.5)  # no node crossed


def test_a_shared_bus_carries_everything() -> None:
    bus = replace(ONE, bus_bandwidth_bytes_per_s=100.0)
    assert StepModel(bus, 100, 100).exchange(np.array([[0, 3], [2, 0]]), 100) == pytest.approx(0.5 + 5.0)


def test_a_device_at_half_speed_takes_twice_as_long() -> None:
    slow = StepModel(replace(ONE, speed_per_device=(1.0, 0.5)), 100, 50)
    assert slow.layer(counts([[7, 3], [1, 2]], [8, 6])).compute == pytest.approx(2 * (1 + 6 * 0.25))
    assert slow.layer(counts([[7, 3], [1, 2]], [20, 6])).compute == pytest.approx(1 + 20 * 0.25)
    assert slow.layer(counts([[7, 3], [1, 2]], [8, 0])).compute == pytest.approx(1 + 8 * 0.25)


def test_a_copy_over_a_dear_link_keeps_both_devices_longer() -> None:
    costs = ((0.0, 1.0, 4.0), (1.0, 0.0, 2.0), (4.0, 2.0, 0.0))
    unequal = replace(ONE, devices_per_node=3, link_costs=costs)
    remote = np.array([[0, 3, 1], [0, 0, 2], [0, 0, 0]])
    assert StepModel(unequal, 100, 100).exchange(remote, 100) == pytest.approx(0.5 + 0.8)  # device 2 gets 1 x 4 + 2 x 2


def test_tokens_of_a_step_choose_copies() -> None:
    """Expert 0 is on both devices: the token with expert 1 uses it there, the two others go where least is to do."""
    hosts_EG = np.array([[True, True], [False, True]])
    found = count_step(
        np.array([[0, 1], [0, 0], [0, 0]]), np.array([[1, 1], [1, 0], [1, 0]], bool), hosts_EG, [0, 0, 1], 2
    )
    assert found.load_G.tolist() == [2, 2]
    assert found.copies_GG.tolist() == [[1, 1], [1, 0]]


def test_one_device_exchanges_nothing_and_idle_experts_take_no_time() -> None:
    alone = StepModel(Topology(1, 1, compute_base_s=1.0, compute_pair_s=0.25), 100, 100)
    assert alone.layer(counts([[4]], [4])).total == pytest.approx(2.0)
    assert alone.layer(counts([[0]], [0])).total == 0.0


def test_steps_are_the_sum_of_their_layers() -> None:
    model, layer = StepModel(ONE, 100, 50), counts([[7, 3], [1, 2]], [8, 6])
    assert model.step([layer, layer]).total == pytest.approx(2 * model.layer(layer).total)


def test_counts_are_those_of_the_metrics(make_trace: Any) -> None:
    trace = make_trace(layers=1, kept=0.7)
    device_E = np.arange(16) % 4
    found = count_step(trace.expert_ids[0], trace.kept[0], device_E, trace.homes(4), 4)
    known = measure_layer(trace, 0, device_E, Topology(1, 4), ALL_TOKENS)
    assert found.copies_GG / trace.num_tokens == pytest.approx(known.traffic_GG)
    assert found.load_G.max() / found.load_G.mean() == pytest.approx(known.balance)


@pytest.mark.parametrize(
    ("topology", "lacks"),
    [
        (Topology(1, 2, compute_pair_s=1.0), "intra_bandwidth_bytes_per_s"),
        (Topology(1, 2, intra_bandwidth_bytes_per_s=1.0), "compute_pair_s"),
        (replace(TWO, inter_bandwidth_bytes_per_s=None), "inter_bandwidth_bytes_per_s"),
    ],
)
def test_an_uncalibrated_topology_is_refused(topology: Topology, lacks: str) -> None:
    with pytest.raises(ConfigError, match=rf"has no {lacks}.*run coterie calibrate"):
        StepModel(topology, 100, 100)


def test_bytes_of_a_copy() -> None:
    model = StepModel.of(ONE, hidden_size=2048, top_k=6)
    assert (model.dispatch_bytes, model.combine_bytes) == (4096 + 48, 4096)
    with pytest.raises(ConfigError, match="does not say the model's hidden size"):
        StepModel.of(ONE, 0, 6)


@given(st.integers(0, 2**32 - 1), st.floats(1.0, 10.0))
def test_faster_parts_never_take_longer_and_more_copies_never_less(seed: int, factor: float) -> None:
    rng = np.random.default_rng(seed)
    copies, load = rng.integers(0, 50, (4, 4)), rng.integers(0, 90, 4)
    before = StepModel(TWO, 100, 50).layer(counts(copies, load)).total
    for name in ("intra_bandwidth_bytes_per_s", "inter_bandwidth_bytes_per_s"):
        faster = replace(TWO, **{name: getattr(TWO, name) * factor})
        assert StepModel(faster, 100, 50).layer(counts(copies, load)).total <= before + 1e-12
    for name in ("intra_latency_s", "inter_latency_s", "compute_base_s", "compute_pair_s"):
        slower = replace(TWO, **{name: getattr(TWO, name) * factor})
        assert StepModel(slower, 100, 50).layer(counts(copies, load)).total >= before - 1e-12
    more = copies + rng.integers(0, 5, (4, 4))
    assert StepModel(TWO, 100, 50).layer(counts(more, load)).total >= before - 1e-12
