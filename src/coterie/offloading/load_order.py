"""In which order a visit's experts are loaded and computed: the schedule's, by how fast both have been so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.offloading.visit import Visit
from coterie.policies.schedule import get_schedule

_NEW = 0.2  # the share of a rate that the latest measurement makes


@dataclass
class Rates:
    """How fast loads and computations have been; nothing but the order of loads, and what is read ahead, goes by them.

    Attributes:
        loading: bytes per second; a guess until measured.
        computing: bytes of weights, for one row, per second; a guess until measured.
    """

    loading: float = 1e9
    computing: float = 1e10

    def loaded(self, nbytes: int, seconds: float) -> None:
        """So many bytes were read while reads were under way for so long."""
        if seconds > 0:
            self.loading += _NEW * (nbytes / seconds - self.loading)

    def computed(self, nbytes: int, seconds: float) -> None:
        """Weights of so many bytes, times rows, were computed in so many seconds."""
        if seconds > 0:
            self.computing += _NEW * (nbytes / seconds - self.computing)


class LoadOrder:
    """Orders visits by a schedule.

    Source: CRISP §3.4.1; Johnson's order goes beyond the paper.

    Args:
        schedule: its name.
        block_bytes: of a block of the cache.
        rates: how fast both machines are.

    Raises:
        ConfigError: for an unknown schedule.
    """

    def __init__(self, schedule: str, block_bytes: int, rates: Rates) -> None:
        self._order, self._block_bytes, self._rates = get_schedule(schedule), block_bytes, rates

    def of(self, visit: Visit, reserved_E: NDArray[Any]) -> list[int]:
        """The visit's experts in order, `reserved_E` [E] blocks being there or on their way; sets `visit.missing`."""
        short = [max(0, blocks - int(reserved_E[expert])) for expert, blocks in visit.need.items()]
        visit.missing = sum(blocks > 0 for blocks in short)
        experts = list(visit.need)
        if visit.missing == 0:
            return experts
        blocks_N = np.array(list(visit.need.values()))
        load_N = np.array(short) * (self._block_bytes / self._rates.loading)
        compute_N = blocks_N * np.array(visit.rows) * (self._block_bytes / self._rates.computing)
        return [experts[index] for index in self._order(load_N, compute_N, blocks_N).tolist()]
