"""What is stored within a budget."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from coterie.pruning.widths import widths
from coterie.study.widths.iso_memory import dropped_widths, stored_plan, uniform_widths, worthiest_widths


@pytest.mark.parametrize("budget", [0.2, 0.5, 1.0])
def test_budgets_are_kept(make_profile: Any, budget: float) -> None:
    profile = make_profile(2, 8, 2, 64)
    for width_LE in (
        uniform_widths(profile, budget),
        dropped_widths(profile, budget),
        worthiest_widths(profile, budget),
    ):
        assert width_LE.shape == (2, 8)
        share = width_LE.mean() / 64
        assert budget - 1 / 16 <= share <= budget + 1e-9
    assert set(np.unique(dropped_widths(profile, budget))) <= {0, 64}


def test_the_most_chosen_experts_stay(make_profile: Any) -> None:
    load_LE = np.array([[5, 9, 1, 9], [8, 8, 4, 4]])
    profile = make_profile(2, 4, 2, 16, load_LE=load_LE)
    assert (dropped_widths(profile, 0.5) > 0).tolist() == [[False, True, False, True], [True, True, False, False]]


def test_neurons_are_kept_by_squared_value_and_weight(make_profile: Any) -> None:
    value_EI = np.tile(np.linspace(2, 0.6, 16), (4, 1)).astype(np.float32)
    ids_LSK = np.array([[[0, 1], [0, 2]]])
    weights_LSK = np.array([[[0.9, 0.1], [0.6, 0.4]]], np.float32)
    profile = make_profile(
        1, 4, 2, 16, tokens=2, importance={"mean_abs": value_EI[None]}, load_LE=np.array([[2, 1, 1, 0]]),
        sample_ids_LSK=ids_LSK, sample_weights_LSK=weights_LSK,
    )  # fmt: skip
    found_E = worthiest_widths(profile, 0.5)[0]
    worth_EI = np.array([0.81 + 0.36, 0.01, 0.16, 0])[:, None] * (value_EI.astype(float)) ** 2
    least = np.sort(worth_EI.ravel())[-32]
    assert found_E.tolist() == (worth_EI >= least).sum(1).tolist()


def test_a_stored_plan_runs_what_is_stored(make_profile: Any) -> None:
    plan = stored_plan(make_profile(1, 4, 2, 16), np.array([[16, 0, 3, 7]]))
    assert widths(plan, 0, [[2, 1], [0, 3]], [[0.9, 0.1], [0.5, 0.5]]).tolist() == [[3, 0], [16, 7]]
