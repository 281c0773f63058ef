"""From disk through the host to a device: blocks are read into pinned buffers, checked there, and copied on.

A buffer is read into again once its copy has ended; computing waits for copies by events on the device, not here.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from coterie.checkpoint.expert_store import ExpertStore
from coterie.checkpoint.store_layout import StoreLayout
from coterie.errors import CheckpointError
from coterie.offloading.device import Device, Event, wait_for
from coterie.offloading.device_memory import DeviceMemory
from coterie.offloading.link import Link, Read, blocks_a_read
from coterie.offloading.timeline import Timeline

_BUFFERS_A_THREAD = 2  # one is copied from while the other is read into


@dataclass
class _Buffer:
    memory: Tensor
    copied: Event | None = None


def staging_bytes(layout: StoreLayout, threads: int) -> int:
    """Pinned memory of the host that a link of so many threads takes."""
    return threads * _BUFFERS_A_THREAD * blocks_a_read(layout) * layout.block_bytes


class DeviceLink(Link):
    """Reads blocks of a store into a device's memory. Experimental: it has not run on a GPU yet.

    Args:
        store: the store.
        memory: where the blocks go.
        device: its device.
        threads: that read.
        direct: use O_DIRECT where it works; without it the page cache may hold what was read before.
        bandwidth: as for `Link`: of an emulated disk.
        timeline: told of every read; copies are not in it.
        timeout: seconds that a copy may take.

    Raises:
        BudgetError: when the system grants no pinned memory.
        CheckpointError: when the file cannot be opened.
        ConfigError: as for `Link`.
    """

    def __init__(
        self, store: ExpertStore, memory: DeviceMemory, device: Device, threads: int = 2, direct: bool = True,
        bandwidth: float | None = None, timeline: Timeline | None = None, timeout: float = 60.0,
    ) -> None:  # fmt: skip
        self._memory, self._timeout = memory, timeout
        self._buffers: queue.SimpleQueue[_Buffer] = queue.SimpleQueue()
        nbytes = blocks_a_read(store.layout) * store.layout.block_bytes
        for _ in range(max(0, threads) * _BUFFERS_A_THREAD):
            self._buffers.put(_Buffer(device.pinned(nbytes)))
        super().__init__(store, threads, direct, bandwidth, timeline)

    @contextmanager
    def landing(self, read: Read) -> Iterator[memoryview]:
        """A staging buffer, copied on to the device when the block ends well."""
        buffer = self._take()
        nbytes, load = self._store.layout.span(read.first, read.end)[1], read.load
        try:
            whole: Any = buffer.memory.numpy()
            yield memoryview(whole)[:nbytes]
            buffer.copied = self._memory.put(load.layer, load.expert, read.first, read.end, buffer.memory[:nbytes])
        finally:
            self._buffers.put(buffer)

    def _take(self) -> _Buffer:
        """A buffer that nothing is copied from any more."""
        try:
            buffer = self._buffers.get(timeout=self._timeout)
        except queue.Empty:
            raise CheckpointError(f"no staging buffer came free within {self._timeout:g} s; check the device") from None
        if buffer.copied is not None:
            try:
                wait_for(buffer.copied, self._timeout)
            except CheckpointError:
                self._buffers.put(buffer)
                raise
            buffer.copied = None
        return buffer
