"""Recorded routing cut into steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError
from coterie.parallel.fit import fit_line
from coterie.parallel.replay import Replay
from coterie.placement.step_time import StepModel
from coterie.pruning.destinations import Cap
from coterie.topology import Topology


def test_every_rank_has_its_own_run_of_tokens(make_trace: Any) -> None:
    trace = make_trace(layers=3, tokens=100)
    replay = Replay.of(trace, 4, batch=10, tokens=slice(10, 100), layers=[2, 0])
    assert (replay.num_devices, replay.num_steps, replay.ids_LGTK.shape) == (4, 2, (2, 4, 20, 4))
    assert replay.ids_LGTK[0, 1].tolist() == trace.expert_ids[2, 10 + 22 : 10 + 42].tolist()
    assert replay.ids_LGTK[1, 3].tolist() == trace.expert_ids[0, 10 + 66 : 10 + 86].tolist()
    assert replay.weights_LGTK[0, 0, 0] == pytest.approx(0.25)


def test_tokens_that_fill_no_step_are_refused(make_trace: Any) -> None:
    with pytest.raises(ConfigError, match="100 tokens do not fill a step of 26 on each of 4 ranks; use --batch 25"):
        Replay.of(make_trace(tokens=100), 4, batch=26)


def test_counts_add_up(make_trace: Any) -> None:
    trace = make_trace(layers=2, tokens=80)
    replay, device_LE = Replay.of(trace, 4, batch=10), np.tile(np.arange(16) % 4, (2, 1))
    counts = replay.counts(1, device_LE)
    assert [int(layer.load_G.sum()) for layer in counts] == [4 * 10 * 4] * 2
    home = replay.ids_LGTK[0, 2, 10:20] % 4  # of rank 2 in layer 0
    assert counts[0].copies_GG[2].tolist() == [int((home == device).any(axis=1).sum()) for device in range(4)]
    model = StepModel(Topology(1, 4, intra_bandwidth_bytes_per_s=1e3, compute_pair_s=1.0), 10, 10)
    assert [time.total for time in replay.predict(model, device_LE)][1] == pytest.approx(model.step(counts).total)


def test_pruning_drops_visits_from_each_ranks_own_home(make_trace: Any) -> None:
    weights = np.random.default_rng(0).dirichlet(np.ones(4), (2, 80)).astype(np.float32)
    trace = make_trace(layers=2, tokens=80, weights=weights)
    replay, device_LE = Replay.of(trace, 4, batch=10), np.tile(np.arange(16) % 4, (2, 1))
    pruned = replay.pruned(Cap(0.3), device_LE, Topology(1, 4))
    at_home = device_LE[0][replay.ids_LGTK[0]] == np.arange(4)[:, None, None]
    assert pruned.kept_LGTK[0][at_home].all()
    assert 0.7 - 1e-6 <= pruned.kept_weight() < replay.kept_weight() == 1.0
    before, after = (int(part.counts(0, device_LE)[0].copies_GG.sum()) for part in (replay, pruned))
    assert after < before


def test_lines_through_measured_times() -> None:
    line = fit_line([1, 10, 100, 1000], [2 + 3 * n for n in (1, 10, 100, 1000)])
    assert (line.base, line.slope) == pytest.approx((2, 3))
    assert line.residual == pytest.approx(0, abs=1e-9)
    assert line.at(5) == pytest.approx(17)


def test_a_fixed_time_is_never_negative() -> None:
    falling = fit_line([100, 200], [10, 30])
    assert (falling.base, falling.residual) == (0.0, pytest.approx(0.2, abs=0.1))
    assert fit_line([1, 2], [10, 5]).slope == 0.0
