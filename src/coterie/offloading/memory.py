"""Where experts live while they are in memory: one place each in address space, pages behind what is resident alone.

Address space costs nothing, so every expert has room for all of itself, a prefix of which has pages: prefixes of any
width lie contiguous, grow in place, and give their tails back to the system. Nothing is lost to fragmentation.
"""

from __future__ import annotations

import mmap
from typing import Protocol

import torch
from torch import Tensor

from coterie.checkpoint.store_layout import PARTS, StoreLayout
from coterie.errors import BudgetError

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I8": torch.int8,
}  # fmt: skip


class Memory(Protocol):
    """What the runtime asks of wherever experts live.

    Attributes:
        beside_bytes: what it takes of the budget beside the experts.
        gathered_bytes: what it copied so far to have experts in one piece.
        shared: whether the link's threads may evict.
        piecewise: whether an expert's first blocks can be computed while others arrive.
    """

    shared: bool
    piecewise: bool
    beside_bytes: int
    gathered_bytes: int

    def record(self, layer: int, expert: int) -> Tensor:
        """[at least its resident neurons, 3, H]; only those may be used, until the next call."""

    def buffer(self, layer: int, expert: int, first: int, end: int) -> memoryview | None:
        """Room for the blocks from `first` to before `end`; None where the link knows it."""

    def evict(self, layer: int, expert: int, blocks: int) -> None:
        """Give back all but the first `blocks` blocks."""

    def clear(self) -> None:
        """Give back everything."""


class ExpertMemory:
    """Memory for the records of a store.

    Args:
        layout: of the store.
        poison: overwrite what is evicted or about to be read with bytes that are NaN, so that using it shows.

    Raises:
        BudgetError: when the system grants no such address space.
    """

    def __init__(self, layout: StoreLayout, poison: bool = False) -> None:
        self._layout, self._poison = layout, poison
        self.beside_bytes = self.gathered_bytes = 0
        self.shared = self.piecewise = True
        try:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
            self._memory = mmap.mmap(-1, layout.total_bytes, flags=flags)
        except OSError as error:
            raise BudgetError(
                f"the system grants no {layout.total_bytes:,} bytes of address space ({error.strerror}); raise ulimit "
                "-v, or set vm.overcommit_memory to 0"
            ) from error
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            self._advise(mmap.MADV_NOHUGEPAGE, 0, layout.total_bytes)  # a huge page would stay when half is evicted
        self._bytes = memoryview(self._memory)
        self._records: dict[tuple[int, int], Tensor] = {}

    def record(self, layer: int, expert: int) -> Tensor:
        """[I, 3, H], a view; only its resident prefix may be used."""
        key = (layer, expert)
        if key not in self._records:
            layout, dtype = self._layout, TYPES[self._layout.dtype]
            shape = (layout.width, PARTS, layout.hidden_size)
            count, offset = layout.width * PARTS * layout.hidden_size, layout.offset(layer, expert)
            self._records[key] = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset).view(shape)
        return self._records[key]

    def buffer(self, layer: int, expert: int, first: int, end: int) -> memoryview:
        """The bytes of the blocks from `first` to before `end`, to read into."""
        start, nbytes = self._layout.span(first, end)
        start += self._layout.offset(layer, expert)
        into = self._bytes[start : start + nbytes]
        if self._poison:
            into[:] = b"\xff" * nbytes
        return into

    def evict(self, layer: int, expert: int, blocks: int) -> None:
        """Give back the pages of all but the first `blocks` blocks."""
        start, nbytes = self._layout.span(blocks, self._layout.blocks)
        if nbytes == 0:
            return
        start += self._layout.offset(layer, expert)
        if self._poison:
            self._bytes[start : start + nbytes] = b"\xff" * nbytes
        else:
            self._advise(mmap.MADV_DONTNEED, start, nbytes)

    def clear(self) -> None:
        """Give back all pages."""
        self._advise(mmap.MADV_DONTNEED, 0, self._layout.total_bytes)

    def _advise(self, what: int, start: int, nbytes: int) -> None:
        page = mmap.PAGESIZE  # larger than 4,096 on some machines: what lies within whole pages
        first, end = -(-start // page) * page, (start + nbytes) // page * page
        if start + nbytes == self._layout.total_bytes:
            end = -(-(start + nbytes) // page) * page
        if end > first:
            self._memory.madvise(what, first, min(end, len(self._memory)) - first)
