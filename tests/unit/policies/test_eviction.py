"""The compiled cache and policies do, block for block, what the plain ones do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError
from coterie.policies.belady import Belady
from coterie.policies.cache import ExpertCache
from coterie.policies.eviction import LFU, LRU, CacheShape, EvictionPolicy, LayerLRU
from coterie.policies.reference import (
    ReferenceBelady,
    ReferenceCache,
    ReferenceLFU,
    ReferenceLRU,
    ReferenceReuse,
    Worth,
)
from coterie.policies.reuse import Reuse

LAYERS, EXPERTS = 3, 6
SHAPES = {1: CacheShape(LAYERS, EXPERTS, 1), 4: CacheShape(LAYERS, EXPERTS, 4)}


def belady(shape: CacheShape, visits: Any) -> Belady:
    """Belady's policy told of these visits; unchosen slots are filled with experts that run no block."""
    ids = np.tile(np.arange(EXPERTS), (len(visits) // LAYERS, LAYERS, 1))
    blocks = np.zeros_like(ids)
    for number, (layer, need) in enumerate(visits):
        for expert, wanted in need.items():
            blocks[number // LAYERS, layer, expert] = wanted
    return Belady(shape, ids, blocks)


PAIRS: dict[str, Callable[[CacheShape, Any], tuple[EvictionPolicy, Worth]]] = {
    "lru": lambda shape, visits: (LRU(shape), ReferenceLRU()),
    "lru-layer": lambda shape, visits: (LayerLRU(shape), ReferenceLRU()),
    "lfu": lambda shape, visits: (LFU(shape), ReferenceLFU()),
    "reuse": lambda shape, visits: (Reuse(shape), ReferenceReuse(LAYERS, 0.7, 0.97, 0.3, 1.0)),
    "belady": lambda shape, visits: (belady(shape, visits), ReferenceBelady(visits)),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("blocks", SHAPES)
@pytest.mark.parametrize(("seed", "share"), [(0, 0.25), (1, 0.4), (2, 0.7)])
def test_the_same_blocks_stay(name: str, blocks: int, seed: int, share: float, make_visits: Any) -> None:
    visits = make_visits(seed, LAYERS, EXPERTS, blocks=blocks)
    shape = SHAPES[blocks]
    fast_policy, plain_policy = PAIRS[name](shape, visits)
    budget = int(share * shape.total_blocks)
    cache = ExpertCache(shape, budget, fast_policy)
    plain = ReferenceCache(LAYERS, budget, plain_policy, by_layer=name == "lru-layer")
    evicted = 0
    for layer, need in visits:
        ids, wanted = np.array(list(need)), np.array(list(need.values()))
        served = plain.serve(layer, need)
        decision = cache.lookup(layer, ids, wanted)
        evicted += len(decision.evicted_N3)
        assert (decision.misses, decision.loaded_blocks) == served
        cache.loaded(layer, decision.loads_N3)
        cache.used(layer)
        held = {(i, e): int(n) for (i, e), n in np.ndenumerate(cache.arrived_LE) if n}
        assert held == {key: n for key, n in plain.held.items() if n}
    assert evicted > 0


def test_lru_by_hand() -> None:
    """Room for two: 0 and 1 come, 0 is used again, so 2 takes the place of 1."""
    cache = ExpertCache(CacheShape(1, 3, 1), 2, LRU(CacheShape(1, 3, 1)))
    for expert in (0, 1, 0):
        cache.serve(0, np.array([expert]), np.array([1]))
    decision = cache.lookup(0, np.array([2]))
    assert decision.evicted_N3.tolist() == [[0, 1, 0]]
    assert decision.loads_N3.tolist() == [[2, 0, 1]]


def test_layers_keep_their_shares_where_global_lru_thrashes() -> None:
    """Four layers of one expert each over and over, room for three: LRU always evicts what comes next."""
    shape = CacheShape(4, 2, 1)
    misses = {}
    for policy in (LRU(shape), LayerLRU(shape)):
        cache = ExpertCache(shape, 3, policy)
        misses[policy.name] = sum(cache.serve(n % 4, np.array([0]), np.array([1]))[0] for n in range(40))
    assert misses["lru"] == 40
    assert misses["lru-layer"] < 40


def test_reuse_prefers_the_layer_that_comes_sooner() -> None:
    """Of two blocks used alike, the one of the layer just visited goes."""
    shape = CacheShape(3, 2, 1)
    cache = ExpertCache(shape, 3, Reuse(shape))
    for layer in range(3):
        cache.serve(layer, np.array([0]), np.array([1]))
    assert cache.lookup(0, np.array([1])).evicted_N3.tolist() == [[0, 0, 0]]


def test_belady_refuses_visits_it_was_not_told_of(make_visits: Any) -> None:
    visits = make_visits(0, LAYERS, EXPERTS, blocks=1)
    policy = belady(SHAPES[1], visits)
    with pytest.raises(ConfigError, match="announce the trace"):
        policy.touch(1, np.zeros(EXPERTS, np.int32))


@pytest.mark.parametrize("field", [{"num_layers": 0}, {"num_experts": 0}, {"blocks": 0}])
def test_shapes_that_cannot_be(field: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        CacheShape(**{"num_layers": 1, "num_experts": 1, **field})
