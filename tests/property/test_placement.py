"""Laws that hold for any trace, topology and placement."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import CoterieError
from coterie.placement.balance import pack
from coterie.placement.metrics import LayerMetrics, measure_layer
from coterie.placement.placement import Placement
from coterie.placement.problem import NO_EXPERT, merge_sets
from coterie.spec import MoESpec
from coterie.topology import Topology
from coterie.trace.routing_trace import ALL_TOKENS, RoutingTrace
from coterie.trace.splits import split
from coterie.trace.storage import ARRAY_FIELDS


@dataclass(frozen=True)
class Case:
    """A one-layer trace, devices, and the device of every expert."""

    trace: RoutingTrace
    topology: Topology
    device_E: np.ndarray

    def metrics(self, tokens: Any = ALL_TOKENS) -> LayerMetrics:
        return measure_layer(self.trace, 0, self.device_E, self.topology, tokens)


@st.composite
def topologies(draw: st.DrawFn, most: int) -> Topology:
    """Up to `most` devices, which is at least 1."""
    nodes = draw(st.integers(1, most))
    return Topology(nodes, draw(st.integers(1, most // nodes)), draw(st.sampled_from([1.0, 2.0, 5.5])))


@st.composite
def traces(draw: st.DrawFn, layers: int = 1, keep_some: bool = False) -> RoutingTrace:
    """Small traces with any of the optional arrays; with `keep_some` every token keeps an expert."""
    experts = draw(st.integers(1, 12))
    top_k, tokens = draw(st.integers(1, min(4, experts))), draw(st.integers(1, 30))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ids = np.argsort(rng.random((layers, tokens, experts)), axis=2)[:, :, :top_k].astype(np.uint8)
    fields: dict[str, Any] = {}
    if draw(st.booleans()):
        fields["kept"] = rng.random(ids.shape) < draw(st.sampled_from([0.2, 0.8]))
        if keep_some:
            fields["kept"][:, :, 0] = True
    if draw(st.booleans()):
        fields["weights"] = rng.random(ids.shape).astype(draw(st.sampled_from([np.float16, np.float32])))
    if draw(st.booleans()):
        fields["sequence_ids"] = np.sort(rng.integers(0, draw(st.integers(1, 6)), tokens)).astype(np.int32)
    return RoutingTrace(ids, MoESpec("toy", layers, experts, top_k), **fields)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    trace = draw(traces(keep_some=True))
    topology = draw(topologies(trace.spec.num_experts))
    slots = topology.slots(trace.spec.num_experts)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return Case(trace, topology, rng.permutation(np.repeat(np.arange(topology.num_devices), slots)))


def kept_of(trace: RoutingTrace) -> np.ndarray:
    return np.ones(trace.expert_ids.shape, dtype=bool) if trace.kept is None else np.asarray(trace.kept)


@given(cases())
def test_visits_lie_between_their_bounds(case: Case) -> None:
    found, devices = case.metrics(), case.topology.num_devices
    assert 1 <= found.dpt <= min(case.trace.spec.top_k, devices) + 1e-12
    assert 1 <= found.npt <= min(found.dpt, case.topology.num_nodes) + 1e-12
    assert found.dpt / devices - 1e-12 <= found.peak_traffic <= 1
    assert 1 - 1e-12 <= found.balance <= devices + 1e-12


@given(cases())
def test_remote_is_all_but_the_home(case: Case) -> None:
    found = case.metrics()
    home_T = case.trace.homes(case.topology.num_devices)
    device_TK, kept_TK = case.device_E[case.trace.expert_ids[0]], kept_of(case.trace)[0]
    at_home = ((device_TK == home_T[:, None]) & kept_TK).any(axis=1).mean()
    assert found.remote_dpt == pytest.approx(found.dpt - at_home)
    node_G = case.topology.node_of_device()
    on_home_node = ((node_G[device_TK] == node_G[home_T][:, None]) & kept_TK).any(axis=1).mean()
    assert found.remote_npt == pytest.approx(found.npt - on_home_node)
    assert found.remote_peak_traffic <= found.peak_traffic + 1e-12


@given(cases())
def test_traffic_adds_up(case: Case) -> None:
    found, traffic_GG = case.metrics(), case.metrics().traffic_GG
    assert traffic_GG.sum() == pytest.approx(found.dpt)
    assert np.trace(traffic_GG) == pytest.approx(found.dpt - found.remote_dpt)
    assert traffic_GG.sum(axis=0).max() == pytest.approx(found.peak_traffic)
    home_share = np.bincount(case.trace.homes(case.topology.num_devices), minlength=len(traffic_GG))
    home_share = home_share / case.trace.num_tokens
    most = min(case.trace.spec.top_k, len(traffic_GG))
    assert (traffic_GG.sum(axis=1) <= home_share * most + 1e-12).all()
    assert (traffic_GG.sum(axis=1) >= home_share - 1e-12).all()


@given(cases())
def test_load_is_conserved_whatever_the_placement(case: Case) -> None:
    """B times the mean load is a whole number of pairs, the load of one device, and the pairs are the trace's."""
    pairs = kept_of(case.trace).sum()
    mean = pairs / case.topology.num_devices
    loads = np.zeros(case.topology.num_devices)
    np.add.at(loads, case.device_E[case.trace.expert_ids[0]][kept_of(case.trace)[0]], 1)
    assert loads.sum() == pairs
    assert case.metrics().balance * mean == pytest.approx(loads.max())


