"""Reads under way: from a decision of the cache until the cache knows that they arrived, or were taken back."""

from __future__ import annotations

import time
from collections.abc import Container, Sequence
from contextlib import suppress

import numpy as np

from coterie.checkpoint.store_layout import StoreLayout
from coterie.errors import CheckpointError, ConfigError, CoterieError
from coterie.offloading.evictions import Evictions, Key
from coterie.offloading.link import Link, Load, Room
from coterie.offloading.load_order import Rates
from coterie.offloading.memory import Memory
from coterie.offloading.stats import OffloadStats
from coterie.offloading.timeline import WAIT, Timeline
from coterie.policies.cache import Decision, ExpertCache


class Flights:
    """Carries out what the cache decides, and tells it how every read ends; for one caller at a time.

    The cache counts the memory of a read from the decision on. So whatever is started here is waited for or taken back,
    and memory is given to another expert only when no read can write there any more.

    Args:
        cache: told what has arrived, and what will not.
        memory: where experts are put.
        link: what brings them.
        layout: of the store.
        rates: told how fast reads are.
        stats: told of the most memory that is taken, and of waiting.
        timeout: seconds to wait for a read, or for the next piece of an expert, at most.
        timeline: told of every wait.

    Attributes:
        failed: why nothing can be started any more: a read that never ended, or the end; None: all is well.

    Raises:
        ConfigError: for a timeout that is not positive.
    """

    def __init__(
        self, cache: ExpertCache, memory: Memory, link: Link, layout: StoreLayout, rates: Rates, stats: OffloadStats,
        timeout: float = 60.0, timeline: Timeline | None = None,
    ) -> None:  # fmt: skip
        require_timeout(timeout)
        self._cache, self._memory, self._link, self._layout = cache, memory, link, layout
        self._rates, self._stats, self._timeout, self._timeline = rates, stats, timeout, timeline
        self._flying: dict[Key, list[Load]] = {}
        self._held: dict[Key, int] = {}  # blocks that have memory
        self._giving: dict[Key, list[Load]] = {}  # the loads whose reads give an expert's memory back
        self.failed: CoterieError | None = None

    @property
    def any(self) -> bool:
        """Whether there is a read of whose end the cache does not know."""
        return bool(self._flying)

    @property
    def idle(self) -> bool:
        """Whether no read is under way; some that have ended may be unknown to the cache yet."""
        return all(load.ended for loads in self._flying.values() for load in loads)

    def start(self, decision: Decision, order: Sequence[int]) -> None:
        """Carry out a decision: begin to read, the experts in this order; every read first gives memory back.

        Raises:
            CheckpointError: when a read that has to end before does not end in time.
        """
        if decision.loaded_blocks == 0:
            return
        loads = decision.loads_N3.tolist()
        self._await_evictions(decision.layer, [expert for expert, *_ in loads])
        evictions = Evictions(self._memory, decision.evicted_N3.tolist(), self._held)
        if not self._memory.shared:
            evictions.finish()
        self.note_peak()
        rank = {expert: number for number, expert in enumerate(order)}
        ordered = sorted(loads, key=lambda load: rank[load[0]])
        begun = [
            self._read(decision.layer, expert, first, end, evictions.room) for expert, first, end in ordered
        ]  # fmt: skip
        evictions.finish()
        for key in evictions.experts:  # an earlier decision's reads may still be giving back other parts of it
            self._giving[key] = [load for load in self._giving.get(key, ()) if not load.ended] + begun

    def fetch(self, layer: int, expert: int, blocks: int) -> None:
        """Read the first blocks of an expert, for which the cache has reserved memory, and wait for them.

        Raises:
            CheckpointError: as `wait_for`.
        """
        self._read(layer, expert, 0, blocks)
        self.wait_for(layer, expert)

    def is_here(self, layer: int, expert: int, blocks: int | None = None) -> bool:
        """Whether waiting for an expert, or its first `blocks` blocks, would take no time."""
        return all(load.has(blocks) for load in self._flying.get((layer, expert), ()))

    def wait_for(self, layer: int, expert: int, blocks: int | None = None) -> None:
        """Until an expert has arrived, and the cache knows; or until its first `blocks` blocks can be used.

        Raises:
            CheckpointError: when a read fails or does not end in time, or a block is corrupted.
        """
        loads = self._flying.get((layer, expert))
        if not loads or (blocks is not None and self.is_here(layer, expert, blocks)):
            return
        began = time.perf_counter()
        for load in loads:
            self._end(load, blocks)
        ended = time.perf_counter()
        self._stats.exposed_seconds += ended - began
        if self._timeline is not None:
            self._timeline.add(WAIT, f"layer {layer} expert {expert}", began, ended)
        if blocks is not None:
            return
        self._cache.loaded(layer, np.array([(expert, load.first, load.end) for load in loads]))
        del self._flying[layer, expert]
        self._rates.loaded(self._link.loaded_bytes, self._link.busy_seconds)

    def finish(self, layer: int, expert: int) -> None:
        """An expert has computed: what still comes of it nobody waits for.

        Raises:
            CheckpointError: as `wait_for`.
        """
        if self.is_here(layer, expert):
            self.wait_for(layer, expert)
        else:
            self._take_back(layer, expert)

    def keep_only(self, layer: int, experts: Container[int]) -> None:
        """Take back all reads but those of these experts of a layer.

        Raises:
            CheckpointError: when one does not end in time.
        """
        for key in list(self._flying):
            if key[0] != layer or key[1] not in experts:
                self._take_back(*key)

    def abandon(self) -> None:
        """After an error: let no read go on into memory that something else may get, and free what did not arrive."""
        for key in list(self._flying):
            with suppress(CheckpointError):
                self._take_back(*key)
        self._flying.clear()
        self._cache.pinned_LE[:] = 0

    def close(self) -> None:
        """End the link's threads and give the memory back; nothing can be started afterwards."""
        for load in (load for loads in self._flying.values() for load in loads):
            load.cancel()
        self._link.close()
        if self.failed is None:  # else a read that never ended may still write
            self._memory.clear()
            self.failed = ConfigError("the offloaded model was closed; make it again")

    def note_peak(self) -> None:
        """Count the memory that is taken now."""
        taken = self._cache.used_blocks * self._layout.block_bytes + self._memory.beside_bytes
        self._stats.peak_expert_bytes = max(self._stats.peak_expert_bytes, taken)

    def _await_evictions(self, layer: int, experts: Sequence[int]) -> None:
        """What is read into again must have been given back before."""
        for expert in experts:
            for load in self._giving.pop((layer, expert), ()):
                with suppress(CheckpointError):  # its own error is told where it is waited for
                    self._end(load)
                if self.failed is not None:
                    raise self.failed

    def _read(self, layer: int, expert: int, first: int, end: int, room: Room | None = None) -> Load:
        load = self._link.read(layer, expert, first, end, self._memory.buffer(layer, expert, first, end), room)
        self._flying.setdefault((layer, expert), []).append(load)
        self._held[layer, expert] = end
        return load

    def _end(self, load: Load, blocks: int | None = None) -> None:
        """Wait for a load, see `Load.wait`; one that does not end makes the model unusable: it may still write."""
        try:
            load.wait(self._timeout if self.failed is None else 0, blocks)
        except CheckpointError as error:
            if not load.ended:
                self.failed = self.failed or error
            raise

    def _take_back(self, layer: int, expert: int) -> None:
        """End an expert's loads, keep what arrived before the first that did not, and free the rest."""
        loads = self._flying.pop((layer, expert))
        for load in loads:
            if not load.ended:
                load.cancel()
        try:
            for load in loads:
                self._end(load)
                if load.cancelled:
                    break
                self._cache.loaded(layer, np.array([(expert, load.first, load.end)]))
        except CheckpointError:
            if self.failed is not None:
                raise  # otherwise the block is read, and told, again when something needs it
        self._cache.cancel(layer, np.array([expert]))
        self._held[layer, expert] = int(self._cache.arrived_LE[layer, expert])
        self._memory.evict(layer, expert, self._held[layer, expert])


def require_timeout(timeout: float) -> None:
    """Refuse one that leaves no time to read.

    Raises:
        ConfigError: when it is not positive.
    """
    if not timeout > 0:
        raise ConfigError(f"timeout = {timeout}; it must be positive")
