"""Where experts live on a device: blocks of one size in one piece of memory, any free ones for any expert.

Blocks of equal size leave no holes too small to use, so nothing is lost to fragmentation. Computing wants an expert's
prefix in one piece: new blocks go side by side where there is room, and an expert that is scattered all the same is
copied together first, within the device, into room for one expert that the budget pays for. A scattered expert so costs
one more read and write of its bytes at the device's own rate, tens of times that of the link they came over.
"""

from __future__ import annotations

import threading
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.checkpoint.store_layout import PARTS, StoreLayout
from coterie.offloading.device import Device, Event
from coterie.offloading.memory import TYPES


class DeviceMemory:
    """Memory for as many blocks as a cache may hold, on a device.

    Args:
        layout: of the store.
        device: the device.
        blocks: that the cache may hold at once.
        longest: blocks that an expert runs at most.
        beside_bytes: what else the budget pays for, beside the room for one expert: staging.
        poison: overwrite what is evicted with bytes that are NaN, so that using it shows.

    Raises:
        BudgetError: when the device does not grant it.
    """

    def __init__(
        self,
        layout: StoreLayout,
        device: Device,
        blocks: int,
        longest: int,
        beside_bytes: int = 0,
        poison: bool = False,
    ) -> None:
        self._layout, self._device = layout, device
        with torch.inference_mode(False):  # else only threads in inference mode could write to it
            whole = device.empty((blocks + longest) * layout.block_bytes)
            self._pool = whole.view(blocks + longest, layout.block_bytes)
            self._rows = whole.view(TYPES[layout.dtype]).view(-1, PARTS, layout.hidden_size)
            self._scratch = self._rows[blocks * layout.block_neurons :]
            self._poison = torch.full_like(self._pool[0], 255) if poison else None
            if poison:
                whole.fill_(255)
        device.copy_after(device.computed())
        self._lock = threading.Lock()
        self._free_S: NDArray[np.bool_] = np.ones(blocks, np.bool_)
        self._slots: dict[tuple[int, int], list[int]] = {}
        self._arriving: dict[tuple[int, int], list[Event]] = {}
        self.shared = False  # a block must be free before it is given to another expert
        self.piecewise = False  # a scattered expert would be gathered again for every piece
        self.beside_bytes = longest * layout.block_bytes + beside_bytes
        self.gathered_bytes = 0

    def record(self, layer: int, expert: int) -> Tensor:
        """[n, 3, H], its resident neurons, in one piece until the next call; computing waits for their copies."""
        with self._lock:
            slots, arriving = self._slots[layer, expert], self._arriving.pop((layer, expert), [])
        for event in arriving:
            self._device.compute_after(event)
        neurons, start = self._layout.block_neurons, slots[0]
        runs = _runs(slots)
        if len(runs) == 1:
            return self._rows[start * neurons : (start + len(slots)) * neurons]
        done = 0
        for first, count in runs:
            piece = self._rows[first * neurons : (first + count) * neurons]
            self._scratch[done : done + len(piece)].copy_(piece)
            done += len(piece)
        self.gathered_bytes += len(slots) * self._layout.block_bytes
        return self._scratch[:done]

    def buffer(self, layer: int, expert: int, first: int, end: int) -> None:
        """Room for the blocks from `first` to before `end`; `put` fills it."""
        with self._lock:
            slots = self._slots.setdefault((layer, expert), [])
            assert len(slots) == first, "prefixes grow at their end"
            slots.extend(self._take(end - first, slots[-1] + 1 if slots else 0))

    def put(self, layer: int, expert: int, first: int, end: int, data: Tensor) -> Event:
        """Issue the copy of these blocks from the host's `data`, [bytes] uint8; the event is behind it."""
        with self._lock:
            slots = self._slots[layer, expert][first:end]
        base, _ = self._layout.span(first, end)
        done, event = first, None
        for start, count in _runs(slots):
            offset, nbytes = self._layout.span(done, done + count)
            into = self._pool[start : start + count].view(-1)[:nbytes]
            event = self._device.copy(into, data[offset - base : offset - base + nbytes])
            done += count
        assert event is not None, "at least one block"
        with self._lock:
            self._arriving.setdefault((layer, expert), []).append(event)
        return event

    def evict(self, layer: int, expert: int, blocks: int) -> None:
        """Free all but the first `blocks` blocks; what is copied there later waits for what computes with them now."""
        with self._lock:
            slots = self._slots.get((layer, expert), [])
            gone = slots[blocks:]
            del slots[blocks:]
            self._free_S[gone] = True
        if not gone:
            return
        self._device.copy_after(self._device.computed())
        if self._poison is not None:
            for slot in gone:
                self._device.copy(self._pool[slot], self._poison)

    def clear(self) -> None:
        """Give everything back; nothing can be computed afterwards."""
        for event in (event for events in self._arriving.values() for event in events):
            self._device.compute_after(event)  # memory may be another's when computing has come so far
        self._slots.clear()
        self._arriving.clear()
        self._pool = self._rows = self._scratch = self._pool[:0]

    def _take(self, count: int, after: int) -> list[int]:
        """Free slots: the ones behind an expert's last if they are, else the shortest free run that is long enough."""
        free_S = self._free_S
        if after + count <= len(free_S) and free_S[after : after + count].all():
            found = np.arange(after, after + count)
        else:
            edges = np.flatnonzero(np.diff(np.concatenate([[False], free_S, [False]]).astype(np.int8)))
            starts, lengths = edges[::2], edges[1::2] - edges[::2]
            enough = np.flatnonzero(lengths >= count)
            if len(enough):
                start = starts[enough[lengths[enough].argmin()]]
                found = np.arange(start, start + count)
            else:
                found = np.flatnonzero(free_S)[:count]
        assert len(found) == count, "the cache never holds more blocks than there are"
        free_S[found] = False
        return [int(slot) for slot in found]


def _runs(slots: list[int]) -> list[tuple[int, int]]:
    """Slots as (first, count) of runs of consecutive ones, in their order."""
    cuts = [0, *(index for index, (a, b) in enumerate(pairwise(slots), 1) if b != a + 1), len(slots)]
    return [(slots[start], end - start) for start, end in pairwise(cuts) if end > start]
