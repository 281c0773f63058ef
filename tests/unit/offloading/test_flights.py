"""Reads under way, on a link whose reads end when the test says so: what the cache hears of how each one ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from coterie.errors import CheckpointError, ConfigError
from coterie.offloading.stats import OffloadStats
from coterie.policies.cache import ExpertCache
from coterie.policies.eviction import CacheShape
from coterie.policies.registry import make_policy

pytestmark = pytest.mark.needs("transformers")


@dataclass
class Setting:
    """Flights over the small store, their cache, and the gate that every read waits at."""

    flights: Any
    cache: ExpertCache
    stats: OffloadStats
    block_bytes: int
    gate: threading.Event = field(default_factory=threading.Event)

    def ask(self, layer: int, expert: int, blocks: int) -> None:
        """The layer needs this expert, which is started."""
        self.flights.start(self.cache.lookup(layer, np.array([expert]), np.array([blocks])), [expert])


@pytest.fixture
def make(small: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes settings of so many blocks; reads are open when the test ends."""
    from coterie.checkpoint.expert_store import open_store
    from coterie.offloading.flights import Flights
    from coterie.offloading.link import Link
    from coterie.offloading.load_order import Rates
    from coterie.offloading.memory import ExpertMemory

    store, made = open_store(small.store), list[Setting]()
    shape, real = CacheShape(2, 8, store.layout.blocks), Link.fill

    def fill(link: Any, into: memoryview, offset: int) -> None:
        assert made[-1].gate.wait(20)
        real(link, into, offset)

    monkeypatch.setattr(Link, "fill", fill)

    def call(blocks: int = 32, timeout: float = 20.0) -> Setting:
        cache, stats = ExpertCache(shape, blocks, make_policy("lru", shape)), OffloadStats("lru", "fifo", 0)
        link, memory = Link(store, threads=1), ExpertMemory(store.layout, poison=True)
        flights = Flights(cache, memory, link, store.layout, Rates(), stats, timeout)
        made.append(Setting(flights, cache, stats, store.layout.block_bytes))
        return made[-1]

    yield call
    for each in made:
        each.gate.set()
        each.flights.close()


def test_what_is_waited_for_is_known_to_the_cache(make: Any) -> None:
    setting = make()
    setting.ask(0, 3, 5)
    assert setting.stats.peak_expert_bytes == 5 * setting.block_bytes, "counted when it is begun"
    assert not setting.flights.idle
    assert not setting.flights.is_here(0, 3)
    assert setting.cache.arrived_LE[0, 3] == 0
    threading.Timer(0.05, setting.gate.set).start()
    setting.flights.wait_for(0, 3)
    assert setting.cache.arrived_LE[0, 3] == 5
    assert setting.stats.exposed_seconds > 0.03
    assert setting.flights.idle
    assert setting.flights.is_here(0, 3)


def test_a_read_taken_back_frees_its_memory(make: Any) -> None:
    setting = make()
    setting.ask(0, 3, 5)
    setting.ask(1, 2, 4)
    threading.Timer(0.05, setting.gate.set).start()
    setting.flights.keep_only(1, [2])
    assert setting.cache.reserved_LE[0, 3] == setting.cache.arrived_LE[0, 3] == 0
    setting.flights.wait_for(1, 2)
    assert setting.cache.arrived_LE[1, 2] == setting.cache.used_blocks == 4
    setting.ask(0, 3, 5)
    setting.flights.wait_for(0, 3)
    setting.flights.keep_only(0, [])  # it has arrived, and stays
    assert setting.cache.arrived_LE[0, 3] == 5


def test_a_read_that_never_ends_is_the_end(make: Any) -> None:
    setting = make(timeout=0.05)
    setting.ask(0, 3, 5)
    with pytest.raises(CheckpointError, match=r"layer 0, expert 3 has not ended after 0\.05 s"):
        setting.flights.wait_for(0, 3)
    assert isinstance(setting.flights.failed, CheckpointError)
    setting.flights.abandon()
    assert setting.flights.idle
    assert setting.cache.used_blocks == 5, "the read may still write there"
    assert not setting.cache.pinned_LE.any()
    setting.flights.close()
    assert isinstance(setting.flights.failed, CheckpointError), "and that stays what is told"


def test_closing_is_told_and_a_timeout_is_positive(make: Any) -> None:
    setting = make()
    setting.flights.close()
    assert "was closed" in str(setting.flights.failed)
    with pytest.raises(ConfigError, match="timeout = 0; it must be positive"):
        make(timeout=0)


def test_what_is_being_given_back_is_not_read_into_before(make: Any) -> None:
    blocks = make().cache.shape.blocks
    setting = make(2 * blocks, timeout=0.3)
    setting.gate.set()
    for expert in (3, 4):
        setting.ask(0, expert, blocks)
        setting.flights.wait_for(0, expert)
        setting.cache.used(0)
    setting.gate.clear()
    setting.ask(1, 5, blocks)  # in the place of expert 3, by a read that does not end
    setting.cache.used(1)
    with pytest.raises(CheckpointError, match="expert 5 has not ended"):
        setting.ask(0, 3, blocks)
