"""What an eviction policy is, and the classic ones: least recently and least frequently used."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numba import njit
from numpy.typing import NDArray

from coterie.errors import ConfigError


@dataclass(frozen=True)
class CacheShape:
    """What can be cached: every expert of every MoE layer, cut into blocks of neurons.

    Attributes:
        num_layers: MoE layers, L.
        num_experts: experts in a layer, E.
        blocks: blocks in an expert, B. Block 0 holds its most important neurons.
    """

    num_layers: int
    num_experts: int
    blocks: int = 16

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_experts", "blocks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)} in a cache; it must be at least 1")

    @property
    def total_blocks(self) -> int:
        """Blocks of all experts."""
        return self.num_layers * self.num_experts * self.blocks


class EvictionPolicy(ABC):
    """Says which blocks are worth keeping; `ExpertCache` evicts those worth least, from the tails of experts.

    A block's worth is `score_LEB` times `near_D[d - 1]`, d = 1 .. L layers until its layer is visited again. Within an
    expert scores never rise from one block to the next, so tails go first.

    Attributes:
        name: what it is called in commands and results.
        by_layer: whether layers have equal shares of the memory, and the one furthest over its share gives way.
        whole: whether experts leave whole, as where memory is cut into slots of one expert each.
        score_LEB: [L, E, B] float64.
        near_D: [L] float64.
    """

    name: ClassVar[str]
    by_layer: ClassVar[bool] = False
    whole: ClassVar[bool] = False

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        self.score_LEB: NDArray[np.float64] = np.zeros((shape.num_layers, shape.num_experts, shape.blocks))
        self.near_D: NDArray[np.float64] = np.ones(shape.num_layers)

    @abstractmethod
    def touch(self, layer: int, need_E: NDArray[np.int32]) -> None:
        """Learn what a layer is about to use; layers are visited in order, over and over.

        Args:
            layer: the MoE layer that is visited.
            need_E: [E] int32, how many of its first blocks each expert runs now; 0: not chosen.
        """


class LRU(EvictionPolicy):
    """Evicts what was used longest ago, over all layers."""

    name = "lru"

    def __init__(self, shape: CacheShape) -> None:
        super().__init__(shape)
        self._visits = 0

    def touch(self, layer: int, need_E: NDArray[np.int32]) -> None:
        """See `EvictionPolicy`."""
        self._visits += 1
        _mark(need_E, self.score_LEB[layer], float(self._visits))


class LayerLRU(LRU):
    """Evicts what was used longest ago in the layer furthest over its equal share: MoE-Offload's rule.

    Where a share is less than a token needs in one layer, the layers visited last give way.
    """

    name = "lru-layer"
    by_layer = True


class WholeLRU(LRU):
    """Evicts whole experts, the one used longest ago first: what is evicted of an expert is all of it."""

    name = "lru-whole"
    whole = True


class WholeLayerLRU(LayerLRU):
    """The same, layer by layer: MoE-Offload's cache, whose unit is an expert."""

    name = "lru-layer-whole"
    whole = True


class LFU(EvictionPolicy):
    """Evicts what was used least often since the start."""

    name = "lfu"

    def touch(self, layer: int, need_E: NDArray[np.int32]) -> None:
        """See `EvictionPolicy`."""
        _count(need_E, self.score_LEB[layer])


@njit(cache=True, nogil=True)
def _mark(need_E: Any, score_EB: Any, when: float) -> None:
    for e in range(need_E.size):
        score_EB[e, : need_E[e]] = when


@njit(cache=True, nogil=True)
def _count(need_E: Any, score_EB: Any) -> None:
    for e in range(need_E.size):
        score_EB[e, : need_E[e]] += 1
