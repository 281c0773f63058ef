"""Tiers, how sure they are, and how often dominance methods agree."""

from __future__ import annotations

import math

import numpy as np
import pytest

from coterie.profile.agreement import dominance_agreement
from coterie.profile.model_profile import ModelProfile
from coterie.profile.tiers import COLD, HOT, WARM, tier_error, tiers
from coterie.spec import MoESpec


def table(experts: int, uses: dict[tuple[int, int], float], dtype: type = np.int64) -> np.ndarray:
    made = np.zeros((experts, experts), dtype)
    for (one, other), count in uses.items():
        made[one, other] = made[other, one] = count
    return made


def profile(pairs_LEE: np.ndarray, **dominance: np.ndarray) -> ModelProfile:
    layers, experts, _ = pairs_LEE.shape
    none = np.zeros((layers, 0, 2))
    return ModelProfile(
        MoESpec("toy", layers, experts, 2), "", 1, 1, none, pairs_LEE, {}, dominance, none.astype(int), none
    )


def test_the_pair_that_crosses_a_threshold_is_below_it():
    counts = table(5, {(0, 1): 50, (2, 3): 15, (0, 2): 20, (1, 2): 10, (1, 3): 5})
    expected = {(0, 1): HOT, (0, 2): HOT, (2, 3): WARM, (1, 2): WARM, (1, 3): WARM}
    # 50, 70 (crosses 0.6), 85, 95 (crosses 0.9), then 5
    expected[1, 3] = COLD
    wanted = np.full((5, 5), COLD)
    for (one, other), tier in expected.items():
        wanted[one, other] = wanted[other, one] = tier
    np.testing.assert_array_equal(tiers(counts), wanted)


def test_a_threshold_met_exactly_is_not_crossed():
    counts = table(4, {(0, 1): 6, (0, 2): 3, (0, 3): 1})
    assert [tiers(counts)[0, other] for other in (1, 2, 3)] == [HOT, WARM, COLD]


def test_all_uses_can_be_hot_and_unseen_pairs_are_cold():
    counts = table(4, {(0, 1): 6, (0, 2): 3})
    whole = tiers(counts, 1.0, 1.0)
    assert whole[0, 1] == whole[2, 0] == HOT
    assert whole[1, 2] == whole[3, 3] == COLD
    assert (tiers(np.zeros((3, 3), np.int64)) == COLD).all()


def test_error_falls_with_tokens_and_reaches_zero():
    rng = np.random.default_rng(1)
    frequency = table(12, {(i, j): rng.gamma(0.5) for i in range(12) for j in range(i)}, float)
    errors = [
        tier_error(profile(np.round(frequency / frequency.sum() * tokens).astype(np.int64)[None]))
        for tokens in (2e2, 2e4, 2e9)
    ]
    assert 0.5 > errors[0] > 2 * errors[1] > 0
    assert errors[2] < 1e-3


def test_error_is_what_chance_moves_away_from_the_true_tiers():
    """Against counts drawn from known frequencies, pair by pair."""
    rng = np.random.default_rng(2)
    frequency = rng.gamma(0.4, size=(10, 10))
    frequency = np.triu(frequency, 1) / np.triu(frequency, 1).sum()
    truth = tiers(np.round((frequency + frequency.T) * 1e12).astype(np.int64))
    moved, told = [], []
    for _ in range(60):
        counts = np.triu(rng.poisson(2000 * frequency), 1)
        counts += counts.T
        moved.append(counts[tiers(counts) != truth].sum() / counts.sum())
        told.append(tier_error(profile(counts[None])))
    assert np.mean(told) == pytest.approx(np.mean(moved), rel=0.3)


def test_no_pairs_no_error():
    assert tier_error(profile(np.zeros((2, 4, 4), np.int64))) == 0.0


def test_agreement_is_weighted_by_uses_and_leaves_the_undecided_out():
    pairs = np.stack([table(4, {(0, 1): 70, (0, 2): 20, (0, 3): 6, (1, 2): 4})])
    nan = np.nan
    one = np.array([[[nan, 2, 1, 5], [1, nan, 3, nan], [2, 3, nan, nan], [4, nan, nan, nan]]], np.float32)
    other = np.array([[[nan, 9, 7, 1], [8, nan, 2, nan], [6, 1, nan, nan], [3, nan, nan, nan]]], np.float32)
    unmeasured = np.full((1, 4, 4), nan, np.float32)
    found = dominance_agreement(profile(pairs, one=one, other=other, third=unmeasured))
    assert [each.methods for each in found] == [("one", "other"), ("one", "third"), ("other", "third")]
    # {0,1}: both say 0; {0,2}: one says 2, other says 0; {0,3}: 0 against 3; {1,2}: one is undecided
    assert (found[0].pairs, found[0].share, found[0].share_not_hot) == (3, 70 / 96, 0.0)
    assert found[1].pairs == 0
    assert math.isnan(found[1].share)
    assert math.isnan(found[1].share_not_hot)
