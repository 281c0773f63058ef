"""What the studies compute, on inputs small enough to know the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from coterie.study.measure import Measured
from coterie.study.widths import asymmetric, dominance, frequency_damage, memory, roles, skew, transfer
from coterie.study.widths.uses import Uses, class_sums


def _uses(ids: Any, experts: int, weights: Any = None) -> Uses:
    ids_LWSK = np.asarray(ids, np.uint16)
    even = np.full(ids_LWSK.shape, 1 / ids_LWSK.shape[3], np.float32)
    return Uses(ids_LWSK, even if weights is None else np.asarray(weights, np.float32), experts)


def test_uses_are_the_anchor_with_each_other_expert() -> None:
    uses = _uses([[[[2, 0, 1], [0, 1, 2]], [[1, 2, 0], [1, 2, 0]]]], 4)  # 1 layer, 2 windows, 2 tokens, top-3
    counts_WLEE = uses.counts()
    assert counts_WLEE.shape == (2, 1, 4, 4)
    assert {(w, i, j): int(counts_WLEE[w, 0, i, j]) for w, _, i, j in np.argwhere(np.triu(counts_WLEE))} == {
        (0, 0, 2): 2, (0, 1, 2): 1, (0, 0, 1): 1, (1, 1, 2): 2, (1, 0, 1): 2,
    }  # fmt: skip
    np.testing.assert_array_equal(counts_WLEE, counts_WLEE.transpose(0, 1, 3, 2))
    table_LEE = np.arange(16).reshape(1, 4, 4)
    assert uses.look_up(table_LEE)[0].tolist() == [[[8, 9], [1, 2]], [[6, 4], [6, 4]]]


def test_class_sums_count_a_token_once_for_each_of_its_uses() -> None:
    member = np.array([[[[True, True], [False, True]]]])  # 1 layer, 1 window, 2 tokens, 2 uses
    assert class_sums(member, np.array([[0.5, 3.0]])).tolist() == [[[4.0, 3.0]]]


# ---- frequency and damage --------------------------------------------------------------------------------------------


def test_the_damage_ratio_is_a_use_against_a_use() -> None:
    # two layers, three windows: 2 nats a frequent use, 0.5 a rare one, whatever the numbers of uses
    uses_LW = np.array([[10.0, 20, 30], [1, 2, 3]])
    sums = {name: np.stack([uses_LW * nats, uses_LW], 2) for name, nats in (("frequent", 2), ("rare", 0.5))}
    found = frequency_damage.compare(sums, 0)
    assert found["frequent"].value == pytest.approx(2)
    assert (found["ratio"].value, found["ratio"].low) == (pytest.approx(4), pytest.approx(4))
    assert [each["uses"]["rare"] for each in found["layers"]] == [60, 6]


# ---- roles -----------------------------------------------------------------------------------------------------------


def _dominance(scores: Any, make_profile: Any) -> Any:
    """A profile of one layer in which every pair has 10 uses."""
    score_EE = np.asarray(scores, np.float32)
    experts = len(score_EE)
    pairs_LEE = (10 * (1 - np.eye(experts, dtype=np.int64)))[None]
    return make_profile(1, experts, pairs_LEE=pairs_LEE, dominance={"fisher": score_EE[None]})


def test_roles_that_a_ranking_explains(make_profile: Any) -> None:
    profile = _dominance([[0, 3, 3], [2, 0, 2], [1, 1, 0]], make_profile)  # 0 beats 1 beats 2
    wins = roles.dominates(profile, "fisher")
    assert np.nan_to_num(wins[0]).tolist() == [[0, 1, 1], [0, 0, 1], [0, 0, 0]]
    sums = roles.variation(np.nan_to_num(wins), profile.pairs_LEE)
    assert sums[:, 0].tolist() == [0, 10, 0]  # the middle one has both roles
    explained = roles.explained(np.nan_to_num(wins), profile.pairs_LEE, np.array([[3.0, 2, 1]]))
    assert explained.sum(0).tolist() == [60, 60]


def test_a_circle_of_roles_no_ranking_explains(make_profile: Any) -> None:
    profile = _dominance([[0, 2, 1], [1, 0, 2], [2, 1, 0]], make_profile)  # 0 beats 1 beats 2 beats 0
    wins = np.nan_to_num(roles.dominates(profile, "fisher"))
    assert roles.variation(wins, profile.pairs_LEE)[:, 2].tolist() == [1, 1, 1]
    explained = roles.explained(wins, profile.pairs_LEE, np.array([[3.0, 2, 1]]))
    assert explained.sum(0).tolist() == [40, 60]


def test_combinations_that_were_hardly_used_have_no_roles(make_profile: Any) -> None:
    profile = _dominance([[0, 2], [1, 0]], make_profile)
    rare = make_profile(
        1, 2, pairs_LEE=profile.pairs_LEE * 0 + 2 * (1 - np.eye(2, dtype=int)), dominance=profile.dominance
    )
    assert np.isnan(roles.dominates(rare, "fisher")).all()


# ---- skew ------------------------------------------------------------------------------------------------------------


def test_ranks_come_from_the_other_text() -> None:
    ranks_LEE = np.array([[[0, 1, 5], [1, 0, 3], [5, 3, 0]]])
    counts_WLEE = np.array([[[[0, 7, 2], [7, 0, 4], [2, 4, 0]]]])
    ranked = skew.by_rank(ranks_LEE, counts_WLEE)
    assert ranked.tolist() == [[[2, 4, 7]]]
    assert skew.cumulative(ranked[0, 0]) == [[0, 0], [1 / 3, 2 / 13], [2 / 3, 6 / 13], [1, 1]]


# ---- dominance -------------------------------------------------------------------------------------------------------


def test_the_most_frequent_pairs_of_all_layers() -> None:
    pairs_LEE = np.zeros((2, 3, 3), int)
    pairs_LEE[0, 0, 1] = pairs_LEE[0, 1, 0] = 5
    pairs_LEE[1, 1, 2] = pairs_LEE[1, 2, 1] = 9
    assert dominance.most_frequent(pairs_LEE, 4) == [(1, 1, 2), (0, 0, 1)]


def test_the_loss_of_either_role_is_a_mean_over_pairs(make_profile: Any) -> None:
    scores = np.array([[[0, 2, np.nan], [1, 0, 1], [np.nan, 4, 0]]], np.float32)
    profile = make_profile(1, 3, dominance={"fisher": scores})
    measured = [
        {"pair": (0, 0, 1), "uses": 10, "tokens": 100, "rises": [40.0, 10.0]},  # as the profile says
        {"pair": (0, 1, 2), "uses": 10, "tokens": 100, "rises": [20.0, 10.0]},  # the other way round
        {"pair": (0, 0, 2), "uses": 10, "tokens": 100, "rises": [9.0, 3.0]},  # no score
        {"pair": (0, 0, 1), "uses": 0, "tokens": 0, "rises": [np.nan, np.nan]},
    ]  # fmt: skip
    found = dominance.summarise(measured, profile, 0)
    by_fisher = found["by_method"]["fisher"]
    assert (by_fisher["dominant_nats_a_use"].value, by_fisher["auxiliary_nats_a_use"].value) == (2.5, 1.5)
    assert by_fisher["ratio"].value == pytest.approx(5 / 3)
    assert by_fisher["agrees_with_measurement"].value == 0.5
    assert by_fisher["dominant_increase"].value == pytest.approx((np.expm1(0.4) + np.expm1(0.1)) / 2)
    itself = found["by_the_measurement_itself"]
    assert (itself["combinations"], itself["ratio"].value) == (3, pytest.approx(6.9 / 2.3))
    assert dominance.summarise(measured[3:], profile, 0) == {"combinations": 0}


# ---- asymmetric ------------------------------------------------------------------------------------------------------


@dataclass
class _Point:
    bytes: float
    measured: Measured


def _point(share: float, rise: float) -> Any:
    base_WS = np.ones((3, 4))
    return _Point(share, Measured(base_WS + rise, base_WS, np.full((3, 4), rise, np.float32)))


def test_symmetric_widths_are_interpolated_to_equal_bytes() -> None:
    found = asymmetric.compare(_point(0.8, 0.01), [_point(0.75, 0.04), _point(0.85, 0.02)], 0)
    assert found["symmetric_bytes"] == pytest.approx(0.8)
    assert found["symmetric_increase"].value == pytest.approx(np.expm1(0.03))
    assert found["symmetric_over_asymmetric"].value == pytest.approx(np.expm1(0.02))


def test_one_symmetric_point_stands_as_it_is() -> None:
    found = asymmetric.compare(_point(0.75, 0.02), [_point(0.75, 0.01)], 0)
    assert found["symmetric_over_asymmetric"].value == pytest.approx(np.expm1(-0.01))


# ---- transfer --------------------------------------------------------------------------------------------------------


def test_domains_are_the_usual_ones_or_the_first() -> None:
    assert transfer.choose(dict.fromkeys(("maths", "prose", "code", "encyclopedic"), ""), 3) == [
        "encyclopedic", "code", "maths",
    ]  # fmt: skip
    assert transfer.choose({"a": "", "maths": ""}, 3) == ["maths", "a"]


def test_similar_profiles_share_tiers_and_roles(make_profile: Any) -> None:
    one, other = make_profile(seed=1), make_profile(seed=2)
    assert transfer.similarity(one, one) == {"same_tier": 1, "same_role": 1}
    found = transfer.similarity(one, other)
    assert 0 < found["same_tier"] < 1
    assert 0 < found["same_role"] < 1


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_the_papers_shares_save_an_eighth() -> None:
    assert memory.expected_bytes((0.6, 0.3, 0.1)) == pytest.approx(0.875)
    assert memory.expected_bytes((0, 0, 1)) == 0.5


def test_mixtrals_metadata_are_below_two_megabytes() -> None:
    found = memory.mixtral_metadata()
    assert found["crisp"] == 32 * 8 * 8 + 3 * 2 * 4 + 4
    assert all(size < 2_000_000 for name, size in found.items() if not name.startswith("order"))
    assert found["order, needed to reorder only"] == 32 * 8 * 14336 * 2
