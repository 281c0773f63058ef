"""From disk to memory: reads of blocks by a few threads, checked once, each ended or given up within a limit."""

from __future__ import annotations

import errno
import os
import queue
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from coterie.checkpoint.expert_store import ExpertStore
from coterie.checkpoint.store_layout import StoreLayout
from coterie.errors import CheckpointError, ConfigError
from coterie.offloading.timeline import LINK, Timeline

_READ_BYTES = 4 * 2**20  # larger ones gain nothing, and a reader in turn keeps the first expert first
_ATTEMPTS = 2


class Load:
    """Blocks on their way; done when all have arrived, or one could not.

    Attributes:
        here: the blocks before this one have arrived, and been checked.
        ended: whether no read of it is under way any more.
    """

    def __init__(self, layer: int, expert: int, first: int, end: int) -> None:
        self.layer, self.expert, self.first, self.end = layer, expert, first, end
        self.here, self.ended = first, False
        self.error: CheckpointError | None = None
        self.cancelled = False
        self._changed = threading.Condition()
        self._parts = 0
        self._early: dict[int, int] = {}  # parts that arrived before one in front of them: first block, end

    def cancel(self) -> None:
        """Begin no more of its reads; it ends with the one under way, and none of it counts as arrived."""
        self.cancelled = True

    def has(self, blocks: int | None) -> bool:
        """Whether those of its blocks that are among an expert's first `blocks` are here; None: whether it ended."""
        return self.ended if blocks is None else self.here >= min(blocks, self.end)

    def wait(self, timeout: float, blocks: int | None = None) -> None:
        """Wait until it has ended, at most `timeout` seconds.

        Args:
            timeout: seconds.
            blocks: wait only for what it brings of the expert's first so many blocks.

        Raises:
            CheckpointError: when it failed, or did not end in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.ended or self.has(blocks), timeout):
                raise CheckpointError(
                    f"reading layer {self.layer}, expert {self.expert} has not ended after {timeout:g} s; the disk "
                    "stalls: check it, or allow more with timeout"
                )
        if self.error is not None and (blocks is None or not self.has(blocks)):
            raise self.error

    def expect(self, parts: int) -> None:
        """It will come in so many parts."""
        self._parts = parts

    def part_ended(self, first: int, end: int, error: CheckpointError | None = None, arrived: bool = True) -> None:
        """The part from block `first` to before `end` has ended, well if it arrived and there is no error."""
        with self._changed:
            self.error = self.error or error
            if arrived and error is None:
                self._early[first] = end
                while (after := self._early.pop(self.here, None)) is not None:
                    self.here = after
            self._parts -= 1
            self.ended = self._parts == 0
            self._changed.notify_all()


Room = Callable[[int], Callable[[], None]]
"""(blocks that a read takes) -> what makes room for them."""


@dataclass(frozen=True)
class Read:
    """One read: whole blocks of one load; `into` is None where the link has a place of its own."""

    load: Load
    first: int
    end: int
    into: memoryview | None
    make_room: Callable[[], None] | None = None


def blocks_a_read(layout: StoreLayout) -> int:
    """The most blocks in one read; reads end at multiples of it, or where the load does."""
    return min(layout.blocks, max(1, _READ_BYTES // layout.block_bytes))


class Link:
    """Reads blocks of a store into memory, in the order in which they are asked for.

    O_DIRECT keeps the page cache out, whose copies would be memory beyond the budget; where the file system refuses it,
    that is said once, and pages are dropped after they were read.

    Args:
        store: the store.
        threads: that read.
        direct: use O_DIRECT where it works.
        bandwidth: bytes per second of an emulated link, slower than the real one; None: as fast as it is.
        timeline: told of every read.

    Raises:
        CheckpointError: when the file cannot be opened.
        ConfigError: for less than one thread, or a bandwidth that is not positive.
    """

    def __init__(
        self, store: ExpertStore, threads: int = 2, direct: bool = True, bandwidth: float | None = None,
        timeline: Timeline | None = None,
    ) -> None:  # fmt: skip
        if threads < 1 or (bandwidth is not None and not bandwidth > 0):
            raise ConfigError(f"{threads} threads at a bandwidth of {bandwidth}; both must be positive")
        self._store, self._bandwidth, self._timeline = store, bandwidth, timeline
        self._checked_LEB = np.zeros(store.checksums_LEB.shape, np.bool_)
        self._queue: queue.SimpleQueue[Read | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._active, self._since, self._free_at = 0, 0.0, 0.0
        self.busy_seconds, self.loaded_bytes = 0.0, 0
        self.direct = direct and hasattr(os, "O_DIRECT")
        self._file = self._open()
        # daemons: a read that the disk never ends must not keep the process
        self._threads = [threading.Thread(target=self._work, daemon=True, name="coterie-link") for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def read(
        self, layer: int, expert: int, first: int, end: int, into: memoryview | None, room: Room | None = None
    ) -> Load:  # fmt: skip
        """Begin to read the blocks from `first` to before `end` of an expert.

        Args:
            layer: MoE layer.
            expert: the expert.
            first: the first block.
            end: one past the last.
            into: where they go, aligned, as long as `StoreLayout.span` says; None: where the link itself puts them.
            room: asked once for each part's blocks, in order; what it returns is called by the thread that reads the
                part, before it reads, also when the load was cancelled meanwhile.
        """
        layout, load = self._store.layout, Load(layer, expert, first, end)
        step = blocks_a_read(layout)
        base, _ = layout.span(first, end)
        reads = []
        start = first
        while start < end:
            stop = min(start + step - start % step, end)
            offset, nbytes = layout.span(start, stop)
            part = None if into is None else into[offset - base : offset - base + nbytes]
            reads.append(Read(load, start, stop, part, None if room is None else room(stop - start)))
            start = stop
        load.expect(len(reads))
        for each in reads:
            self._queue.put(each)
        return load

    def close(self) -> None:
        """End the threads, once what they are reading has arrived."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(timeout=1)
        if not any(thread.is_alive() for thread in self._threads) and self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _work(self) -> None:
        while (each := self._queue.get()) is not None:
            error, wanted = None, True
            try:
                if each.make_room is not None:
                    each.make_room()
                wanted = each.load.error is None and not each.load.cancelled
                if wanted:
                    self._transfer(each)
            except CheckpointError as reason:
                error = reason
            except Exception as reason:  # whatever it is, somebody waits for this read
                error = CheckpointError(f"cannot read {self._store.experts_file}: {reason}")
            each.load.part_ended(each.first, each.end, error, wanted)

    @contextmanager
    def landing(self, read: Read) -> Iterator[memoryview]:
        """Where a read puts its bytes, to be checked there before the block ends."""
        assert read.into is not None, "this link reads straight to where the caller says"
        yield read.into

    def _transfer(self, each: Read) -> None:
        with self.landing(each) as into:
            self._fetch(each, into)

    def _fetch(self, each: Read, into: memoryview) -> None:
        layout, load = self._store.layout, each.load
        start, nbytes = layout.span(each.first, each.end)
        offset = layout.offset(load.layer, load.expert) + start
        began = self._begin()
        try:
            self._read_retrying(each, into, offset)
            self._throttle(began, nbytes)
        finally:
            ended = self._finish(nbytes)
        if self._timeline is not None:
            name = f"layer {load.layer} expert {load.expert}"
            self._timeline.add(LINK, name, began, ended, bytes=nbytes, first_block=each.first, end_block=each.end)
        for block in range(each.first, each.end):
            if not self._checked_LEB[load.layer, load.expert, block]:
                own, size = layout.span(block, block + 1)
                self._store.check_block(load.layer, load.expert, block, into[own - start : own - start + size])
                self._checked_LEB[load.layer, load.expert, block] = True

    def _read_retrying(self, each: Read, into: memoryview, offset: int) -> None:
        for attempt in range(_ATTEMPTS):
            try:
                self.fill(into, offset)
                return
            except OSError as error:
                if error.errno == errno.EINVAL and self.direct:
                    self._fall_back(error)
                elif attempt + 1 == _ATTEMPTS:
                    raise CheckpointError(
                        f"cannot read layer {each.load.layer}, expert {each.load.expert} of "
                        f"{self._store.experts_file}: {error.strerror or error}; check the disk"
                    ) from error

    def fill(self, into: memoryview, offset: int) -> None:
        """Read as many bytes as `into` holds, from `offset` of the file.

        Raises:
            OSError: what the disk says.
            CheckpointError: when the file ends before.
        """
        done = 0
        while done < len(into):
            count = os.preadv(self._file, [into[done:]], offset + done)
            if count == 0:
                raise CheckpointError(f"{self._store.experts_file} became shorter; pack the model again")
            done += count
        if not self.direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file, offset, len(into), os.POSIX_FADV_DONTNEED)

    def _open(self) -> int:
        flags = os.O_RDONLY | (os.O_DIRECT if self.direct else 0)
        try:
            return os.open(self._store.experts_file, flags)
        except OSError as error:
            if self.direct and error.errno == errno.EINVAL:
                self._say_buffered(error)
                self.direct = False
                return self._open()
            raise CheckpointError(f"cannot open {self._store.experts_file}: {error.strerror}") from error

    def _fall_back(self, error: OSError) -> None:
        with self._lock:
            if self.direct:
                self._say_buffered(error)
                self.direct = False
                self._file = self._open()

    def _say_buffered(self, error: OSError) -> None:
        warnings.warn(
            f"{self._store.folder} is on a file system without direct reads ({error.strerror}); reading through the "
            "page cache instead",
            stacklevel=2,
        )

    def _throttle(self, began: float, nbytes: int) -> None:
        """Hold an emulated link busy as long as its bandwidth says; it serves one read after another."""
        if self._bandwidth is None:
            return
        with self._lock:
            self._free_at = max(self._free_at, began) + nbytes / self._bandwidth
            until = self._free_at
        time.sleep(max(0.0, until - time.perf_counter()))

    def _begin(self) -> float:
        now = time.perf_counter()
        with self._lock:
            if self._active == 0:
                self._since = now
            self._active += 1
        return now

    def _finish(self, nbytes: int) -> float:
        now = time.perf_counter()
        with self._lock:
            self._active -= 1
            self.loaded_bytes += nbytes
            if self._active == 0:
                self.busy_seconds += now - self._since
        return now
