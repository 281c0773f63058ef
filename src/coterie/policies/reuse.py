"""Keep what was used often, lately and over a long time: a block's two moving averages, nearest layer first."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from coterie.policies.eviction import CacheShape, EvictionPolicy


class Reuse(EvictionPolicy):
    """Evicts what a short and a long moving average of its use, and the distance of its layer, make least likely.

    Source: beyond the paper. The constants were chosen on the earlier halves of two decode traces
    (`benchmarks/offload_policies.py`).

    Args:
        shape: what is cached.
        short: share of the short average that stays from one token to the next.
        long: the same of the long one.
        weight: weight of the short average; the long one's is the rest.
        near: how much more the next layer's blocks are worth than those of the layer just visited.
    """

    name = "reuse"

    def __init__(
        self, shape: CacheShape, short: float = 0.7, long: float = 0.97, weight: float = 0.3, near: float = 1.0
    ) -> None:
        super().__init__(shape)
        self._short_LEB: NDArray[np.float64] = np.zeros_like(self.score_LEB)
        self._long_LEB: NDArray[np.float64] = np.zeros_like(self.score_LEB)
        self._constants = (short, long, weight)
        self.near_D = 1 + near * (1 - np.arange(1, shape.num_layers + 1) / shape.num_layers)

    def touch(self, layer: int, need_E: NDArray[np.int32]) -> None:
        """See `EvictionPolicy`."""
        _average(need_E, self._short_LEB[layer], self._long_LEB[layer], self.score_LEB[layer], *self._constants)


@njit(cache=True, nogil=True)
def _average(need_E: Any, short_EB: Any, long_EB: Any, score_EB: Any, short: float, long: float, weight: float) -> None:
    for e in range(need_E.size):
        for b in range(short_EB.shape[1]):
            used = 1.0 if b < need_E[e] else 0.0
            short_EB[e, b] = short * short_EB[e, b] + (1 - short) * used
            long_EB[e, b] = long * long_EB[e, b] + (1 - long) * used
            score_EB[e, b] = weight * short_EB[e, b] + (1 - weight) * long_EB[e, b]
