"""Reading a curve between its points, against figures worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from coterie.study.widths.curve import Curve, crossing, rise
from coterie.study.widths.curves import against, at_loss_of


def test_the_first_crossing_counts() -> None:
    bytes_P, loss_P = np.array([1, 0.8, 0.6, 0.4]), np.array([0, 0.1, 0.3, 0.2])
    assert crossing(bytes_P, loss_P, 0.05) == pytest.approx(0.9)
    assert crossing(bytes_P, loss_P, 0.25) == pytest.approx(0.65)
    assert crossing(bytes_P, loss_P, 0.5) == 0.4
    assert crossing(bytes_P, loss_P, -0.1) == 1


def test_equal_bytes_are_read_on_straight_lines(make_point: Any) -> None:
    curve = Curve([make_point(0.6, 0.3), make_point(0.8, 0.1), make_point(1.0, 0.0)], rise)
    assert curve.further_at_equal_bytes(make_point(0.7, 0.25)).value == pytest.approx(0.05)
    assert curve.further_at_equal_bytes(make_point(0.9, 0.01)).value == pytest.approx(-0.04)
    assert curve.least_bytes == 0.6


def test_the_interval_holds_what_windows_do_not_share(make_point: Any) -> None:
    noise_W = np.random.default_rng(0).normal(0, 0.1, 40)
    shared = Curve([make_point(0.5, 0.2, noise_W)], rise).further_at_equal_bytes(make_point(0.5, 0.3, noise_W))
    assert (shared.low, shared.high) == pytest.approx((0.1, 0.1))
    own = Curve([make_point(0.5, 0.2, noise_W)], rise).further_at_equal_bytes(make_point(0.5, 0.3, noise_W[::-1]))
    assert own.low < 0.1 < own.high
    assert own.high - own.low > 0.03


def test_bytes_at_the_paper_policys_loss(make_point: Any) -> None:
    value = [make_point(0.8, 0.02), make_point(0.4, 0.1)]
    told = at_loss_of(make_point(0.9, 0.06), value)
    assert told["value_bytes"] == pytest.approx(0.6)
    assert told["ratio"].value == pytest.approx(0.6 / 0.9)
    assert told["ratio_at_equal_kl"].value == pytest.approx(0.6 / 0.9)
    assert told["crisp_bytes"] == 0.9
    assert told["perplexity_increase"] == pytest.approx(np.expm1(0.06))
    assert told["value_bytes_interval_95"] == pytest.approx([0.6, 0.6])


def test_points_are_told_better_worse_and_alike(make_point: Any) -> None:
    noise_W = np.random.default_rng(0).normal(0, 0.1, 40)
    measured = {
        "value": {"a": make_point(0.5, 0.1, np.zeros(40))},
        "crisp": {"worse": make_point(0.6, 0.3, np.zeros(40)), "better": make_point(0.6, 0.01, np.zeros(40))},
        "skip": {"alike": make_point(0.5, 0.1, noise_W - noise_W.mean()), "narrower": make_point(0.4, 9, np.zeros(40))},
    }
    told = against(measured)
    assert (told["value_below"], told["within_noise"], told["value_above"]) == (1, 1, 1)
    assert [each["settings"] for each in told["points"]] == ["worse", "better", "alike"]
