"""What the cache promises a runtime: decisions in order, loads on their way counted, what is pinned kept."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.errors import BudgetError, ConfigError
from coterie.policies.cache import ExpertCache
from coterie.policies.eviction import LRU, CacheShape

SHAPE = CacheShape(2, 4, 4)


def cache_of(budget: int) -> ExpertCache:
    return ExpertCache(SHAPE, budget, LRU(SHAPE))


def test_a_widening_reads_only_the_suffix() -> None:
    cache = cache_of(16)
    first = cache.lookup(0, np.array([1, 2]), np.array([2, 4]))
    assert first.loads_N3.tolist() == [[1, 0, 2], [2, 0, 4]]
    cache.loaded(0, first.loads_N3)
    cache.used(0)
    second = cache.lookup(0, np.array([1, 2]), np.array([3, 1]))
    assert second.loads_N3.tolist() == [[1, 2, 3]]
    assert (second.misses, second.loaded_blocks, cache.used_blocks) == (1, 1, 7)


def test_tokens_that_share_an_expert_read_it_once_as_wide_as_the_widest() -> None:
    decision = cache_of(16).lookup(0, np.array([3, 0, 3, 1]), np.array([1, 2, 3, 0]))
    assert decision.loads_N3.tolist() == [[0, 0, 2], [3, 0, 3]]
    assert decision.misses == 2


def test_tails_go_first() -> None:
    cache = cache_of(8)
    cache.serve(0, np.array([0]), np.array([4]))
    cache.serve(1, np.array([0]), np.array([4]))
    decision = cache.lookup(1, np.array([1]), np.array([3]))
    assert decision.evicted_N3.tolist() == [[0, 0, 1]]
    assert cache.arrived_LE[0, 0] == 1


def test_loads_on_their_way_count_and_stay() -> None:
    cache = cache_of(8)
    fetched = cache.prefetch(1, np.array([2]))
    assert fetched is not None
    assert cache.used_blocks == 4
    assert cache.arrived_LE.sum() == 0
    decision = cache.lookup(0, np.array([0]))
    assert cache.used_blocks == 8
    assert cache.prefetch(1, np.array([3])) is None
    with pytest.raises(BudgetError, match="cannot hold what layer 0 needs now"):
        cache.lookup(0, np.array([0, 1]))
    cache.loaded(0, decision.loads_N3)
    cache.used(0)
    again = cache.lookup(1, np.array([2]))  # what was prefetched is waited for, not read twice
    assert (again.misses, again.loaded_blocks) == (0, 0)
    cache.loaded(1, fetched.loads_N3)
    assert cache.arrived_LE[1, 2] == 4


def test_a_cancelled_read_frees_its_memory() -> None:
    cache = cache_of(8)
    cache.serve(1, np.array([2]), np.array([1]))
    fetched = cache.prefetch(1, np.array([2, 3]))
    assert fetched is not None
    assert cache.used_blocks == 8
    cache.cancel(1, fetched.loads_N3[:, 0])
    assert cache.used_blocks == 1
    assert cache.arrived_LE[1].tolist() == [0, 0, 1, 0]
    assert cache.pinned_LE.sum() == 0
    cache.loaded(1, fetched.loads_N3)  # arrives all the same: too late, its memory is another's
    assert cache.arrived_LE[1].tolist() == [0, 0, 1, 0]


def test_a_mistaken_prefetch_stays_only_until_it_has_arrived() -> None:
    cache = cache_of(8)
    fetched = cache.prefetch(1, np.array([2]))
    assert fetched is not None
    cache.lookup(1, np.array([0]))
    with pytest.raises(BudgetError):
        cache.lookup(1, np.array([0, 1]))
    cache.loaded(1, fetched.loads_N3)
    decision = cache.lookup(1, np.array([0, 1]))
    assert decision.evicted_N3.tolist() == [[1, 2, 0]]


def test_reads_of_one_expert_arrive_in_order() -> None:
    cache = cache_of(8)
    first = cache.prefetch(0, np.array([0]), np.array([2]))
    second = cache.lookup(0, np.array([0]), np.array([4]))
    assert first is not None
    assert second.loads_N3.tolist() == [[0, 2, 4]]
    cache.loaded(0, first.loads_N3)
    assert cache.arrived_LE[0, 0] == 2
    cache.loaded(0, second.loads_N3)
    assert cache.arrived_LE[0, 0] == 4


def test_a_refused_lookup_changes_nothing() -> None:
    cache = cache_of(4)
    cache.serve(0, np.array([0]), np.array([3]))
    with pytest.raises(BudgetError, match="takes 4 blocks more"):
        cache.lookup(1, np.array([1, 2]))
    assert cache.used_blocks == 3
    assert cache.arrived_LE[0, 0] == 3
    assert cache.pinned_LE.sum() == 0


def test_what_cannot_be_asked() -> None:
    with pytest.raises(BudgetError, match="holds nothing"):
        cache_of(0)
    with pytest.raises(ConfigError, match="make both from one shape"):
        ExpertCache(CacheShape(2, 4, 2), 8, LRU(SHAPE))
    with pytest.raises(ConfigError, match="expert 4 to 4"):
        cache_of(8).lookup(0, np.array([4]))
    with pytest.raises(ConfigError, match="blocks 5 to 5"):
        cache_of(8).lookup(0, np.array([1]), np.array([5]))


def test_no_expert_is_asked_for() -> None:
    decision = cache_of(8).lookup(0, np.array([], np.int64))
    assert (decision.misses, decision.loaded_blocks, len(decision.loads_N3)) == (0, 0, 0)
