"""Dispatch, experts and combine on random shapes, topologies and placements, against the plain reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.placement.placement import Placement
from coterie.spec import MoESpec
from coterie.topology import Topology

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.needs("transformers")  # the extra that brings torch

TOPOLOGIES = ("1", "2", "3", "4", "6", "2x2", "2x3", "3x2")


@dataclass(frozen=True)
class Case:
    """One layer's tokens on every rank, and its experts."""

    placement: Placement
    hidden: list[Any]
    ids: list[Any]
    weights: list[Any]
    scale: Any
    shift: Any


class Scaling:
    """Experts whose every row depends on nothing else, to the last bit: matrix products depend on what is beside them.

    It stands for `ExpertWeights` in `run_experts`.
    """

    width = 1

    def __init__(self, case: Case, which: list[int]) -> None:
        self.num_experts = len(which)
        self._scale_EH, self._shift_EH = case.scale[which], case.shift[which]

    def run(self, expert: int, width: int, x_NH: Any, width_N: Any = None) -> Any:
        return x_NH * self._scale_EH[expert] + self._shift_EH[expert]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    topology = Topology.parse(draw(st.sampled_from(TOPOLOGIES)))
    ranks = topology.num_devices
    experts = draw(st.integers(ranks, 3 * ranks + 4))
    top_k = draw(st.integers(1, min(experts, 6)))
    hidden = draw(st.integers(1, 24))
    counts = [draw(st.sampled_from((0, 0, 1, 3, 17))) for _ in range(ranks)]
    dropped = draw(st.sampled_from((0.0, 0.3, 1.0)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    skew = draw(st.sampled_from((0.0, 3.0)))  # experts that nearly all tokens choose, so that devices get nothing
    order = rng.permutation(experts)[None]
    placement = Placement(order, topology, MoESpec("toy", 1, experts, top_k))
    ids, weights, states = [], [], []
    for count in counts:
        logit_TE = rng.normal(0, 1, (count, experts)) + skew * np.arange(experts)
        chosen = np.argsort(-logit_TE, axis=1)[:, :top_k]
        ids.append(torch.tensor(np.where(rng.random(chosen.shape) < dropped, -1, chosen)))
        weights.append(torch.tensor(rng.random(chosen.shape).astype(np.float32)))
        states.append(torch.tensor(rng.normal(0, 1, (count, hidden)).astype(np.float32)))
    scale, shift = (torch.tensor(rng.normal(0, 1, (experts, hidden)).astype(np.float32)) for _ in range(2))
    return Case(placement, states, ids, weights, scale, shift)


@settings(max_examples=40)
@given(cases())
def test_every_rank_gets_what_the_plain_reference_computes(case: Case) -> None:
    from coterie.parallel.experts import route
    from coterie.parallel.in_memory import run_ranks
    from coterie.parallel.layer_placement import LayerPlacement, experts_of_device
    from coterie.parallel.reference import reference, visits_between

    ranks = case.placement.topology.num_devices
    layer = LayerPlacement.of(case.placement, 0)
    whole = Scaling(case, list(range(case.placement.spec.num_experts)))

    def work(comms: Any) -> Any:
        own: Any = Scaling(case, experts_of_device(case.placement, 0, comms.rank))
        given = (case.hidden[comms.rank], case.ids[comms.rank], case.weights[comms.rank], layer, own, comms)
        flat, handle = route(*given)
        sent = list(comms.sent_bytes_G)
        relayed, hops = route(*given, two_hop=True)
        return flat, handle, sent, relayed, hops

    done = run_ranks(ranks, work)
    expected = reference(case.hidden, case.ids, case.weights, layer, lambda e, x: whole.run(e, 1, x))
    visits = np.array(visits_between(case.ids, layer)).reshape(ranks, ranks)
    row = case.hidden[0].shape[1] * 4
    for rank, (flat, handle, sent, relayed, hops) in enumerate(done):
        assert torch.equal(flat, expected[rank])
        assert torch.equal(relayed, expected[rank])
        away = np.arange(ranks) != rank
        assert list(handle.sent) == visits[rank].tolist()
        assert list(handle.received) == visits[:, rank].tolist()
        assert handle.dispatch_bytes() == (visits[rank] * row * away).tolist()
        assert handle.combine_bytes() == (visits[:, rank] * row * away).tolist()
        counted = np.add(np.add(handle.dispatch_bytes(), handle.combine_bytes()), handle.metadata_bytes())
        assert sent == counted.tolist()
        _check_hops(case, rank, hops)


def _check_hops(case: Case, rank: int, hops: Any) -> None:
    """Across nodes travels one copy for each other node of a token, to the device at the sender's own place."""
    topology, node = case.placement.topology, case.placement.topology.node_of_device()
    node_E = node[case.placement.device_of_expert()[0]]
    crossing = np.zeros(topology.num_devices, dtype=int)
    for ids in case.ids[rank].tolist():
        for other in {int(node_E[expert]) for expert in ids if expert >= 0} - {int(node[rank])}:
            crossing[other * topology.devices_per_node + rank % topology.devices_per_node] += 1
    assert [count for other, count in enumerate(hops.outer.sent) if other != rank] == [
        int(count) for other, count in enumerate(crossing) if other != rank
    ]
    assert all(count == 0 for other, count in enumerate(hops.inner.sent) if node[other] != node[rank])


@settings(max_examples=40)
@given(cases())
def test_every_kept_slot_arrives_once_at_its_expert(case: Case) -> None:
    from coterie.parallel.dispatch import dispatch
    from coterie.parallel.in_memory import run_ranks
    from coterie.parallel.layer_placement import LayerPlacement, experts_of_device

    layer = LayerPlacement.of(case.placement, 0)
    ranks = case.placement.topology.num_devices
    received = run_ranks(ranks, lambda comms: dispatch(*_own(case, comms.rank), layer, comms)[0])
    arrived: list[tuple[int, bytes, float]] = []
    for rank, each in enumerate(received):
        experts = experts_of_device(case.placement, 0, rank)
        assert (each.ids_RK >= 0).any(1).all(), "a visit has work to do"
        for hidden, ids, weights in zip(each.hidden_RH, each.ids_RK.tolist(), each.weights_RK.tolist(), strict=True):
            text = hidden.numpy().tobytes()
            arrived += [(experts[place], text, w) for place, w in zip(ids, weights, strict=True) if place >= 0]
    sent = [
        (expert, hidden.numpy().tobytes(), w)
        for rank in range(ranks)
        for hidden, ids, weights in zip(*_lists(case, rank), strict=True)
        for expert, w in zip(ids, weights, strict=True) if expert >= 0
    ]  # fmt: skip
    assert sorted(arrived) == sorted(sent)


def _own(case: Case, rank: int) -> tuple[Any, Any, Any]:
    return case.hidden[rank], case.ids[rank], case.weights[rank]


def _lists(case: Case, rank: int) -> tuple[Any, list[Any], list[Any]]:
    hidden, ids, weights = _own(case, rank)
    return hidden, ids.tolist(), weights.tolist()
