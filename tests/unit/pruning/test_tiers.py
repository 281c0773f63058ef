"""Tiers and roles on counts small enough to check by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError
from coterie.pruning.roles import roles
from coterie.pruning.tiers import tier_shares, tiers

NAN = float("nan")


def symmetric(experts: int, uses: dict[tuple[int, int], float]) -> np.ndarray:
    table_EE = np.zeros((experts, experts))
    for (i, j), value in uses.items():
        table_EE[i, j] = table_EE[j, i] = value
    return table_EE


COUNTS = symmetric(4, {(0, 1): 50, (0, 2): 20, (1, 3): 15, (2, 3): 10, (0, 3): 5})[None].astype(np.int64)  # 1-2 unseen


def by_pair(table_EE: np.ndarray) -> dict[tuple[int, int], int]:
    return {(i, j): int(table_EE[i, j]) for i in range(4) for j in range(i + 1, 4)}


def test_what_crosses_a_threshold_is_on_the_frequent_side() -> None:
    tier_LEE = tiers(COUNTS)
    assert tier_LEE.dtype == np.uint8
    # 50 | 20 crosses 60 | 15 | 10 crosses 90 (85 before it) | 5 and the unseen are cold
    assert by_pair(tier_LEE[0]) == {(0, 1): 0, (0, 2): 0, (1, 3): 1, (2, 3): 1, (0, 3): 2, (1, 2): 2}
    assert np.array_equal(tier_LEE, tier_LEE.transpose(0, 2, 1))


def test_a_threshold_that_is_met_exactly_is_not_crossed_again() -> None:
    assert by_pair(tiers(COUNTS, 0.5, 0.85)[0]) == {(0, 1): 0, (0, 2): 1, (1, 3): 1, (2, 3): 2, (0, 3): 2, (1, 2): 2}


def test_the_ends() -> None:
    assert (tiers(COUNTS, 0, 0) == 2).all()
    assert by_pair(tiers(COUNTS, 1, 1)[0]) == {(0, 1): 0, (0, 2): 0, (1, 3): 0, (2, 3): 0, (0, 3): 0, (1, 2): 2}
    assert (tiers(np.zeros((1, 4, 4), dtype=np.int64), 1, 1) == 2).all()


def test_of_equal_pairs_the_lower_come_first() -> None:
    counts = symmetric(4, dict.fromkeys([(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)], 10))[None].astype(np.int64)
    assert by_pair(tiers(counts, 0.5, 0.6)[0]) == {(0, 1): 0, (0, 2): 0, (0, 3): 0, (1, 2): 1, (1, 3): 2, (2, 3): 2}


def test_shares_of_combinations_and_uses() -> None:
    shares = tier_shares(tiers(COUNTS), COUNTS)
    assert shares["hot"] == {"combinations": pytest.approx(2 / 6), "uses": pytest.approx(0.7)}
    assert shares["warm"] == {"combinations": pytest.approx(2 / 6), "uses": pytest.approx(0.25)}
    assert shares["cold"] == {"combinations": pytest.approx(2 / 6), "uses": pytest.approx(0.05)}


@pytest.mark.parametrize(("alpha", "beta"), [(0.9, 0.6), (-0.1, 0.5), (0.5, 1.1), (float("nan"), 0.9)])
def test_thresholds_must_rise(alpha: float, beta: float) -> None:
    with pytest.raises(ConfigError, match="must be rising shares"):
        tiers(COUNTS, alpha, beta)


def profile_of(make_profile: Any, dominance: dict[str, np.ndarray], load: tuple[int, ...] = (75, 65, 30, 30)) -> Any:
    return make_profile(
        1, 4, pairs_LEE=COUNTS, load_LE=np.array([load]),
        dominance={name: table.astype(np.float32)[None] for name, table in dominance.items()},
    )  # fmt: skip


def test_dominant_is_who_is_missed_more(make_profile: Any) -> None:
    score_EE = np.array([[NAN, 1, 5, 2], [3, NAN, NAN, 4], [1, NAN, NAN, 7], [2, 5, 1, NAN]])
    told = roles(profile_of(make_profile, {"fisher": score_EE}))
    higher = told.higher_LEE[0]
    assert np.array_equal(higher, higher.T)
    assert (higher[0, 1], higher[0, 2], higher[1, 3], higher[2, 3]) == (True, False, True, False)
    # 0-3 are equally missed: their means over company decide, 0: (50+100+10)/75, 3: (10+75+10)/30
    assert higher[0, 3]
    # 1-2 were never together: 1: (150+60)/65 = 3.2, 2: (20+70)/30 = 3
    assert not higher[1, 2]
    assert told.decided_by == {"fisher": pytest.approx(0.95), "mean fisher": pytest.approx(0.05)}


def test_what_one_method_does_not_know_another_decides(make_profile: Any) -> None:
    nothing = np.full((4, 4), NAN)
    some, weight = nothing.copy(), nothing.copy()
    some[0, 1], some[1, 0] = 2, 1
    weight[0, 2], weight[2, 0], weight[0, 1], weight[1, 0] = 0.1, 0.9, 0.1, 0.9
    told = roles(profile_of(make_profile, {"weight": weight, "ablation": some}), "ablation")
    higher = told.higher_LEE[0]
    assert not higher[0, 1]  # as ablation says, not as weight does
    assert higher[0, 2]
    assert told.decided_by["weight"] == pytest.approx(0.2)
    told = roles(profile_of(make_profile, {"weight": nothing}, (10, 20, 20, 30)))
    assert [bool(told.higher_LEE[0, i, j]) for i, j in ((0, 1), (1, 2), (2, 3))] == [True, False, True]
    assert told.decided_by == {"load": pytest.approx(1)}


def test_methods_by_name(make_profile: Any) -> None:
    score_EE = np.ones((4, 4))
    profile = profile_of(make_profile, {"weight": score_EE, "fisher": score_EE})
    assert roles(profile).method == "fisher"
    assert roles(profile, "weight").method == "weight"
    with pytest.raises(ConfigError, match="'fischer'; did you mean 'fisher'"):
        roles(profile, "fischer")
    with pytest.raises(ConfigError, match="says nothing about dominance"):
        roles(profile_of(make_profile, {}))