@given(cases(), st.data())
def test_parts_of_the_tokens_add_up(case: Case, data: st.DataObject) -> None:
    tokens = case.trace.num_tokens
    if tokens < 2:
        return
    cut = data.draw(st.integers(1, tokens - 1))
    parts = [(case.metrics(slice(0, cut)), cut), (case.metrics(np.arange(cut, tokens)), tokens - cut)]
    for name in ("dpt", "remote_dpt", "npt", "remote_npt"):
        total = sum(getattr(found, name) * count for found, count in parts)
        assert getattr(case.metrics(), name) == pytest.approx(total / tokens)
    traffic_GG = sum(found.traffic_GG * count for found, count in parts) / tokens
    np.testing.assert_allclose(case.metrics().traffic_GG, traffic_GG, atol=1e-12)


@given(cases())
def test_the_names_of_devices_do_not_matter_where_there_is_no_home(case: Case) -> None:
    renamed = np.random.default_rng(0).permutation(case.topology.num_devices)[case.device_E]
    other = measure_layer(case.trace, 0, renamed, case.topology, ALL_TOKENS)
    for name in ("dpt", "balance", "peak_traffic"):
        assert getattr(other, name) == pytest.approx(getattr(case.metrics(), name))


@given(traces())
def test_merged_sets_hold_every_token_that_keeps_an_expert(trace: RoutingTrace) -> None:
    routing = trace.layer(0)
    sets_UK, multiplicity_U = merge_sets(routing.expert_ids_TK, routing.kept_TK, trace.spec.num_experts)
    kept_TK = routing.kept()
    assert multiplicity_U.sum() == kept_TK.any(axis=1).sum()
    assert ((sets_UK != NO_EXPERT).sum(axis=1) * multiplicity_U).sum() == kept_TK.sum()


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(0, 2**32 - 1))
def test_packing_fills_every_pack_and_loses_nothing(capacity: list[int], seed: int) -> None:
    load = np.random.default_rng(seed).random(sum(capacity))
    packs = pack(load, np.array(capacity))
    assert np.bincount(packs, minlength=len(capacity)).tolist() == capacity
    heaviest = np.argsort(-load)[: len(capacity)]
    assert len(set(packs[heaviest].tolist())) == len(capacity)  # while a pack is empty it is the lightest


# ---- maps and files ----


