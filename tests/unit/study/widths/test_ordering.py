"""Orders of neurons compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from coterie.pruning.width_planning import plan_widths
from coterie.study.widths.ordering import _in_order, beats_both, difference, run


def test_chance_among_random_orders_is_the_margin() -> None:
    assert beats_both(0.1, 0.5, [0.4, 0.45])
    assert not beats_both(0.1, 0.14, [0.4, 0.45])
    assert not beats_both(0.38, 0.9, [0.4, 0.45])


def test_a_difference_is_of_increases(make_point: Any) -> None:
    one, other = make_point(0.5, 0.2).measured, make_point(0.5, 0.1).measured
    assert difference(one, other).value == pytest.approx(np.expm1(0.2) - np.expm1(0.1))


def test_orders_are_permutations_told_by_their_seed(make_profile: Any) -> None:
    plan = plan_widths(make_profile(), "uniform", bytes=0.5)
    assert (_in_order(plan, None).order_LEI == np.arange(64)).all()
    one, same, other = (_in_order(plan, seed).order_LEI for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert (one != other).any()
    assert (one[0, 0] != one[0, 1]).any()
    assert (np.sort(one, axis=2) == np.arange(64)).all()


@pytest.mark.needs("torch")
@pytest.mark.needs("transformers")
def test_every_variant_is_measured_and_the_best_is_chosen_on_calibration(context: Any) -> None:
    found = run(context)
    assert set(found["importance"]) == set(found["calibration"]) == set(context.profile.importance)
    assert found["best_on_calibration"] == min(
        found["calibration"], key=lambda name: found["calibration"][name]["value"]
    )
    assert found["calibration_over_best"][found["best_on_calibration"]]["value"] == 0
    assert list(found["random"]["by_seed"]) == ["0"]
