"""What holds of every cache, whatever it is asked."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.policies.cache import ExpertCache
from coterie.policies.eviction import CacheShape
from coterie.policies.registry import POLICIES, make_policy
from coterie.policies.schedule import SCHEDULES, makespan
from coterie.simulate.offload import SIMULATED, Uses, build, replay

LAYERS, EXPERTS, TOP_K = 2, 5, 2


@st.composite
def uses(draw: Any, blocks: int) -> Uses:
    """A short history of choices, each of up to `blocks` blocks."""
    tokens = draw(st.integers(1, 12))
    pairs = list(itertools.combinations(range(EXPERTS), TOP_K))
    chosen = draw(st.lists(st.sampled_from(pairs), min_size=tokens * LAYERS, max_size=tokens * LAYERS))
    ids = np.array(chosen, np.int64).reshape(tokens, LAYERS, TOP_K)
    if blocks > 1:
        sizes = st.lists(st.integers(0, blocks), min_size=ids.size, max_size=ids.size)
        wanted = np.array(draw(sizes), np.int64).reshape(ids.shape)
    else:
        wanted = np.ones_like(ids)
    return Uses(CacheShape(LAYERS, EXPERTS, blocks), ids, wanted, np.full(tokens, LAYERS * TOP_K))


@settings(max_examples=60)
@given(uses(4), st.sampled_from(sorted(POLICIES)), st.integers(8, 45), st.data())
def test_the_budget_holds_and_what_is_needed_is_there(asked: Uses, name: str, budget: int, data: Any) -> None:
    """Also while loads are on their way; prefixes need no proof, a count of blocks is one."""
    cache = ExpertCache(asked.shape, budget, make_policy(name, asked.shape))
    for token, layer in itertools.product(range(len(asked.ids_TLK)), range(LAYERS)):
        ids, blocks = asked.ids_TLK[token, layer], asked.blocks_TLK[token, layer]
        guessed = cache.prefetch(layer, data.draw(st.permutations(range(EXPERTS)))[:1]) if token % 3 == 0 else None
        assert cache.reserved_LE.sum() == cache.used_blocks <= cache.budget_blocks
        if guessed is not None:
            cache.loaded(layer, guessed.loads_N3)
        arrived_LE = cache.arrived_LE.copy()
        decision = cache.lookup(layer, ids, blocks)
        assert cache.reserved_LE.sum() == cache.used_blocks <= cache.budget_blocks
        for i, e, kept in decision.evicted_N3:
            assert kept < arrived_LE[i, e]
            assert i != layer or e not in ids or kept >= blocks[ids == e]
        for expert, first, end in decision.loads_N3:
            assert first == min(arrived_LE[layer, expert], first)
            assert end == blocks[ids == expert]
        cache.loaded(layer, decision.loads_N3)
        assert (cache.arrived_LE[layer, ids] >= blocks).all()
        cache.used(layer)
    np.testing.assert_array_equal(cache.arrived_LE, cache.reserved_LE)


@settings(max_examples=60)
@given(uses(1), st.integers(TOP_K, LAYERS * EXPERTS))
def test_no_policy_misses_less_than_belady(asked: Uses, budget: int) -> None:
    misses = {name: replay(asked, build(name, asked), budget).miss_ratio for name in SIMULATED}
    assert min(misses.values()) == misses["belady"]


@settings(max_examples=40)
@given(uses(4), st.sampled_from(SIMULATED))
def test_with_room_for_all_each_block_is_read_once(asked: Uses, name: str) -> None:
    found = replay(asked, build(name, asked), asked.shape.total_blocks)
    widest_LE = np.zeros((LAYERS, EXPERTS), np.int64)
    for (token, layer, slot), expert in np.ndenumerate(asked.ids_TLK):
        widest_LE[layer, expert] = max(widest_LE[layer, expert], asked.blocks_TLK[token, layer, slot])
    whole = asked.chosen_T.sum() * asked.shape.blocks
    np.testing.assert_allclose(found.bytes_share * whole, widest_LE.sum())


times = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 4)), min_size=1, max_size=6)


@given(times)
def test_no_order_beats_johnson(jobs: list[tuple[int, int, int]]) -> None:
    load, compute, width = (np.array(part) for part in zip(*jobs, strict=True))
    best = min(makespan(load, compute, order) for order in itertools.permutations(range(len(jobs))))
    for name, schedule in SCHEDULES.items():
        order = schedule(load, compute, width)
        assert sorted(order.tolist()) == list(range(len(jobs)))
        assert makespan(load, compute, order) >= best
        if name == "johnson":
            assert makespan(load, compute, order) == best
