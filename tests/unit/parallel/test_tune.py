"""Tuning with ranks as threads: what is shared, what is picked, what is said."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError, InfeasiblePlacement
from coterie.parallel.candidates import Candidate, make_candidates
from coterie.parallel.replay import Replay
from coterie.placement.driver import prepare
from coterie.placement.spectrum_files import write_spectrum
from coterie.topology import Topology

torch = pytest.importorskip("torch")
from coterie.parallel.comms import Comms  # noqa: E402 - needs torch
from coterie.parallel.in_memory import run_ranks  # noqa: E402 - needs torch
from coterie.parallel.timing import ExpertShape  # noqa: E402 - needs torch
from coterie.parallel.tune import Tuned, TuneSetting, tune  # noqa: E402 - needs torch

pytestmark = pytest.mark.needs("transformers")  # the extra that brings torch

CALIBRATED = Topology(1, 2, intra_bandwidth_bytes_per_s=1e9, compute_base_s=0.0, compute_pair_s=1e-6)
SHAPE = ExpertShape(16, 8, torch.float32)


def test_candidates_are_the_baselines_and_a_spectrum(make_trace: Any, tmp_path: Any) -> None:
    setting = prepare(make_trace(tokens=400), Topology(1, 4))
    found = make_candidates(setting, 3)
    names = [each.name for each in found]
    assert names[:4] == ["linear", "eplb", "cap", "coterie-0"]
    write_spectrum([each.placement for each in found[3:]], tmp_path)
    again = make_candidates(setting, 99, folder=tmp_path)
    assert [each.name for each in again] == names
    for one, other in zip(found, again, strict=True):
        assert np.array_equal(one.placement.device_of_expert(), other.placement.device_of_expert())
    with pytest.raises(ConfigError, match="a placement for 4 devices, the topology is 2x2"):
        make_candidates(prepare(make_trace(tokens=400), Topology(2, 2)), 3, folder=tmp_path)
    with pytest.raises(InfeasiblePlacement, match="use a placement made from this model's trace"):
        make_candidates(prepare(make_trace(tokens=400, layers=3), Topology(1, 4)), 3, folder=tmp_path)


def test_every_rank_gets_the_same_pick(make_trace: Any) -> None:
    trace = make_trace(tokens=400)
    setting, replay = prepare(trace, CALIBRATED), Replay.of(trace, 2, batch=20)
    asked: list[int] = []

    def work(comms: Comms) -> Tuned:
        def make() -> list[Candidate]:
            asked.append(comms.rank)
            return make_candidates(setting, 2)

        return tune(comms, make, replay, CALIBRATED, SHAPE, trace.spec, TuneSetting(rounds=2, best=1))

    first, second = run_ranks(2, work)
    assert asked == [0]  # placements are made once
    assert np.array_equal(first.placement.physical_to_logical_map, second.placement.physical_to_logical_map)
    result = json.loads(json.dumps(first.to_json()))
    assert result["pick"] == first.placement.method["tuned"]["pick"]
    assert [row["measured_s"] is None for row in result["candidates"][:2]] == [False, False]
    assert sum(row["measured_s"] is not None for row in result["candidates"]) == 3
    assert result["experts"] == "random weights"
    assert result["topology"]["compute_pair_s"] == 1e-6


def test_an_error_of_rank_zero_reaches_all(make_trace: Any) -> None:
    trace = make_trace(tokens=400)

    def make() -> list[Candidate]:
        raise InfeasiblePlacement("no placement fits; use fewer devices")

    def work(comms: Comms) -> str:
        with pytest.raises(Exception, match="no placement fits"):
            tune(comms, make, Replay.of(trace, 2, batch=20), CALIBRATED, SHAPE, trace.spec, TuneSetting(2, 1, True))
        return "told"

    assert run_ranks(2, work) == ["told", "told"]


def test_an_uncalibrated_topology_is_refused(make_trace: Any) -> None:
    trace = make_trace(tokens=400)

    def work(comms: Comms) -> Tuned:
        return tune(comms, list, Replay.of(trace, 2, 20), Topology(1, 2), SHAPE, trace.spec, TuneSetting())

    with pytest.raises(ConfigError, match=r"has no compute_pair_s, .* run coterie calibrate"):
        run_ranks(2, work)


def test_placements_with_copies_are_candidates_too(make_trace: Any, tmp_path: Any) -> None:
    trace = make_trace(tokens=400)
    setting, replay = prepare(trace, CALIBRATED, redundant=4, dispatch="nearest"), Replay.of(trace, 2, batch=20)
    work = TuneSetting(rounds=2, best=1)
    found = run_ranks(
        2, lambda comms: tune(comms, lambda: make_candidates(setting, 2), replay, CALIBRATED, SHAPE, trace.spec, work)
    )
    assert np.array_equal(*(each.placement.physical_to_logical_map for each in found))
    assert (found[0].placement.num_copies, found[1].placement.method["dispatch"]) == (4, "nearest")
    write_spectrum([each.placement for each in make_candidates(setting, 2)[3:]], tmp_path)
    assert all(each.placement.num_copies == 4 for each in make_candidates(setting, 9, folder=tmp_path))
    with pytest.raises(ConfigError, match="4 copies of experts a layer, asked for are 0; give --redundant 4"):
        make_candidates(prepare(trace, CALIBRATED), 2, folder=tmp_path)
