"""Every metric against counting tokens one by one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from coterie.placement.metrics import (
    SCALARS,
    LayerMetrics,
    average,
    communication_cost,
    full_metrics,
    measure,
    measure_layer,
    summarise,
)
from coterie.topology import Topology
from coterie.trace import check
from coterie.trace.routing_trace import ALL_TOKENS, RoutingTrace


def plain(trace: RoutingTrace, layer: int, device_E: Any, topology: Topology, tokens: Any) -> dict[str, Any]:
    """The metrics of §2, one token at a time."""
    load, visits, remote_visits = Counter[int](), Counter[int](), Counter[int]()
    devices = remote = nodes = remote_nodes = 0
    traffic = np.zeros((topology.num_devices, topology.num_devices))
    chosen = np.arange(trace.num_tokens)[tokens]
    for t in chosen:
        home = t if trace.sequence_ids is None else int(trace.sequence_ids[t])
        home = home % topology.num_devices if trace.home_ids is None else int(trace.home_ids[t])
        kept = [True] * trace.spec.top_k if trace.kept is None else trace.kept[layer, t]
        hosts = [int(device_E[e]) for e, keep in zip(trace.expert_ids[layer, t], kept, strict=True) if keep]
        load.update(hosts)
        for device in set(hosts):
            visits[device] += 1
            traffic[home, device] += 1
            if device != home:
                remote_visits[device] += 1
        found = {device // topology.devices_per_node for device in hosts}
        devices += len(set(hosts))
        remote += len(set(hosts) - {home})
        nodes += len(found)
        remote_nodes += len(found - {home // topology.devices_per_node})
    loads = [load[g] for g in range(topology.num_devices)]
    count = len(chosen)
    return {
        "dpt": devices / count,
        "remote_dpt": remote / count,
        "npt": nodes / count,
        "remote_npt": remote_nodes / count,
        "balance": max(loads) / (sum(loads) / len(loads)) if sum(loads) else 1.0,
        "peak_traffic": max(visits.values(), default=0) / count,
        "remote_peak_traffic": max(remote_visits.values(), default=0) / count,
        "traffic": traffic / count,
    }


@pytest.mark.parametrize("topology", ["1", "4", "2x2", "3x1"])
@pytest.mark.parametrize("homes", ["sequence", "token", "recorded"])
@pytest.mark.parametrize("kept", [None, 0.6, 0.0])
def test_metrics_count_tokens(make_trace: Any, topology: str, homes: str, kept: float | None) -> None:
    devices = Topology.parse(topology)
    rng = np.random.default_rng(1)
    fields = {"home_ids": rng.integers(0, devices.num_devices, 90)} if homes == "recorded" else {}
    trace = make_trace(tokens=90, sequences=0 if homes == "token" else 7, kept=kept, **fields)
    device_E = rng.permutation(np.repeat(np.arange(devices.num_devices), devices.slots(16)))
    for tokens in (ALL_TOKENS, slice(20, 61), np.array([0, 3, 4, 50, 89])):
        found = measure_layer(trace, 1, device_E, devices, tokens)
        expected = plain(trace, 1, device_E, devices, tokens)
        np.testing.assert_allclose(found.traffic_GG, expected.pop("traffic"))
        assert {name: getattr(found, name) for name in SCALARS} == pytest.approx(expected)


def test_pieces_add_up(make_trace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, topology, device_E = make_trace(tokens=90), Topology.parse("2x2"), np.arange(16) // 4
    whole = measure_layer(trace, 0, device_E, topology, ALL_TOKENS)
    monkeypatch.setattr(check, "_TOKENS_AT_ONCE", 40)
    in_pieces = measure_layer(trace, 0, device_E, topology, ALL_TOKENS)
    assert average([whole]) == average([in_pieces])
    np.testing.assert_array_equal(whole.traffic_GG, in_pieces.traffic_GG)


def test_means_and_layers(make_trace: Any) -> None:
    trace, topology = make_trace(layers=3, tokens=90), Topology.parse("4")
    device_LE = np.stack([np.random.default_rng(layer).permutation(np.arange(16) % 4) for layer in range(3)])
    layers = measure(trace, device_LE, topology, ALL_TOKENS)
    assert [layer.dpt for layer in layers] == [
        measure_layer(trace, layer, device_LE[layer], topology, ALL_TOKENS).dpt for layer in range(3)
    ]
    result = summarise(layers, hidden_size=100)
    for name in SCALARS:
        values = [getattr(layer, name) for layer in layers]
        assert result[name] == pytest.approx(sum(values) / 3)
        assert result["layers"][name] == pytest.approx(values, abs=1e-6)
    # a copy of 100 bf16 numbers to each remote device, and a partial sum back
    assert result["bytes_per_token"] == pytest.approx(result["remote_dpt"] * 100 * 2 * 2)
    assert "bytes_per_token" not in summarise(layers)


def test_traffic_says_who_sends_to_whom() -> None:
    """Worked by hand: two devices, three tokens of top-2, at home on 0, 0 and 1."""
    from coterie.spec import MoESpec

    ids = np.array([[[0, 1], [0, 2], [2, 3]]], dtype=np.uint8)
    trace = RoutingTrace(ids, MoESpec("toy", 1, 4, 2), home_ids=np.array([0, 0, 1]))
    found = measure_layer(trace, 0, np.array([0, 0, 1, 1]), Topology.parse("2"), ALL_TOKENS)
    np.testing.assert_allclose(found.traffic_GG * 3, [[2, 1], [0, 1]])
    expected = LayerMetrics(4 / 3, 1 / 3, 1.0, 0.0, 1.0, 2 / 3, 1 / 3, found.traffic_GG, np.ones(2))
    np.testing.assert_allclose(found.load_G, [1, 1])
    assert average([found]) == pytest.approx(average([expected]))


def test_communication_is_caps_objective_over_the_sum_of_company(make_trace: Any) -> None:
    trace, topology = make_trace(layers=1, kept=0.7), Topology.parse("2x2,inter=3")
    device_LE = np.random.default_rng(0).permuted(np.arange(16) % 4)[None]
    ids, kept = trace.expert_ids[0], trace.kept[0]
    chosen = [set(ids[t][kept[t]].tolist()) for t in range(trace.num_tokens)]
    cost = topology.cost_matrix()
    paid = total = 0.0
    for i in range(16):
        for j in range(i + 1, 16):
            either = sum(i in row or j in row for row in chosen)
            company = sum(i in row and j in row for row in chosen) / either if either else 0.0
            total += company
            paid += company * cost[device_LE[0, i], device_LE[0, j]]
    found = full_metrics(trace, device_LE, topology, ALL_TOKENS)
    assert found["communication"] == pytest.approx(paid / total)
    assert found["layers"]["communication"] == [pytest.approx(paid / total, abs=1e-6)]
    assert np.sum(found["traffic"]) == pytest.approx(found["dpt"], abs=1e-3)
    assert communication_cost(np.zeros((16, 16)), cost, device_LE[0]) == 0.0
