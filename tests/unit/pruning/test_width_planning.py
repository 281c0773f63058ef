"""Plans from profiles: what they say of themselves, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import coterie
from coterie.errors import BudgetError, ConfigError
from coterie.pruning.width_planning import plan_widths
from coterie.pruning.width_tables import POLICIES, default_step, metadata_bytes
from coterie.spec import MoESpec


def test_it_is_exported() -> None:
    assert coterie.plan_widths is plan_widths


@pytest.mark.parametrize("policy", POLICIES)
def test_settings_tell_what_a_plan_is_made_from(make_profile: Any, policy: str) -> None:
    profile = make_profile()
    plan = plan_widths(profile, policy, bytes=0.8)
    told = json.loads(json.dumps(plan.settings, allow_nan=False))
    assert told["asked"] == {"bytes": 0.8}
    assert told["variant"] == "mean_abs_down"
    assert told["profile"] == {"model": "toy", "tokens": 800}
    assert 0.5 < told["expected_bytes"] <= 0.8
    assert len(told["expected_bytes_by_layer"]) == 2
    assert told["expected_bytes"] == pytest.approx(np.mean(told["expected_bytes_by_layer"]))
    assert (plan.spec, plan.identity, plan.width, plan.policy) == (profile.spec, profile.identity, 64, policy)
    assert ("threshold" in told) == (policy in ("value", "by-weight", "drop", "skip"))
    assert ("tiers" in told) == (policy in ("crisp", "symmetric"))


def test_the_spread_over_tokens_is_the_error(make_profile: Any) -> None:
    profile = make_profile(1, 8, 2, 64, tokens=500)
    told = plan_widths(profile, "skip", threshold=0.6).settings
    token_S = (profile.sample_weights_LSK[0] >= 0.3).mean(1)
    assert told["expected_bytes"] == pytest.approx(token_S.mean())
    assert told["expected_bytes_standard_error"] == pytest.approx(token_S.std(ddof=1) / 500**0.5)


def test_tiers_are_reported(make_profile: Any) -> None:
    told = plan_widths(make_profile(), "crisp").settings
    assert (told["alpha"], told["beta"], told["dominance"]) == (0.6, 0.9, "fisher")
    assert told["tiers"]["hot"]["uses"] >= 0.6
    assert sum(tier["uses"] for tier in told["tiers"].values()) == pytest.approx(1)
    assert told["widths"]["warm"] == {"dominant": 64, "auxiliary": 32}
    assert sum(told["dominance_decided_by"].values()) == pytest.approx(1)


def test_a_byte_share_moves_alpha_and_beta_together(make_profile: Any) -> None:
    told = plan_widths(make_profile(), "crisp", bytes=0.8).settings
    assert told["alpha"] < 0.6
    assert (1 - told["beta"]) / (1 - told["alpha"]) == pytest.approx(0.25)


def test_the_order_is_by_falling_importance(make_profile: Any) -> None:
    profile = make_profile()
    for variant in ("mean_abs", "mean_abs_down"):
        plan = plan_widths(profile, "uniform", bytes=0.5, variant=variant)
        assert plan.settings["variant"] == variant
        assert plan.order_LEI.dtype == np.uint16
        falling_LEI = np.take_along_axis(profile.importance[variant], plan.order_LEI.astype(np.int64), 2)
        assert (np.diff(falling_LEI, axis=2) <= 0).all()


def test_squares_are_brought_to_the_unit_of_the_others(make_profile: Any) -> None:
    """A threshold is compared with weight x value: a value must not be a square, nor have the weight in it."""
    profile = make_profile()
    root_LEI, square_LE = profile.importance["mean_abs"], np.zeros((2, 8))
    for layer, expert in np.ndindex(2, 8):
        own = profile.sample_ids_LSK[layer] == expert
        square_LE[layer, expert] = (profile.sample_weights_LSK[layer][own] ** 2).mean()
    changes_LEI = (root_LEI**2 * square_LE[:, :, None]).astype(np.float32)
    squared = replace(profile, importance={"first_order": changes_LEI})
    plain = plan_widths(replace(profile, importance={"rms": root_LEI}), "value", bytes=0.5)
    rooted = plan_widths(squared, "value", bytes=0.5, layers="equal")
    assert np.array_equal(plain.order_LEI, rooted.order_LEI)
    assert np.allclose(plain.tables["value_LES"], rooted.tables["value_LES"], rtol=1e-4)
    half_LEI = (root_LEI * square_LE[:, :, None] ** 0.25).astype(np.float32)
    both = replace(profile, importance={"first_order_rms_down": half_LEI})
    halved = plan_widths(both, "value", bytes=0.5)
    assert np.allclose(plain.tables["value_LES"], halved.tables["value_LES"], rtol=1e-4)


def test_an_expert_that_the_sample_lacks_has_its_layers_weights(make_profile: Any) -> None:
    profile = make_profile(1, 3, 2, 16, tokens=3)
    changes = np.ones((1, 3, 16), np.float32)
    some = replace(
        profile, importance={"first_order": changes}, load_LE=np.array([[3, 3, 1]]),
        sample_ids_LSK=np.array([[[0, 1]] * 3]), sample_weights_LSK=np.array([[[0.8, 0.2]] * 3], np.float32),
    )  # fmt: skip
    value_ES = plan_widths(some, "value", threshold=0.5, layers="equal").tables["value_LES"][0]
    expected_E = 1 / np.sqrt([0.64, 0.04, 0.34])
    assert value_ES[:, 0] == pytest.approx(expected_E / expected_E.mean())


def test_the_preferred_variant_is_the_first_one_there(make_profile: Any) -> None:
    ones = np.ones((2, 8, 64), np.float32)
    names = ("mean_abs", "mean_abs_down", "rms", "rms_down", "first_order")
    for count, chosen in (
        (1, "mean_abs"),
        (2, "mean_abs_down"),
        (3, "mean_abs_down"),
        (4, "rms_down"),
        (5, "first_order"),
    ):
        profile = make_profile(importance=dict.fromkeys(names[:count], ones))
        assert plan_widths(profile, "uniform", bytes=0.5).settings["variant"] == chosen


def test_layers_compare_by_what_their_neurons_change(make_profile: Any) -> None:
    profile = make_profile()
    change_LEI = np.ones((2, 8, 64), np.float32) * np.array([[[1.0]], [[9.0]]], np.float32)
    with_loss = replace(profile, importance={**profile.importance, "first_order": change_LEI})
    equal = plan_widths(with_loss, "value", bytes=0.5, layers="equal", variant="mean_abs")
    by_loss = plan_widths(with_loss, "value", bytes=0.5, variant="mean_abs")
    assert (equal.settings["layers"], by_loss.settings["layers"]) == ("equal", "loss")
    assert by_loss.settings["layer_scale"] == [0.5, 1.5]  # roots 1 and 3, by their mean
    ratio_L = (by_loss.tables["value_LES"] / equal.tables["value_LES"]).mean((1, 2))
    assert ratio_L == pytest.approx([0.5, 1.5])
    assert by_loss.settings["expected_bytes_by_layer"][0] < 0.5 < by_loss.settings["expected_bytes_by_layer"][1]
    assert plan_widths(profile, "value", bytes=0.5).settings["layers"] == "equal"


def test_an_order_that_was_profiled_is_passed_on(make_profile: Any) -> None:
    from coterie.models.identity import ORDER_KEY

    assert ORDER_KEY not in plan_widths(make_profile(), "crisp").settings
    profile = make_profile(provenance={"neuron_order": "abc"})
    assert plan_widths(profile, "crisp").settings[ORDER_KEY] == "abc"


@pytest.mark.parametrize(
    ("width", "step"), [(14336, 224), (768, 16), (1408, 32), (384, 16), (256, 16), (64, 4), (24, 2), (7, 1), (1, 1)]
)
def test_steps(width: int, step: int) -> None:
    assert default_step(width) == step


def test_tables_are_small(make_profile: Any) -> None:
    """Under 2 MB at Mixtral-8x7B's shape, whatever the policy."""
    profile = make_profile(32, 8, 2, 1024, tokens=50)  # 64 steps, as Mixtral's 14,336 neurons have
    assert 1024 // default_step(1024) == 14336 // default_step(14336) == 64
    for policy in POLICIES:
        plan = plan_widths(profile, policy, bytes=0.9)
        assert metadata_bytes(plan) == sum(table.nbytes for table in plan.tables.values()) < 100_000
    priced = plan_widths(profile, "value", threshold=0.1, prices=(1, 1, 2))
    assert 65_536 < metadata_bytes(priced) < 100_000


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        ("crips", {}, "unknown width policy 'crips'; did you mean 'crisp'?"),
        ("value", {}, "how strong should the policy value be"),
        ("uniform", {}, "give a share of the bytes, e.g. 0.6$"),
        ("value", {"threshold": 0.1, "bytes": 0.5}, "exclude each other"),
        ("value", {"threshold": -1}, "a threshold of -1 is no number >= 0"),
        ("value", {"threshold": float("nan")}, "a threshold of nan"),
        ("value", {"bytes": 0.0}, "a byte share of 0 is not within"),
        ("value", {"bytes": 1.5}, "a byte share of 1.5 is not within"),
        ("uniform", {"threshold": 0.5}, "the policy uniform has no threshold; give a share of the bytes"),
        ("crisp", {"threshold": 0.5}, "the policy crisp has no threshold; give alpha and beta"),
        ("crisp", {"alpha": 0.95}, "alpha 0.95 and beta 0.9 must be rising"),
        ("crisp", {"warm_aux": 1.5}, "widths 1, 1, 1, 1.5, 1, 0 are not"),
        ("crisp", {"role_widths": [(1, 1)]}, "widths 1, 1 are not"),
        ("crisp", {"role_widths": [(1, 1)] * 3, "cold_aux": 0.5}, "role widths name every width"),
        ("crisp", {"variant": "mean_abz"}, "did you mean 'mean_abs'"),
        ("crisp", {"dominance": "ablation"}, "unknown way of telling dominance in this profile 'ablation'"),
        ("crisp", {"step": 65}, "a step of 65 neurons is not within 1 and the expert's 64"),
        ("crisp", {"step": 0}, "a step of 0 neurons"),
        ("crisp", {"prices": (1, 1, 2)}, "prices belong to the policy value"),
        ("value", {"threshold": 0.1, "prices": (1, 2)}, "prices 1, 2 are not three positive numbers"),
        ("value", {"threshold": 0.1, "warm_aux": 0.25}, "warm-aux belongs to the policies crisp and symmetric"),
        ("value", {"threshold": 0.1, "alpha": 0.5}, "alpha belongs to the policies crisp and symmetric"),
        ("value", {"threshold": 0.1, "layers": "los"}, "did you mean 'loss'"),
        ("value", {"threshold": 0.1, "layers": "loss"}, "profile with gradients, or say equal"),
        ("skip", {"threshold": 0.1, "layers": "equal"}, "layers belongs to the policy value"),
        ("by-weight", {"threshold": 0.1, "gamma": 0}, "gamma 0 is not positive"),
        ("value", {"threshold": 0.1, "gamma": 2}, "gamma belongs to the policy by-weight"),
    ],
)
def test_what_cannot_be_or_would_be_ignored(
    make_profile: Any, policy: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_widths(make_profile(), policy, **options)


def test_what_cannot_be_met(make_profile: Any) -> None:
    with pytest.raises(BudgetError, match=r"a byte share of 0.5 cannot be met: this policy reads at least 0.6"):
        plan_widths(make_profile(), "crisp", bytes=0.5)
    with pytest.raises(BudgetError, match=r"less than one step of 4 of an expert's 64 neurons; ask for at least 0.062"):
        plan_widths(make_profile(), "uniform", bytes=0.01)


def test_one_expert_a_token_has_no_company(make_profile: Any) -> None:
    profile = make_profile(2, 8, 1)
    for policy in ("crisp", "symmetric"):
        with pytest.raises(ConfigError, match="toy chooses one expert a token"):
            plan_widths(profile, policy)
    assert plan_widths(profile, "value", bytes=0.5).settings["expected_bytes"] <= 0.5


def test_a_profile_that_lacks_what_is_needed(make_profile: Any) -> None:
    with pytest.raises(ConfigError, match="holds no importance"):
        plan_widths(make_profile(importance={}), "crisp")
    none = make_profile(sample_ids_LSK=np.zeros((2, 0, 2), int), sample_weights_LSK=np.zeros((2, 0, 2), np.float32))
    with pytest.raises(ConfigError, match="holds no sample of decisions"):
        plan_widths(none, "crisp")


def test_nothing_chosen_at_all(make_profile: Any) -> None:
    """A layer that was never counted: every combination is unseen, hence cold, and ids decide who dominates."""
    profile = make_profile(1, 4, 2, pairs_LEE=np.zeros((1, 4, 4), int), load_LE=np.zeros((1, 4), int))
    nan_LEE = np.full((1, 4, 4), np.nan, np.float32)
    plan = plan_widths(replace(profile, dominance={"fisher": nan_LEE}, spec=MoESpec("toy", 1, 4, 2)), "crisp")
    assert set(plan.tables["code_LEE"].ravel().tolist()) == {4}
