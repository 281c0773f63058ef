"""The offline bound: evict what is used again last, which takes knowing the future."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from coterie.errors import ConfigError
from coterie.policies.eviction import CacheShape, EvictionPolicy


class Belady(EvictionPolicy):
    """Evicts what is used again last; with blocks of one size no policy reads less.

    Source: Belady, A study of replacement algorithms for a virtual-storage computer, 1966.

    Args:
        shape: what is cached.
        ids_TLK: [T, L, K] integers: every choice that will be looked up, in order.
        blocks_TLK: [T, L, K] integers: the blocks each runs; 0: skipped.
    """

    name = "belady"

    def __init__(self, shape: CacheShape, ids_TLK: NDArray[Any], blocks_TLK: NDArray[Any]) -> None:
        super().__init__(shape)
        self._ids_TLK = ids_TLK
        self._next_TLKB = _next_uses(ids_TLK, blocks_TLK, shape.num_experts, shape.blocks)
        self._visits = 0
        self.score_LEB[:] = -np.inf

    def touch(self, layer: int, need_E: NDArray[np.int32]) -> None:
        """See `EvictionPolicy`; visits must be the ones that were announced."""
        token, expected = divmod(self._visits, self.shape.num_layers)
        if layer != expected or token >= len(self._ids_TLK):
            raise ConfigError(f"visit {self._visits} is of layer {layer}, the announced one is not; announce the trace")
        self._visits += 1
        self.score_LEB[layer, self._ids_TLK[token, layer]] = -self._next_TLKB[token, layer].astype(np.float64)


@njit(cache=True, nogil=True)
def _next_uses(ids_TLK: Any, blocks_TLK: Any, num_experts: int, num_blocks: int) -> Any:
    """[T, L, K, B] int32: the visit at which each block of a chosen expert is used next."""
    tokens, layers, top_k = ids_TLK.shape
    never = 2**31 - 1
    found = np.empty((tokens, layers, top_k, num_blocks), np.int32)
    next_LEB = np.full((layers, num_experts, num_blocks), never, np.int32)
    for t in range(tokens - 1, -1, -1):
        for i in range(layers):
            for k in range(top_k):
                found[t, i, k] = next_LEB[i, ids_TLK[t, i, k]]
            for k in range(top_k):
                next_LEB[i, ids_TLK[t, i, k], : blocks_TLK[t, i, k]] = t * layers + i
    return found