@st.composite
def placements(draw: st.DrawFn) -> tuple[Placement, np.ndarray]:
    """A placement from devices [L, E], with slots as even as can be or drawn."""
    experts, layers = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    topology = draw(topologies(experts))
    if draw(st.booleans()):
        rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        extra = rng.multinomial(experts - topology.num_devices, np.full(topology.num_devices, 1 / topology.num_devices))
        topology = Topology(topology.num_nodes, topology.devices_per_node, 3.0, tuple(int(n) + 1 for n in extra))
    spec = MoESpec(draw(st.text(max_size=8)), layers, experts, draw(st.integers(1, experts)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    slots = np.repeat(np.arange(topology.num_devices), topology.slots(experts))
    device_LE = np.stack([rng.permutation(slots) for _ in range(layers)])
    return Placement.from_devices(device_LE, topology, spec, {"name": "any"}, {"fit": {"dpt": 1.5}}), device_LE


@given(placements())
def test_the_map_and_the_devices_are_inverse(pair: tuple[Placement, np.ndarray]) -> None:
    placement, device_LE = pair
    np.testing.assert_array_equal(placement.device_of_expert(), device_LE)
    for row, devices in zip(placement.physical_to_logical_map, device_LE, strict=True):
        assert sorted(row.tolist()) == list(range(placement.spec.num_experts))
        np.testing.assert_array_equal(devices[row], placement.device_of_slot())


@given(placements())
def test_a_placement_comes_back_from_its_file(tmp_path_factory: Any, pair: tuple[Placement, np.ndarray]) -> None:
    path: Path = tmp_path_factory.getbasetemp() / "placement.json"
    pair[0].save(path)
    read = Placement.load(path)
    np.testing.assert_array_equal(read.physical_to_logical_map, pair[0].physical_to_logical_map)
    for name in ("topology", "spec", "method", "metrics"):
        assert getattr(read, name) == getattr(pair[0], name)
    assert read.to_json() == pair[0].to_json()


@given(traces(layers=2))
def test_a_trace_comes_back_from_its_file(tmp_path_factory: Any, trace: RoutingTrace) -> None:
    path: Path = tmp_path_factory.getbasetemp() / "trace.safetensors"
    trace.save(path)
    read = RoutingTrace.load(path)
    assert read.spec == trace.spec
    for name in ARRAY_FIELDS:
        mine, theirs = getattr(trace, name), getattr(read, name)
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert mine.dtype == theirs.dtype
            np.testing.assert_array_equal(mine, theirs)


@given(st.lists(st.integers(0, 5), min_size=2, max_size=40), st.floats(0.01, 0.99), st.booleans())
def test_a_split_is_a_partition_by_whole_sequences_in_order(ids: list[int], share: float, some: bool) -> None:
    decisions = np.zeros((1, len(ids), 1), dtype=np.uint8)
    trace = RoutingTrace(decisions, MoESpec("toy", 1, 2, 1), sequence_ids=np.array(ids))
    within = np.arange(0, len(ids), 2) if some and len(ids) > 3 else np.arange(len(ids))
    found = split(trace, share, within)
    first, second = np.arange(len(ids))[found.first], np.arange(len(ids))[found.second]
    assert (first.size, second.size) == (found.num_first, found.num_second)
    assert min(first.size, second.size) > 0
    np.testing.assert_array_equal(np.sort(np.concatenate([first, second])), within)
    assert (np.diff(first) > 0).all()
    assert (np.diff(second) > 0).all()
    chosen = [ids[t] for t in within]
    if found.by == "token":
        assert len(set(chosen)) == 1
        assert first.max() < second.min()
        return
    one, other = ({ids[t] for t in part} for part in (first, second))
    assert not one & other
    assert max(chosen.index(sequence) for sequence in one) < min(chosen.index(sequence) for sequence in other)


@given(st.text(max_size=12))
def test_a_topology_is_read_or_refused(text: str) -> None:
    try:
        found = Topology.parse(text)
    except CoterieError:
        return
    assert found.num_devices >= 1
    assert Topology.parse(str(found)).num_devices == found.num_devices
