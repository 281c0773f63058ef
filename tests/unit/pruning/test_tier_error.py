"""Tiers, how sure they are, and how often dominance methods agree."""

from __future__ import annotations

import math

import numpy as np
import pytest

from coterie.profile.model_profile import ModelProfile
from coterie.pruning.agreement import dominance_agreement
from coterie.pruning.tier_error import tier_error
from coterie.pruning.tiers import COLD, HOT, WARM
from coterie.pruning.tiers import tiers as tiers_of_layers
from coterie.spec import MoESpec


def tiers(counts_EE: np.ndarray, *thresholds: float) -> np.ndarray:
    return tiers_of_layers(counts_EE[None], *thresholds)[0]


def table(experts: int, uses: dict[tuple[int, int], float], dtype: type = np.int64) -> np.ndarray:
    made = np.zeros((experts, experts), dtype)
    for (one, other), count in uses.items():
        made[one, other] = made[other, one] = count
    return made


def profile(pairs_LEE: np.ndarray, sample_LSK: np.ndarray | None = None, tokens: int = 1, **dominance: np.ndarray):
    layers, experts, _ = pairs_LEE.shape
    ids = np.zeros((layers, 0, 2), int) if sample_LSK is None else sample_LSK
    spec = MoESpec("toy", layers, experts, 2)
    load = np.zeros((layers, experts), int)
    return ModelProfile(spec, "", 1, tokens, load, pairs_LEE, {}, dominance, ids, np.zeros(ids.shape, np.float32))


def drawn(frequency: np.ndarray, tokens: int, seed: int, burst: int = 1, kept: int = 1) -> ModelProfile:
    """A profile of one layer whose pairs are drawn by frequency, each `burst` times in a row, one in `kept` sampled."""
    rows, columns = np.triu_indices(len(frequency), 1)
    chances = frequency[rows, columns] / frequency[rows, columns].sum()
    chosen = np.random.default_rng(seed).choice(len(rows), tokens // burst, p=chances).repeat(burst)
    ids_TK = np.stack([rows[chosen], columns[chosen]], axis=1)
    counts = np.zeros(frequency.shape, np.int64)
    np.add.at(counts, tuple(ids_TK.T), 1)
    return profile((counts + counts.T)[None], ids_TK[None, ::kept], tokens)


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


def test_error_falls_with_tokens():
    frequency = np.random.default_rng(1).gamma(0.5, size=(12, 12))
    errors = [tier_error(drawn(frequency, tokens, 0)) for tokens in (200, 20_000, 2_000_000)]
    assert 0.5 > errors[0] > 2 * errors[1] > 4 * errors[2]


@pytest.mark.parametrize(("burst", "kept"), [(1, 1), (10, 1), (20, 4)])
def test_error_is_what_chance_moves_away_from_the_true_tiers(burst, kept):
    """Against texts drawn from known frequencies: each use by itself, and in bursts, all sampled or one in four."""
    frequency = np.triu(np.random.default_rng(2).gamma(0.4, size=(10, 10)), 1)
    truth = tiers(np.round((frequency + frequency.T) * 1e9).astype(np.int64))
    moved, told = [], []
    for seed in range(60):
        made = drawn(frequency, 8000, seed, burst, kept)
        counts = made.pairs_LEE[0]
        moved.append(counts[tiers(counts) != truth].sum() / counts.sum())
        told.append(tier_error(made))
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
