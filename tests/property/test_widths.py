"""Widths: torch agrees with NumPy bit for bit, nothing leaves [0, I], and more bytes never narrow anything."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.pruning.tiers import TIERS, tiers, uses_before
from coterie.pruning.width_budget import byte_share
from coterie.pruning.width_plan import WidthPlan
from coterie.pruning.width_planning import plan_widths
from coterie.pruning.width_tables import POLICIES, check_plan, num_steps
from coterie.pruning.widths import widest, widths
from coterie.spec import MoESpec

# few distinct weights, so that ties and zeros are common
WEIGHTS = (0.0, 0.1, 0.2, 0.25, 0.3, 0.5, 1.0, 3e-7)


def random_plan(policy: str, rng: np.random.Generator, experts: int, top_k: int, width: int, step: int) -> WidthPlan:
    """A plan of a policy with random tables: whatever can be, not only what planning would make."""
    layers, steps = 2, num_steps(width, step)
    code_LEE = rng.integers(0, 6, (layers, experts, experts)).astype(np.uint8)
    code_LEE = np.maximum(code_LEE, code_LEE.transpose(0, 2, 1))
    few = (
        rng.random((layers, experts, steps))
        if rng.random() < 0.5
        else rng.choice((0.1, 0.5, 1.0, 2.0), (layers, experts, steps))
    )
    tables: dict[str, Any] = {"step": np.array(step, np.int32)}
    if policy in ("crisp", "symmetric"):
        tables |= {"code_LEE": code_LEE, "width_CR": rng.integers(0, width + 1, (3, 2)).astype(np.int32)}
    elif policy == "value":
        tables["value_LES"] = -np.sort(-few.astype(np.float32), axis=2)
        tables["threshold"] = np.array(rng.choice((0.0, 0.05, 0.1, 0.25, rng.random())), np.float32)
        if rng.random() < 0.5:
            tables |= {"code_LEE": code_LEE, "price_C": (rng.random(3) * 2 + 0.1).astype(np.float32)}
    elif policy == "uniform":
        tables["width"] = np.array(rng.integers(0, width + 1), np.int32)
    elif policy == "by-weight":
        tables["cut_S"] = np.sort(rng.random(steps)).astype(np.float32)
    elif policy == "drop":
        tables["width_LE"] = rng.integers(0, width + 1, (layers, experts)).astype(np.int32)
    else:
        tables["threshold"] = np.array(rng.choice((0.0, 0.5, 1.0, rng.random() * top_k)), np.float32)
    order_LEI = np.argsort(rng.random((layers, experts, width)), axis=2)
    return WidthPlan(MoESpec("toy", layers, experts, top_k), "id", width, order_LEI, policy, {}, tables)


shapes = st.tuples(
    st.integers(2, 9), st.integers(1, 9), st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**32 - 1)
)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=40)
@given(shape=shapes, dtype=st.sampled_from(["float32", "bfloat16", "float64"]))
def test_torch_is_numpy_bit_for_bit(policy: str, shape: tuple[int, ...], dtype: str) -> None:
    import torch

    from coterie.ops.value_widths import host_widths
    from coterie.ops.widths import WidthTables

    experts, top_k, width, step, seed = shape
    top_k, step = max(2, min(top_k, experts)), min(step, width)
    rng = np.random.default_rng(seed)
    plan = random_plan(policy, rng, experts, top_k, width, step)
    check_plan(plan)
    ids_TK = np.stack([rng.permutation(experts)[:top_k] for _ in range(7)])
    plain_TK = rng.choice(WEIGHTS, ids_TK.shape) if rng.random() < 0.5 else rng.random(ids_TK.shape) ** 3
    weights_TK = torch.tensor(plain_TK).to(getattr(torch, dtype))
    for layer in range(2):
        got = WidthTables.of(plan).widths(layer, torch.tensor(ids_TK), weights_TK)
        expected_TK = widths(plan, layer, ids_TK, weights_TK.float().numpy())
        assert (got.dtype, got.tolist()) == (torch.int64, expected_TK.tolist())
        assert torch.equal(host_widths(WidthTables.of(plan))(layer, torch.tensor(ids_TK), weights_TK), got)
        assert expected_TK.min() >= 0
        assert expected_TK.max() <= widest(plan) <= width


@settings(max_examples=40)
@given(shape=shapes, skew=st.floats(0, 4), bounds=st.tuples(st.integers(0, 100), st.integers(0, 100)))
def test_tiers_are_a_symmetric_cut_of_the_ranking(shape: tuple[int, ...], skew: float, bounds: tuple[int, int]) -> None:
    experts, *_, seed = shape
    rng, (alpha, beta) = np.random.default_rng(seed), (bound / 100 for bound in sorted(bounds))
    uses_EE = np.triu(rng.integers(0, 9, (experts, experts)) ** int(skew), 1)
    pairs_LEE = (uses_EE + uses_EE.T)[None]
    tier_EE = tiers(pairs_LEE, alpha, beta)[0]
    assert np.array_equal(tier_EE, tier_EE.T)
    low, high = np.triu_indices(experts, 1)
    uses_P, tier_P = pairs_LEE[0, low, high], tier_EE[low, high]
    assert (tier_P[uses_P == 0] == TIERS.index("cold")).all()
    total = uses_P.sum()
    for tier, bound in enumerate((alpha, beta)):
        inside = uses_P[tier_P <= tier]
        if total and inside.size:
            assert inside.min() >= uses_P[tier_P > tier].max(initial=0)
            assert (inside.sum() - inside.min()) / total < bound  # without the last one the bound is not reached
            assert inside.sum() == total or inside.sum() / total >= bound - 1e-9
        elif total and bound > 0:
            raise AssertionError("the most frequent combination crosses every bound above 0")
    assert np.isinf(uses_before(pairs_LEE)[0][pairs_LEE[0] == 0]).all()


def every(plan: WidthPlan, profile: Any) -> np.ndarray:
    return np.stack(
        [widths(plan, n, profile.sample_ids_LSK[n], profile.sample_weights_LSK[n]) for n in range(plan.spec.num_layers)]
    )


@pytest.mark.parametrize("top_k", [2, 4])
@pytest.mark.parametrize("policy", [*POLICIES, "priced"])
def test_more_bytes_narrow_nothing_and_are_met(make_profile: Any, policy: str, top_k: int) -> None:
    profile = make_profile(2, 8, top_k, 96, tokens=400)
    options: dict[str, Any] = {"prices": (1, 1.5, 2)} if policy == "priced" else {}
    name = "value" if policy == "priced" else policy
    # the tiers of 8 experts and top-4 leave more bytes: an expert has the widest of its anchor pairs
    budgets = (0.85, 0.9, 0.95, 1.0) if policy in ("crisp", "symmetric") else (0.3, 0.5, 0.55, 0.9, 1.0)
    before, shares = None, []
    for budget in budgets:
        plan = plan_widths(profile, name, bytes=budget, **options)
        got_LSK = every(plan, profile)
        share = byte_share(plan, profile)
        assert share.mean == pytest.approx(got_LSK.mean() / 96)
        assert share.mean == plan.settings["expected_bytes"] <= budget
        assert share.layer_L == pytest.approx(got_LSK.mean((1, 2)) / 96)
        assert before is None or (got_LSK >= before).all()
        shares.append(share.mean)
        before = got_LSK
    assert shares[-1] == 1 or policy in ("crisp", "symmetric")  # those never run unseen pairs in full
    if policy in ("value", "by-weight", "priced", "skip"):
        assert all(share > budget - 1 / 16 for share, budget in zip(shares, budgets, strict=True))


@pytest.mark.parametrize("policy", ["value", "by-weight", "drop", "skip"])
def test_a_larger_threshold_widens_nothing(make_profile: Any, policy: str) -> None:
    profile = make_profile(2, 8, 3, 64, tokens=200)
    before = every(plan_widths(profile, policy, threshold=0), profile)
    assert (before == 64).all()
    for threshold in (0.01, 0.1, 0.3, 0.8, 1.5, 4.0, 1e9):
        after = every(plan_widths(profile, policy, threshold=threshold), profile)
        assert (after <= before).all()
        before = after
    assert before.max() == (16 if policy == "by-weight" else 0) or before.max() <= 4


def test_a_budget_is_met_to_the_last_decision(make_profile: Any) -> None:
    """The next weaker threshold that makes any difference would read more than was asked for."""
    profile = make_profile(1, 4, 2, 16, tokens=30)
    plan = plan_widths(profile, "value", bytes=0.5)
    threshold = plan.settings["threshold"]
    share_SK = profile.sample_weights_LSK[0]
    worth = share_SK[:, :, None] * plan.tables["value_LES"][0][profile.sample_ids_LSK[0]]
    weaker = float(worth[worth < plan.tables["threshold"]].max())
    assert weaker < threshold
    wider = replace(plan, tables={**plan.tables, "threshold": np.array(weaker, np.float32)})
    assert (
        byte_share(plan, profile).mean <= 0.5 < byte_share(wider, profile).mean
        or byte_share(plan, profile).mean >= 0.5 - 1e-4
    )
