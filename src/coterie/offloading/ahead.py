"""What the next layer will probably need, to be read while the link has nothing else to do."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie.policies.cache import ExpertCache
from coterie.policies.prefetch import NextLayer

_LIKELY = 0.5  # below, a read is more often wasted than not


class Ahead:
    """Learns online which experts follow, and names the likeliest that is not resident.

    Source: beyond the paper.
    """

    def __init__(self, cache: ExpertCache) -> None:
        shape = cache.shape
        self._cache = cache
        self._guess = NextLayer(shape.num_layers, shape.num_experts)
        self._chance_E: NDArray[np.float64] = np.zeros(shape.num_experts)
        self._blocks_LE = np.full((shape.num_layers, shape.num_experts), shape.blocks, np.int64)

    def observe(self, layer: int, need_E: NDArray[np.int32]) -> None:
        """A layer runs so many blocks of each expert; layers come in order."""
        experts_N = np.flatnonzero(need_E)
        self._chance_E = self._guess.observe(layer, experts_N)
        self._blocks_LE[layer, experts_N] = need_E[experts_N]

    def wanted(self, layer: int) -> tuple[int, int] | None:
        """The likeliest expert of the next layer that is not resident as wide as when it last ran, and how wide."""
        missing_E = self._cache.reserved_LE[layer] < self._blocks_LE[layer]
        chance_E = np.where(missing_E, self._chance_E, 0.0)
        expert = int(chance_E.argmax())
        if chance_E[expert] < _LIKELY:
            return None
        return expert, int(self._blocks_LE[layer, expert])
