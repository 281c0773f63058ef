"""Ranks as threads of one process: what processes do, without processes, for tests and for looking at one rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from queue import Queue
from typing import TypeVar

import torch
from torch import Tensor

from coterie.parallel.comms import Comms

Result = TypeVar("Result")
_SECONDS = 60.0


class ThreadComms:
    """One rank of `run_ranks`; see `Comms`."""

    def __init__(self, rank: int, size: int, boxes: dict[tuple[int, int], Queue[Tensor | None]]) -> None:
        self.rank, self.size, self.device = rank, size, torch.device("cpu")
        self.sent_bytes_G = [0] * size
        self._boxes = boxes

    def exchange(
        self, send_NB: Tensor, send_counts: Sequence[int], receive_NB: Tensor, receive_counts: Sequence[int]
    ) -> None:
        """See `Comms.exchange`."""
        assert send_counts[self.rank] == receive_counts[self.rank] == 0, "own rows do not travel"
        assert send_NB.is_contiguous(), "as torch.distributed wants it"
        assert receive_NB.is_contiguous(), "as torch.distributed wants it"
        for rank, part in enumerate(_parts(send_counts)):
            if rank != self.rank:
                rows = send_NB[part]
                self.sent_bytes_G[rank] += rows.numel() * rows.element_size()
                self._boxes[self.rank, rank].put(rows.clone())
        for rank, part in enumerate(_parts(receive_counts)):
            if rank != self.rank:
                arrived = self._boxes[rank, self.rank].get(timeout=_SECONDS)
                if arrived is None:
                    raise RuntimeError(f"rank {rank} ended")
                assert len(arrived) == receive_counts[rank], f"rank {rank} sent {len(arrived)} rows"
                receive_NB[part] = arrived


def _parts(counts: Sequence[int]) -> list[slice]:
    """Where each rank's rows are."""
    ends = list(accumulate(counts))
    return [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]


def run_ranks(size: int, work: Callable[[Comms], Result]) -> list[Result]:
    """Call `work` once for each rank, all at the same time; returns what they returned.

    Raises:
        Exception: the first that a rank raised; the ranks that wait for it end with it.
    """
    boxes: dict[tuple[int, int], Queue[Tensor | None]] = {(a, b): Queue() for a in range(size) for b in range(size)}
    lock, failed = threading.Lock(), list[BaseException]()

    def one(rank: int) -> Result | None:
        try:
            return work(ThreadComms(rank, size, boxes))
        except BaseException as error:
            with lock:
                failed.append(error)
            for other in range(size):
                boxes[rank, other].put(None)
            return None

    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(one, range(size)))
    if failed:
        raise failed[0]
    return results  # type: ignore[return-value]
