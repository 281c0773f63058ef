"""Dispatch, experts and combine where experts have copies: every rule, one and two hops, against plain forms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.placement.copies import RULES
from coterie.placement.placement import Placement
from coterie.spec import MoESpec
from coterie.topology import Topology
from coterie.trace.routing_trace import RoutingTrace

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.needs("transformers")  # the extra that brings torch

SHAPES = ((1, 2), (1, 3), (1, 4), (2, 2), (2, 3), (3, 2))


@dataclass(frozen=True)
class Case:
    """One layer's tokens on every rank, in two calls, and its experts."""

    placement: Placement
    rule: str
    hidden: list[Any]
    ids: list[Any]
    weights: list[Any]
    scale: Any


class Scaling:
    """Experts whose every row depends on nothing else, to the last bit; stands for `ExpertWeights`."""

    width = 1

    def __init__(self, scale_EH: Any) -> None:
        self.num_experts, self._scale_EH = len(scale_EH), scale_EH

    def run(self, expert: int, width: int, x_NH: Any, width_N: Any = None) -> Any:
        return x_NH * self._scale_EH[expert]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    nodes, each = draw(st.sampled_from(SHAPES))
    ranks = nodes * each
    experts = draw(st.integers(ranks, 2 * ranks + 3))
    top_k, hidden = draw(st.integers(1, min(experts, 5))), draw(st.integers(1, 8))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    hosts_EG = np.zeros((experts, ranks), dtype=bool)
    hosts_EG[np.arange(experts), rng.permutation(np.arange(experts) % ranks)] = True
    free = np.argwhere(~hosts_EG)
    for expert, device in free[rng.permutation(len(free))[: draw(st.integers(1, len(free)))]]:
        hosts_EG[expert, device] = True
    speeds = tuple(rng.choice([1.0, 2.0], ranks)) if draw(st.booleans()) else None
    topology = Topology(nodes, each, speed_per_device=speeds, slots_per_device=tuple(hosts_EG.sum(axis=0).tolist()))
    spec = MoESpec("toy", 1, experts, top_k)
    placement = Placement.from_hosts(hosts_EG[None], topology, spec)
    ids, weights, states = [], [], []
    dropped = draw(st.sampled_from((0.0, 0.3)))
    for count in [draw(st.sampled_from((0, 1, 3, 17))) for _ in range(ranks)]:
        chosen = np.argsort(rng.random((count, experts)), axis=1)[:, :top_k]
        ids.append(torch.tensor(np.where(rng.random(chosen.shape) < dropped, -1, chosen)))
        weights.append(torch.tensor(rng.random(chosen.shape).astype(np.float32)))
        states.append(torch.tensor(rng.normal(0, 1, (count, hidden)).astype(np.float32)))
    scale = torch.tensor(rng.normal(0, 1, (experts, hidden)).astype(np.float32))
    return Case(placement, draw(st.sampled_from(RULES)), states, ids, weights, scale)


