"""What is read ahead: the likeliest that is missing, and no more of it than the link has time for."""

from __future__ import annotations

import numpy as np

from coterie.offloading.ahead import Ahead, next_of_sweep, sweeps
from coterie.offloading.visit import Visit
from coterie.policies.cache import ExpertCache
from coterie.policies.eviction import CacheShape
from coterie.policies.registry import make_policy


def taught() -> tuple[Ahead, ExpertCache]:
    """Two layers of 4 experts of 8 blocks; expert 2 of layer 1, 6 blocks wide, always follows expert 0 of layer 0."""
    shape = CacheShape(2, 4, 8)
    cache = ExpertCache(shape, shape.total_blocks, make_policy("lru", shape))
    ahead = Ahead(cache)
    for _ in range(30):
        ahead.observe(0, np.array([8, 0, 0, 0], np.int32))
        ahead.observe(1, np.array([0, 0, 6, 0], np.int32))
    ahead.observe(0, np.array([8, 0, 0, 0], np.int32))
    return ahead, cache


def test_the_likeliest_that_is_missing_is_wanted_as_wide_as_it_last_ran() -> None:
    ahead, cache = taught()
    assert ahead.wanted(1, 99) == (2, 6)
    assert ahead.wanted(1, 2) == (2, 2)
    cache.serve(1, np.array([2]), np.array([5]))
    assert ahead.wanted(1, 2) == (2, 6)
    cache.serve(1, np.array([2]), np.array([6]))
    assert ahead.wanted(1, 2) is None


def test_a_guess_reads_what_fits_into_the_idle_time() -> None:
    ahead, _ = taught()
    assert ahead.worth_reading(1000.0, 10) == 1
    for start in range(40):
        ahead.idle_from(start)
        ahead.idle_from(start + 0.01)  # later in the same layer
        ahead.idle_until(start + 0.05)
        ahead.idle_until(start + 0.9)  # a layer that read nothing ahead
    assert ahead.worth_reading(1000.0, 10) == 5
    assert ahead.worth_reading(100.0, 10) == 1


def test_a_prompt_wants_the_next_layers_experts_best_first_and_within_the_room() -> None:
    shape = CacheShape(2, 4, 8)
    cache = ExpertCache(shape, 20, make_policy("lfu", shape))
    for expert in (2, 2, 1):
        cache.serve(1, np.array([expert]), np.array([3]))
    prompt = Visit(0, np.full(4, 6, np.int32), [[expert, blocks, 20] for expert, blocks in enumerate((7, 6, 6, 8))], 4)
    assert sweeps(prompt, 4)
    assert not sweeps(Visit(0, prompt.need_E, [[0, 8, 80]], 1), 4), "one expert is no sweep"
    assert not sweeps(Visit(0, prompt.need_E, [[expert, 8, 8] for expert in range(4)], 4), 4), "few tokens are none"
    assert next_of_sweep(prompt, cache, 1) == (2, 6), "chosen most often so far, as wide as all are"
    cache.pinned_LE[0] = [8, 8, 0, 0]
    assert next_of_sweep(prompt, cache, 1) == (2, 4), "no more than there is room for"
    cache.pinned_LE[0] = [8, 8, 2, 0]
    assert next_of_sweep(prompt, cache, 1) in ((0, 2), (3, 2)), "the others have as much"
    cache.pinned_LE[0] = [8, 8, 4, 0]
    assert next_of_sweep(prompt, cache, 1) is None
