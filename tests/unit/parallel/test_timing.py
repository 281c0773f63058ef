"""Steps that are timed for real, with ranks as threads; never how long they took."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError
from coterie.parallel.measured import Point, with_measured
from coterie.parallel.replay import Replay
from coterie.placement.copies import RULES
from coterie.placement.placement import Placement
from coterie.placement.step_time import StepModel
from coterie.pruning.destinations import Cap
from coterie.topology import Topology

torch = pytest.importorskip("torch")
from coterie.parallel.calibrate import calibrate  # noqa: E402 - needs torch
from coterie.parallel.comms import Comms  # noqa: E402 - needs torch
from coterie.parallel.dispatch import Received  # noqa: E402 - needs torch
from coterie.parallel.in_memory import run_ranks  # noqa: E402 - needs torch
from coterie.parallel.timing import ExpertShape, Stage, emulated_experts, random_experts  # noqa: E402 - needs torch

pytestmark = pytest.mark.needs("transformers")  # the extra that brings torch

SHAPE = ExpertShape(16, 8, torch.float32)


@pytest.fixture(scope="module")
def parts(make_trace: Any) -> tuple[Replay, Placement]:
    weights = np.random.default_rng(0).dirichlet(np.ones(4), (2, 120)).astype(np.float32)
    trace, topology = make_trace(layers=2, tokens=120, weights=weights), Topology(1, 4)
    placement = Placement.from_devices(np.tile(np.arange(16) % 4, (2, 1)), topology, trace.spec)
    return Replay.of(trace, 4, batch=10).pruned(Cap(0.2), placement.device_of_expert(), topology), placement


@pytest.mark.parametrize("real", [True, False])
def test_every_rank_sends_the_bytes_that_routing_says(parts: tuple[Replay, Placement], real: bool) -> None:
    replay, placement = parts

    def work(comms: Comms) -> Any:
        experts = random_experts(SHAPE, 4) if real else emulated_experts(0.0, 0.0)
        return Stage(comms, 16, torch.float32).time_steps(replay, placement, experts, [2, 0])

    found = run_ranks(4, work)
    expected_G, copies = np.zeros(4, dtype=np.int64), 0
    for step in (2, 0):
        for counts in replay.counts(step, placement.device_of_expert()):
            remote_GG = counts.copies_GG - np.diag(np.diag(counts.copies_GG))
            expected_G += remote_GG.sum(axis=1) * (64 + 4 * 8) + remote_GG.sum(axis=0) * 64 + 3 * 24
            copies += int(remote_GG.sum())
    for times in found:  # the same on every rank
        assert times.sent_bytes_G.tolist() == expected_G.tolist()
        assert times.copies == copies
        assert times.seconds_S.tolist() == found[0].seconds_S.tolist()
        assert times.seconds_S.shape == times.compute_S.shape == (2,)
        assert (times.compute_S < times.seconds_S).all()
        assert 0 < times.communication_share < 1


@pytest.mark.parametrize("rule", RULES)
def test_with_copies_every_rank_sends_the_bytes_that_the_rule_says(parts: tuple[Replay, Placement], rule: str) -> None:
    replay, plain = parts
    hosts_LEG = plain.hosts()
    for device in range(4):
        hosts_LEG[:, [(device + 1) % 4, (device + 6) % 16], device] = True
    copied = Placement.from_hosts(hosts_LEG, plain.topology, plain.spec, {"dispatch": rule})
    found = run_ranks(4, lambda comms: Stage(comms, 16, torch.float32).time_steps(
        replay, copied, random_experts(SHAPE, 6), [1, 0]))[0]  # fmt: skip
    expected_G, steps = np.zeros(4, dtype=np.int64), [1, 0]
    for counts in (each for step in steps for each in replay.counts(step, copied.where(), copied.topology, rule)):
        remote_GG = counts.copies_GG - np.diag(np.diag(counts.copies_GG))
        expected_G += remote_GG.sum(axis=1) * (64 + 4 * 8) + remote_GG.sum(axis=0) * 64 + 3 * 24
    assert found.sent_bytes_G.tolist() == expected_G.tolist()
    every = run_ranks(4, lambda comms: Stage(comms, 16, torch.float32).time_steps(
        replay, copied, random_experts(SHAPE, 6), range(replay.num_steps)))[0]  # fmt: skip
    tokens = replay.num_steps * 4 * replay.batch * len(replay.layers)
    assert every.copies / tokens == pytest.approx(replay.traffic(copied.where(), copied.topology, rule)["remote_dpt"])


def test_the_bytes_of_the_model_are_those_of_the_runtime(parts: tuple[Replay, Placement]) -> None:
    model = StepModel.of(
        Topology(1, 4, intra_bandwidth_bytes_per_s=1.0, compute_pair_s=1.0), 16, 4, activation_bytes=4
    )  # fmt: skip
    assert (model.dispatch_bytes, model.combine_bytes) == (64 + 4 * 8, 64)


def test_emulated_experts_return_each_state_times_its_weights_here() -> None:
    states = torch.arange(6.0).view(2, 3)
    received = Received(states, torch.tensor([[0, -1], [1, 0]]), torch.tensor([[0.25, 0.5], [0.5, 0.25]]))
    outputs = emulated_experts(0.0, 0.0)(received)
    assert torch.equal(outputs, states * torch.tensor([[0.25], [0.75]]))


def test_calibrating_fills_in_what_was_not_known() -> None:
    def work(comms: Comms) -> Topology:
        return calibrate(comms, Topology(2, 2), SHAPE, 2, link_tokens=[1, 64], compute_pairs=[8, 64], repeats=2)

    found = run_ranks(4, work)
    assert all(each == found[0] for each in found)
    assert StepModel.of(found[0], 16, 4).topology is found[0]  # nothing is lacking
    assert found[0].measured is not None
    assert set(found[0].measured["fits"]) == {"compute", "intra", "inter"}
    units = [point["units"] for point in found[0].measured["fits"]["inter"]["points"]]
    assert units == [2 * 2 * (2 * 64 + 16), 64 * 2 * 2 * (2 * 64 + 16)]  # two ranks of a node, two peers each


def test_sizes_grow_until_they_tell_the_rate() -> None:
    def work(comms: Comms) -> Topology:
        return calibrate(comms, Topology(1, 2), SHAPE, 2, compute_pairs=[8, 64], repeats=1)

    points = (run_ranks(2, work)[0].measured or {})["fits"]["intra"]["points"]
    assert len(points) >= 2
    assert [point["units"] for point in points] == [4**n * (2 * 64 + 8) for n in range(len(points))]


def test_fitted_fields_by_hand() -> None:
    """Links: 2 ms and 1 s a MB there and back, so 1 ms an exchange; the uplink gives each of 2 devices a fifth."""
    found = with_measured(
        Topology(2, 2),
        {
            "compute": [Point(10, 1.5), Point(30, 2.5)],
            "intra": [Point(1e6, 1.002), Point(2e6, 2.002)],
            "inter": [Point(1e6, 2.504), Point(2e6, 5.004)],
        },
        {"by": "hand"},
    )
    assert (found.compute_base_s, found.compute_pair_s) == pytest.approx((1.0, 0.05))
    assert (found.intra_bandwidth_bytes_per_s, found.intra_latency_s) == pytest.approx((1e6, 0.001))
    assert (found.inter_bandwidth_bytes_per_s, found.inter_latency_s) == pytest.approx((4e5, 0.002))
    assert found.inter_cost == pytest.approx(5.0)
    assert found.measured is not None
    assert found.measured["by"] == "hand"


def test_times_that_do_not_grow_give_the_best_rate_seen() -> None:
    found = with_measured(Topology(1, 2), {"intra": [Point(100, 1.0), Point(1000, 1.0)]}, {})
    assert found.intra_bandwidth_bytes_per_s == pytest.approx(1000)


def test_other_numbers_of_ranks_are_refused() -> None:
    def work(comms: Comms) -> Topology:
        return calibrate(comms, Topology(1, 4), SHAPE, 2)

    with pytest.raises(ConfigError, match="2 ranks and a topology of 4 devices; start one rank for each device"):
        run_ranks(2, work)
