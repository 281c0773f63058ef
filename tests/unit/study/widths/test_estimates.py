"""Ratios of sums and their intervals."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from coterie.study.widths.estimates import Estimate, estimate, increase, kept, plain, ratio, ratio_of_means


def test_a_ratio_is_of_the_sums_not_a_mean_of_ratios() -> None:
    found = estimate(np.array([[1, 1], [9, 3]]), ratio())
    assert found.value == 10 / 4
    assert found.low == pytest.approx(1)
    assert found.high == pytest.approx(3)


def test_units_that_agree_leave_no_doubt_and_more_units_leave_less() -> None:
    same = estimate(np.array([[2, 4]] * 5), ratio())
    assert (same.value, same.low, same.high) == (0.5, 0.5, 0.5)
    values = np.column_stack([np.random.default_rng(0).normal(1, 0.3, 400), np.ones(400)])
    many, few = estimate(values, ratio()), estimate(values[:40], ratio())
    assert many.high - many.low < few.high - few.low
    assert estimate(values, ratio(), seed=1) == estimate(values, ratio(), seed=1) != many


def test_the_ratio_of_means_needs_a_positive_second_mean() -> None:
    assert ratio_of_means(np.array([[6.0, 3, 4, 4], [6, 3, -4, 4]]))[0] == 2
    assert math.isnan(ratio_of_means(np.array([[6.0, 3, -4, 4]]))[0])


def test_kept_and_increase_are_of_perplexity() -> None:
    sums = np.array([[math.log(1.25) * 8, 8.0]])
    assert increase(sums)[0] == pytest.approx(0.25)
    assert kept(sums)[0] == pytest.approx(0.8)


def test_everything_becomes_json_without_nan() -> None:
    value = {"a": Estimate(1.0, math.nan, 2.0), "b": (np.float32(0.5), np.inf), "c": np.array([[1, 2]]), 3: np.int64(4)}
    shown = plain(value)
    assert shown == {"a": {"value": 1.0, "interval_95": [None, 2.0]}, "b": [0.5, None], "c": [[1, 2]], "3": 4}
    json.dumps(shown, allow_nan=False)
    assert estimate(np.zeros((3, 2)), ratio()).to_json() == {"value": None, "interval_95": [None, None]}