def chosen_copies(case: Case, rank: int) -> Any:
    """The rank's copies, chosen in two calls."""
    from coterie.parallel.copy_choice import copy_choices

    choose, ids = copy_choices(case.placement, [0], rank, case.rule)[0], case.ids[rank]
    return torch.cat([choose(ids[: len(ids) // 2]), choose(ids[len(ids) // 2 :])])


def trace_of(case: Case) -> RoutingTrace:
    """All ranks' tokens, each at home there."""
    ids_TK, homes = torch.cat(case.ids).numpy(), [len(ids) for ids in case.ids]
    homes_T = np.repeat(np.arange(len(homes)), homes).astype(np.int32)
    return RoutingTrace(
        np.maximum(ids_TK, 0)[None].astype(np.uint8), case.placement.spec, kept=(ids_TK >= 0)[None], home_ids=homes_T
    )


@settings(max_examples=60)
@given(cases())
def test_outputs_and_bytes_with_copies(case: Case) -> None:
    from coterie.parallel.experts import route
    from coterie.parallel.in_memory import run_ranks
    from coterie.parallel.layer_placement import LayerPlacement, experts_of_device
    from coterie.parallel.reference import reference, visits_between
    from coterie.parallel.traffic import predicted_bytes

    ranks, layer = case.placement.topology.num_devices, LayerPlacement.of(case.placement, 0)
    copies = [chosen_copies(case, rank) for rank in range(ranks)]

    def work(comms: Any) -> Any:
        rank = comms.rank
        own: Any = Scaling(case.scale[experts_of_device(case.placement, 0, rank)])
        given = (case.hidden[rank], copies[rank], case.weights[rank], layer, own, comms)
        return (*route(*given), *route(*given, two_hop=True))

    done = run_ranks(ranks, work)
    expected = reference(case.hidden, copies, case.weights, layer, lambda e, x: x * case.scale[e])
    visits = np.array(visits_between(copies, layer)).reshape(ranks, ranks)
    for rank, (flat, handle, relayed, _) in enumerate(done):
        assert torch.equal(flat, expected[rank])
        assert torch.equal(relayed, expected[rank])
        kept_TK1 = (case.ids[rank] >= 0)[..., None] * case.weights[rank][..., None]
        whole = (case.hidden[rank][:, None] * case.scale[case.ids[rank].clamp(min=0)] * kept_TK1).sum(1)
        torch.testing.assert_close(flat, whole, atol=1e-5, rtol=1e-5)  # one process, no copies
        assert list(handle.sent) == visits[rank].tolist()
    if sum(map(len, case.ids)):
        sent = {name: np.array([getattr(handle, f"{name}_bytes")() for _, handle, *_ in done])
                for name in ("dispatch", "combine")}  # fmt: skip
        predicted = predicted_bytes(trace_of(case), case.placement, 4 * case.hidden[0].shape[1], case.rule)
        for name, found in sent.items():
            assert np.array_equal(found, predicted[name][0])


@settings(max_examples=60)
@given(cases())
def test_a_token_visits_just_the_devices_of_its_choices(case: Case) -> None:
    from coterie.parallel.dispatch import dispatch
    from coterie.parallel.in_memory import run_ranks
    from coterie.parallel.layer_placement import LayerPlacement, experts_of_device

    ranks, layer = case.placement.topology.num_devices, LayerPlacement.of(case.placement, 0)
    hosts_EG = case.placement.hosts()[0]
    copies = [chosen_copies(case, rank) for rank in range(ranks)]
    received = run_ranks(
        ranks, lambda comms: dispatch(case.hidden[comms.rank], copies[comms.rank], case.weights[comms.rank], layer,
                                      comms)[0]
    )  # fmt: skip
    sent = []
    for rank in range(ranks):
        assert torch.equal(copies[rank] < 0, case.ids[rank] < 0), "what is dropped stays so"
        kept = copies[rank] >= 0
        assert torch.equal(layer.expert_P[copies[rank][kept]], case.ids[rank][kept]), "a copy of that expert"
        for hidden, row, weights in zip(case.hidden[rank], copies[rank].tolist(), case.weights[rank], strict=True):
            for copy, weight in zip(row, weights.tolist(), strict=True):
                if copy >= 0:
                    device, expert = int(layer.device_P[copy]), int(layer.expert_P[copy])
                    assert hosts_EG[expert, device]
                    sent.append((device, expert, hidden.numpy().tobytes(), weight))
    arrived = []
    for device, each in enumerate(received):
        own = experts_of_device(case.placement, 0, device)
        assert (each.ids_RK >= 0).any(1).all(), "a visit has work to do"
        for hidden, ids, weights in zip(each.hidden_RH, each.ids_RK.tolist(), each.weights_RK.tolist(), strict=True):
            text = hidden.numpy().tobytes()
            arrived += [(device, own[i], text, weight) for i, weight in zip(ids, weights, strict=True) if i >= 0]
    assert sorted(arrived) == sorted(sent)
