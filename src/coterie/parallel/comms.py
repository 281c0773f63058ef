"""What the runtime needs of the processes it runs in: one primitive, and things said to everyone on top of it.

Shapes: G ranks, N rows, B elements of a row.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Comms(Protocol):
    """The ranks of a group, seen from one of them; rank g is device g of the topology.

    Attributes:
        rank: this one, from 0.
        size: how many there are.
        device: where tensors that are exchanged must be.
        sent_bytes_G: bytes handed to the network for each rank so far, whatever they were for.
    """

    rank: int
    size: int
    device: torch.device
    sent_bytes_G: list[int]

    def exchange(
        self, send_NB: Tensor, send_counts: Sequence[int], receive_NB: Tensor, receive_counts: Sequence[int]
    ) -> None:
        """Rows to every other rank, and rows from it; every rank takes part, in the same order of calls.

        Args:
            send_NB: rows by rising rank of their destination, contiguous.
            send_counts: [G] how many go to each; 0 for this rank.
            receive_NB: filled with the rows that arrive, by rising rank of their source; contiguous.
            receive_counts: [G] how many each sends here; 0 for this rank.

        Raises:
            RankError: when another rank ended, or did not answer in time.
        """
        ...


def others(comms: Comms) -> list[int]:
    """Every rank but this one, rising."""
    return [rank for rank in range(comms.size) if rank != comms.rank]


def swap_rows(comms: Comms, rows_GB: Tensor) -> Tensor:
    """Row g to rank g; returns the rows that the others sent here, [G, B], and this rank's own in its place."""
    away = others(comms)
    counts = [int(rank != comms.rank) for rank in range(comms.size)]
    arrived = torch.empty((len(away), *rows_GB.shape[1:]), dtype=rows_GB.dtype, device=comms.device)
    comms.exchange(rows_GB[away].to(comms.device), counts, arrived, counts)
    result = rows_GB.to(comms.device, copy=True)
    result[away] = arrived
    return result


def share(comms: Comms, value: Any) -> list[Any]:
    """What every rank has to say, by rank; values are what JSON holds."""
    text = json.dumps(value).encode()
    lengths = torch.full((comms.size, 1), len(text), dtype=torch.int64)
    counts = [int(length) for length in swap_rows(comms, lengths)[:, 0]]
    away = others(comms)
    own = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    arrived = torch.empty(sum(counts[rank] for rank in away), dtype=torch.uint8, device=comms.device)
    comms.exchange(
        own.repeat(len(away)).to(comms.device), _without(comms.rank, [len(text)] * comms.size),
        arrived, _without(comms.rank, counts),
    )  # fmt: skip
    heard, said = arrived.cpu().numpy().tobytes(), {comms.rank: text}
    for rank in away:
        said[rank], heard = heard[: counts[rank]], heard[counts[rank] :]
    return [json.loads(said[rank]) for rank in range(comms.size)]


def _without(rank: int, counts: list[int]) -> list[int]:
    return [0 if each == rank else count for each, count in enumerate(counts)]
