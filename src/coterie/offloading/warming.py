"""Beginning as if much had been read already: the policy learns visits, then what it would hold by now is read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import BudgetError
from coterie.offloading.ahead import Ahead
from coterie.offloading.flights import Flights
from coterie.policies.cache import ExpertCache

Visits = Iterable[tuple[int, NDArray[Any], NDArray[Any]]]
"""In order, (layer, experts [N], how many of its first blocks each runs [N])."""


def warm(cache: ExpertCache, flights: Flights, ahead: Ahead | None, visits: Visits) -> None:
    """Be as if these visits had been; after an error, whatever was not read is not held.

    Args:
        cache: that holds nothing yet.
        flights: of its reads.
        ahead: learns the visits too; None: nothing is read ahead.
        visits: that had been.

    Raises:
        BudgetError: when a visit does not fit.
        CheckpointError: when a read fails or does not end in time, or a block is corrupted.
    """
    try:
        held_LE = _held_after(cache, ahead, visits)
        for layer, expert in np.argwhere(held_LE).tolist():
            flights.fetch(layer, expert, int(held_LE[layer, expert]))
    except BaseException:
        flights.abandon()
        cache.cancel_all()
        raise
    flights.note_peak()


def _held_after(cache: ExpertCache, ahead: Ahead | None, visits: Visits) -> NDArray[np.int32]:
    """[L, E] blocks that the cache would hold; it has them reserved, and none has arrived."""
    try:
        for layer, experts_N, blocks_N in visits:
            _pass(cache, ahead, layer, experts_N, blocks_N)
        return cache.arrived_LE.copy()
    finally:
        cache.arrived_LE[:] = 0


def _pass(cache: ExpertCache, ahead: Ahead | None, layer: int, experts_N: NDArray[Any], blocks_N: NDArray[Any]) -> None:
    """What a visit leaves behind, without reading; one that does not fit whole goes expert by expert."""
    if ahead is not None:
        need_E = np.zeros(cache.shape.num_experts, np.int32)
        np.maximum.at(need_E, experts_N, blocks_N)
        ahead.observe(layer, need_E)
    try:
        cache.serve(layer, experts_N, blocks_N)
    except BudgetError:
        cache.used(layer)
        for expert, blocks in zip(experts_N, blocks_N, strict=True):
            decision = cache.prefetch(layer, np.array([expert]), np.array([blocks]))
            if decision is None:
                raise
            cache.loaded(layer, decision.loads_N3)
            cache.release(layer, int(expert))
