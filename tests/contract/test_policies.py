"""What every eviction policy promises, on ordinary traces and on degenerate ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError
from coterie.policies.cache import ExpertCache
from coterie.policies.eviction import CacheShape
from coterie.policies.registry import DEFAULT, POLICIES, make_policy
from coterie.simulate.offload import budget_in_blocks, build, replay, uses_of

every_policy = pytest.mark.parametrize("name", POLICIES)
SHAPES = [(1, 1, 1, 1), (1, 4, 2, 1), (2, 8, 8, 4), (6, 8, 2, 16)]


@every_policy
@pytest.mark.parametrize(("layers", "experts", "top_k", "blocks"), SHAPES)
def test_any_shape_is_served(name: str, layers: int, experts: int, top_k: int, blocks: int) -> None:
    """With the smallest budget, scores stay finite and never rise along an expert, so that its tail goes first."""
    shape = CacheShape(layers, experts, blocks)
    policy = make_policy(name, shape)
    assert (policy.name, policy.shape) == (name, shape)
    assert policy.score_LEB.shape == (layers, experts, blocks)
    assert policy.near_D.shape == (layers,)
    cache = ExpertCache(shape, top_k * blocks, policy)
    rng = np.random.default_rng(0)
    for number in range(30 * layers):
        layer = number % layers
        ids = rng.permutation(experts)[:top_k]
        wanted = rng.integers(0, blocks + 1, top_k)
        cache.serve(layer, ids, wanted)
        assert (cache.arrived_LE[layer, ids] >= wanted).all()
        assert np.isfinite(policy.score_LEB).all()
        assert (np.diff(policy.score_LEB, axis=2) <= 1e-12).all()


@every_policy
def test_the_same_visits_give_the_same_misses(name: str, make_trace: Any) -> None:
    uses = uses_of(make_trace(layers=3, tokens=150, experts=8, top_k=2))
    first, second = (replay(uses, build(name, uses), budget_in_blocks(uses, 0.4)) for _ in range(2))
    assert first == second
    assert 0 < first.miss_ratio < 1


@every_policy
def test_more_memory_helps(name: str, make_trace: Any) -> None:
    uses = uses_of(make_trace(layers=3, tokens=200, experts=8, top_k=2))
    ratios = [replay(uses, build(name, uses), budget_in_blocks(uses, share)).miss_ratio for share in (0.2, 0.5, 1)]
    assert ratios[0] > ratios[1] > ratios[2]


@every_policy
def test_a_whole_prompt_at_once(name: str) -> None:
    """A chunk of many tokens may want every expert of a layer."""
    shape = CacheShape(2, 8, 2)
    cache = ExpertCache(shape, 16, make_policy(name, shape))
    for layer in (0, 1, 0):
        decision = cache.lookup(layer, np.arange(8).repeat(5))
        cache.loaded(layer, decision.loads_N3)
        cache.used(layer)
        assert decision.misses == 8
        assert cache.arrived_LE[layer].tolist() == [2] * 8


@every_policy
def test_policies_are_found_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean '{name}'"):
        make_policy(name + "_", CacheShape(1, 1, 1))


def test_the_default_is_one_of_them() -> None:
    assert DEFAULT in POLICIES
