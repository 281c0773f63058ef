"""The model of company learns what its plain form learns, and the policy that uses it keeps what returns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from coterie.policies.cache import ExpertCache
from coterie.policies.company import Company
from coterie.policies.company_model import CompanyModel
from coterie.policies.eviction import CacheShape, EvictionPolicy, LayerLRU
from coterie.policies.prefetch import NextLayer, recall
from coterie.policies.reference import ReferenceCompanyModel

SETTINGS = {"back": (0, 1, 2, 9), "averages": (0.5, 0.95), "rate": 0.2, "dense_rate": 0.02}


def needs(visits: Any, experts: int) -> list[tuple[int, np.ndarray]]:
    """Visits as [E] arrays, 1 for what is chosen."""
    found = []
    for layer, need in visits:
        need_E = np.zeros(experts, np.int32)
        need_E[[expert for expert, blocks in need.items() if blocks]] = 1
        found.append((layer, need_E))
    return found


def test_values_are_the_plain_ones(make_visits: Any) -> None:
    layers, experts, discount = 4, 5, 0.8
    model = CompanyModel(layers, experts, **SETTINGS)
    plain = ReferenceCompanyModel(layers, experts, **SETTINGS)
    value_LE, expected_LE = np.zeros((2, layers, experts))
    before: dict[int, Any] = {}
    for layer, need_E in needs(make_visits(3, layers, experts, tokens=25), experts):
        model.repredict(layer, need_E, value_LE[layer], discount)
        plain.visits[layer].append(set(np.flatnonzero(need_E).tolist()))
        features, company = plain.inputs(layer, layer)
        new = [plain.chance(layer, e, features[e], company) for e in range(experts)]
        if layer in before:
            old_features, old_company = before[layer]
            for e in range(experts):
                missed = expected_LE[layer, e] - (1.0 if need_E[e] else discount * new[e])
                plain.correct(layer, e, old_features[e], old_company, missed)
        before[layer] = features, company
        expected_LE[layer] = new
        np.testing.assert_allclose(value_LE[layer], new, rtol=1e-4)
    assert np.ptp(value_LE) > 0.1


def test_guesses_one_layer_ahead_are_the_plain_ones(make_visits: Any) -> None:
    layers, experts = 3, 5
    guess = NextLayer(layers, experts)
    plain = ReferenceCompanyModel(layers, experts, (0, 1, 2), (0.5, 0.95), 0.3, 0.02)
    before: dict[int, Any] = {}
    for layer, need_E in needs(make_visits(5, layers, experts, tokens=25), experts):
        found_E = guess.observe(layer, np.flatnonzero(need_E))
        if layer in before:
            features, company, chances = before[layer]
            for e in range(experts):
                plain.correct(layer, e, features[e], company, chances[e] - need_E[e])
        plain.visits[layer].append(set(np.flatnonzero(need_E).tolist()))
        after = (layer + 1) % layers
        features, company = plain.inputs(after, layer)
        chances = [plain.chance(after, e, features[e], company) for e in range(experts)]
        before[after] = features, company, chances
        np.testing.assert_allclose(found_E, chances, rtol=1e-4)
    assert guess.likeliest(0, 2).tolist() == np.argsort(-np.array(before[0][2]), kind="stable")[:2].tolist()


def cycle(tokens: int = 200) -> np.ndarray:
    """[T, 2, 1]: layer 0 goes through four experts in turn, layer 1 answers with a permutation of them."""
    first_T = np.arange(tokens) % 4
    return np.stack([first_T, np.array([2, 0, 3, 1])[first_T]], axis=1)[:, :, None]


def test_company_learns_a_cycle_that_recency_never_will() -> None:
    """Room for five of eight: in a cycle what was used longest ago is what comes next, and LRU evicts it."""
    shape = CacheShape(2, 4, 1)
    misses = {}
    policies: list[EvictionPolicy] = [LayerLRU(shape), Company(shape)]
    for policy in policies:
        cache = ExpertCache(shape, 5, policy)
        served = [[cache.serve(layer, ids[layer], np.array([1]))[0] for layer in range(2)] for ids in cycle()]
        misses[policy.name] = np.mean(served[100:])
    assert misses["lru-layer"] > 0.9
    assert misses["company"] < 0.55  # no policy gets below 3/8


def test_recall_of_a_cycle_is_complete_once_learnt() -> None:
    assert recall(cycle(), 1, warm=100) == 1.0
    assert recall(cycle(), 1, warm=0) < 1.0


def test_narrow_blocks_are_worth_more_than_those_that_seldom_run() -> None:
    shape = CacheShape(2, 3, 4)
    policy = Company(shape)
    for number in range(200):
        policy.touch(number % 2, np.array([2, 4, 0], np.int32))
    narrow_B, wide_B = policy.score_LEB[1, 0], policy.score_LEB[1, 1]
    assert narrow_B[1] > 2 * narrow_B[2]
    assert wide_B[3] == pytest.approx(wide_B[0], rel=1e-6)
    assert (np.diff(policy.score_LEB, axis=2) <= 0).all()
