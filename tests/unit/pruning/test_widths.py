"""Every policy against its statement written plainly, one token and one expert at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from coterie.pruning.width_planning import plan_widths
from coterie.pruning.widths import widest, widths


def every_layer(plan: Any, profile: Any) -> np.ndarray:
    return np.stack(
        [widths(plan, n, profile.sample_ids_LSK[n], profile.sample_weights_LSK[n]) for n in range(plan.spec.num_layers)]
    )


def up_to_a_step(neurons: float, step: int, width: int) -> int:
    return min(width, -(-int(neurons) // step) * step)


def paper(pairs_EE: np.ndarray, missed_EE: np.ndarray, width: int) -> dict[tuple[int, int], dict[int, int]]:
    """CRISP's policy at its own settings: for each pair of experts, each one's width."""
    experts = len(pairs_EE)
    pairs = [(i, j) for i in range(experts) for j in range(i + 1, experts)]
    total, before = sum(pairs_EE[pair] for pair in pairs), 0
    policy = {}
    for i, j in sorted(pairs, key=lambda pair: -pairs_EE[pair]):
        dominant, auxiliary = (i, j) if missed_EE[i, j] > missed_EE[j, i] else (j, i)
        if before < 0.6 * total and pairs_EE[i, j]:
            narrow = width
        elif before < 0.9 * total and pairs_EE[i, j]:
            narrow = width // 2
        else:
            narrow = 0
        policy[i, j] = {dominant: width, auxiliary: narrow}
        before += pairs_EE[i, j]
    return policy


def test_crisp_at_top_2_is_the_papers_policy(make_profile: Any) -> None:
    dominance_LEE = np.random.default_rng(1).random((2, 8, 8)).astype(np.float32)
    profile = make_profile(dominance={"ablation": dominance_LEE})
    plan = plan_widths(profile, "crisp", dominance="ablation")
    for layer, got_SK in enumerate(every_layer(plan, profile)):
        policy = paper(profile.pairs_LEE[layer], dominance_LEE[layer], profile.width)
        ids_SK = profile.sample_ids_LSK[layer]
        assert got_SK.tolist() == [[policy[min(i, j), max(i, j)][e] for e in (i, j)] for i, j in ids_SK.tolist()]
        assert {0, 32, 64} == set(got_SK.ravel().tolist())


def test_the_order_of_slots_does_not_matter_at_top_2(make_profile: Any) -> None:
    profile = make_profile()
    plan = plan_widths(profile, "crisp")
    ids_SK, weights_SK = profile.sample_ids_LSK[0], profile.sample_weights_LSK[0]
    there, back = widths(plan, 0, ids_SK, weights_SK), widths(plan, 0, ids_SK[:, ::-1], weights_SK[:, ::-1])
    assert np.array_equal(there, back[:, ::-1])


def test_symmetric_shares_the_same_bytes_equally(make_profile: Any) -> None:
    profile = make_profile()
    crisp, symmetric = (every_layer(plan_widths(profile, name), profile) for name in ("crisp", "symmetric"))
    assert np.array_equal(crisp.sum(2), symmetric.sum(2))
    assert set(map(tuple, symmetric.reshape(-1, 2).tolist())) == {(64, 64), (48, 48), (32, 32)}


def test_any_width_for_any_tier_and_role(make_profile: Any) -> None:
    profile = make_profile(width=256)
    plan = plan_widths(profile, "crisp", role_widths=[(1, 0.9), (0.75, 0.5), (0.3, 0.01)])
    assert plan.settings["widths"] == {  # in steps of 16
        "hot": {"dominant": 256, "auxiliary": 240},
        "warm": {"dominant": 192, "auxiliary": 128},
        "cold": {"dominant": 80, "auxiliary": 16},
    }


def test_anchor_pairs_above_top_2(make_profile: Any) -> None:
    """Four experts, top-3: the widest that any anchor pair gives, and the anchor always runs."""
    pairs_EE = np.zeros((4, 4), dtype=np.int64)
    for i, j, uses in ((0, 1, 60), (0, 2, 30), (1, 2, 5), (0, 3, 4), (2, 3, 1)):
        pairs_EE[i, j] = pairs_EE[j, i] = uses
    missed_EE = np.array([[0, 2, 0, 0], [0, 0, 0, 3], [5, 6, 0, 0], [7, 8, 9, 0]], dtype=np.float32)
    profile = make_profile(1, 4, 3, pairs_LEE=pairs_EE[None], dominance={"fisher": missed_EE[None]})
    plan = plan_widths(profile, "crisp")  # hot: 0-1; warm: 0-2; cold: 0-3, 1-2, 2-3, 1-3
    # who dominates: 0 over 1; 2 over 0 and 1; 3 over all
    ids_TK = np.array([[0, 1, 2], [0, 2, 3], [1, 2, 3], [3, 1, 0], [2, 3, 0]])
    weights_TK = np.array([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [0.2, 0.3, 0.5]])
    assert widths(plan, 0, ids_TK, weights_TK).tolist() == [
        [64, 64, 64],  # 0 is wide with 1; 2 dominates its warm pair with 0
        [32, 64, 64],  # 0 has half a warm pair and nothing of the cold one; 2 and 3 dominate it
        [32, 64, 64],  # both of 1's pairs are cold and drop it: it runs like a warm auxiliary
        [64, 0, 0],  # 3 dominates both cold pairs
        [64, 64, 32],  # the anchor is the last slot: 0
    ]


def test_value_is_a_neuron_by_neuron_decision(make_profile: Any) -> None:
    profile = make_profile(2, 6, 3, 40, tokens=60, importance={"rms": make_importance(2, 6, 40)})
    for step in (1, 3, 16):
        plan = plan_widths(profile, "value", threshold=0.15, step=step)
        got_LSK = every_layer(plan, profile)
        for layer in range(2):
            importance_EI = profile.importance["rms"][layer]
            mean = importance_EI.astype(np.float64).mean()
            for ids, weights, got in zip(
                profile.sample_ids_LSK[layer], profile.sample_weights_LSK[layer], got_LSK[layer], strict=True
            ):
                for e, w, k in zip(ids, weights / weights.sum(), got, strict=True):
                    running = [n for n in range(40) if w * (importance_EI[e, n] / mean) >= 0.15]
                    assert k == up_to_a_step(len(running), step, 40)
                    if step == 1:
                        assert sorted(plan.order_LEI[layer, e, :k]) == running
    assert 0 < got_LSK.mean() < 40


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("value", {"threshold": 0.9}), ("crisp", {"role_widths": [(0.75, 0.5), (0.5, 0.3), (0.3, 0)]}),
        ("uniform", {"bytes": 0.5}), ("by-weight", {"threshold": 0.5}), ("skip", {"threshold": 0.5}),
        ("drop", {"threshold": 0.8}),
    ],
)  # fmt: skip
def test_the_widest_is_reached_and_never_passed(policy: str, options: Any, make_profile: Any) -> None:
    profile = make_profile(2, 6, 2, 64)
    plan = plan_widths(profile, policy, **options)
    pairs = np.array([(a, b) for a in range(6) for b in range(6) if a != b])
    alone = np.broadcast_to(np.float32([1, 0]), pairs.shape)
    most = max(widths(plan, layer, pairs, alone).max() for layer in range(2))
    assert most == widest(plan)
    assert policy in ("by-weight", "skip", "drop") or most < 64


def make_importance(*shape: int) -> np.ndarray:
    return np.random.default_rng(5).lognormal(0, 1, shape).astype(np.float32)


@pytest.mark.parametrize("top_k", [2, 3])
def test_prices_of_tiers(make_profile: Any, top_k: int) -> None:
    """A price moves the threshold of its combinations; the anchor pays its cheapest."""
    profile = make_profile(1, 6, top_k, 64)
    prices = (1.0, 2.0, 4.0)
    priced = every_layer(plan_widths(profile, "value", threshold=0.1, prices=prices), profile)[0]
    plain = [every_layer(plan_widths(profile, "value", threshold=0.1 * price), profile)[0] for price in prices]
    tier_EE = plan_widths(profile, "crisp").tables["code_LEE"][0] >> 1
    for t, ids in enumerate(profile.sample_ids_LSK[0]):
        tiers = [int(tier_EE[ids[0], other]) for other in ids[1:]]  # the sample's weights fall
        expected = [plain[min(tiers)][t, 0], *(plain[tier][t, k] for k, tier in enumerate(tiers, 1))]
        assert priced[t].tolist() == expected
    assert len({tuple(row) for row in map(tuple, (plain[0][:, 0], plain[1][:, 0], plain[2][:, 0]))}) == 3


def test_by_weight(make_profile: Any) -> None:
    profile = make_profile(1, 8, 4, 256)
    for threshold in (0.0, 0.5, 1.0, 3.0):
        got_SK = every_layer(plan_widths(profile, "by-weight", threshold=threshold), profile)[0]
        for weights, row in zip(profile.sample_weights_LSK[0].astype(float), got_SK, strict=True):
            for w, k in zip(weights / weights.max(), row, strict=True):
                exact = 256 * min(1.0, w / threshold if threshold else 1.0) ** 0.7
                assert k == min(256, np.ceil(exact / 16 - 1e-5) * 16)
        if threshold == 1:  # the prototype's
            assert (got_SK[:, 0] == 256).all()


def test_uniform_drop_and_skip(make_profile: Any) -> None:
    profile = make_profile(1, 8, 3, 64)
    ids_SK, weights_SK = profile.sample_ids_LSK[0], profile.sample_weights_LSK[0]
    assert (every_layer(plan_widths(profile, "uniform", bytes=0.5), profile) == 32).all()
    assert (every_layer(plan_widths(profile, "uniform", bytes=0.55), profile) == 32).all()  # in steps of 4
    dropped_E = profile.load_LE[0] < 0.8 * profile.load_LE[0].mean()
    assert 0 < dropped_E.sum() < 8
    got_SK = every_layer(plan_widths(profile, "drop", threshold=0.8), profile)[0]
    assert np.array_equal(got_SK, np.where(dropped_E[ids_SK], 0, 64))
    got_SK = every_layer(plan_widths(profile, "skip", threshold=0.6), profile)[0]
    assert np.array_equal(got_SK, np.where(weights_SK < 0.6 / 3, 0, 64))
    assert (got_SK[:, 0] == 64).all()


def test_weights_count_by_their_shares(make_profile: Any) -> None:
    """Families whose weights do not sum to one get the same widths."""
    profile = make_profile(1, 8, 4)
    for name in ("value", "by-weight", "skip", "crisp"):
        plan = plan_widths(profile, name, **({} if name == "crisp" else {"bytes": 0.6}))
        ids_SK, weights_SK = profile.sample_ids_LSK[0], profile.sample_weights_LSK[0]
        scaled = widths(plan, 0, ids_SK, weights_SK * np.float32(4))
        assert np.array_equal(widths(plan, 0, ids_SK, weights_SK), scaled)


def test_a_token_without_weight(make_profile: Any) -> None:
    profile = make_profile(1, 8, 4)
    ids_TK, zeros_TK = np.array([[3, 1, 0, 2]]), np.zeros((1, 4), dtype=np.float32)
    equal_TK = np.full((1, 4), 0.25, dtype=np.float32)
    for name in ("value", "by-weight", "skip", "crisp"):
        plan = plan_widths(profile, name, **({} if name == "crisp" else {"bytes": 0.6}))
        assert np.array_equal(widths(plan, 0, ids_TK, zeros_TK), widths(plan, 0, ids_TK, equal_TK))


def test_nothing_is_known_of_an_expert_that_was_never_chosen(make_profile: Any) -> None:
    profile = make_profile(1, 8, 2)
    importance = {name: table.copy() for name, table in profile.importance.items()}
    load_LE = profile.load_LE.copy()
    load_LE[0, 5] = 0
    for table in importance.values():
        table[0, 5] = 0
    plan = plan_widths(replace(profile, importance=importance, load_LE=load_LE), "value", threshold=0.3)
    assert plan.settings["unseen_experts"] == 1
    assert plan.order_LEI[0, 5].tolist() == list(range(64))
    seen = [e for e in range(8) if e != 5]
    assert np.allclose(plan.tables["value_LES"][0, 5], plan.tables["value_LES"][0, seen].mean(0))
