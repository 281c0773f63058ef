"""How wide each slot runs: as planned; not at all where it would miss; wider where more is resident anyway."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.errors import ConfigError
from coterie.offloading.demand import skip_missing, widen_to_resident

Widths = Callable[[int, Tensor, Tensor], Tensor]
"""(layer, ids [T, K], weights [T, K]) -> neurons [T, K]."""


@dataclass(frozen=True, eq=False)
class Slots:
    """The slots of one visit; what the cache is asked for, tensors on the host, also as the arrays of their memory.

    Attributes:
        ids_TK: [T, K] int64 chosen experts.
        weights_TK: [T, K] their routing weights, the router's own, where it put them.
        widths_TK: [T, K] int64 neurons that each runs; changed as that is settled.
        most_S: [S] int64 neurons up to which it may use what is resident; None: not beyond its width.
    """

    ids_TK: Tensor
    weights_TK: Tensor
    widths_TK: Tensor
    most_S: NDArray[np.int64] | None = None

    @property
    def ids_S(self) -> NDArray[np.int64]:
        """[S] the chosen experts."""
        ids: NDArray[np.int64] = self.ids_TK.view(-1).numpy()
        return ids

    @property
    def widths_S(self) -> NDArray[np.int64]:
        """[S] neurons, the memory of `widths_TK`."""
        widths: NDArray[np.int64] = self.widths_TK.view(-1).numpy()
        return widths


class WidthChoice:
    """What a visit's slots run, first as planned, then given what is resident.

    Source: CRISP §3.3 for plans; skipping on a miss as BigMoeOnEdge does; what is resident is free: beyond the paper.

    Args:
        width: neurons of an expert, I.
        block: neurons of a block of the cache.
        planned: what must be there, and is read where it is not; None: whole experts.
        most: up to how many neurons a slot runs of what is resident; None: not beyond the planned.
        skip_misses: F: a slot that would miss is skipped where its normalised weight is below F / K; None: never.

    Attributes:
        skip_misses: F; None: nothing is skipped.
        uses_cached: whether resident neurons run beyond the planned ones.

    Raises:
        ConfigError: for an F that cannot be.
    """

    def __init__(
        self, width: int, block: int, planned: Widths | None = None, most: Widths | None = None,
        skip_misses: float | None = None,
    ) -> None:  # fmt: skip
        if skip_misses is not None and not 0 <= skip_misses < math.inf:
            raise ConfigError(f"skip_misses = {skip_misses}; it is F of weight < F/K, a number >= 0 such as 0.75")
        self._width, self._block, self._planned, self._most = width, block, planned, most
        self.skip_misses, self.uses_cached = skip_misses or None, most is not None
        self._factor = None if not skip_misses else np.float32(skip_misses)

    def plan(self, layer: int, ids_TK: Tensor, weights_TK: Tensor) -> Slots:
        """The slots with their planned widths, in memory of their own."""
        given_TK, ids_TK = ids_TK, ids_TK.to("cpu", torch.int64).contiguous()
        if self._planned is None:
            return Slots(ids_TK, weights_TK, torch.full_like(ids_TK, self._width))
        widths_TK = self._planned(layer, given_TK, weights_TK).to("cpu", torch.int64)
        if self._factor is not None or self._most is not None or not widths_TK.is_contiguous():
            widths_TK = widths_TK.clone(memory_format=torch.contiguous_format)
        most_S = None
        if self._most is not None:
            most_S = self._most(layer, given_TK, weights_TK).to("cpu", torch.int64).reshape(-1).numpy()
        return Slots(ids_TK, weights_TK, widths_TK, most_S)

    def skip(self, slots: Slots, reserved_E: NDArray[Any]) -> int:
        """Skip what would miss and weighs too little, `reserved_E` [E] the blocks that would not; how many slots."""
        if self._factor is None:
            return 0
        weights_S = slots.weights_TK.to("cpu", torch.float32).reshape(-1).numpy()
        top_k = slots.ids_TK.shape[1]
        return skip_missing(slots.ids_S, weights_S, top_k, self._factor, self._block, reserved_E, slots.widths_S)

    def widen(self, slots: Slots, arrived_E: NDArray[Any], pinned_E: NDArray[Any]) -> None:
        """Use what is resident, `arrived_E` [E] blocks, and pin it."""
        if slots.most_S is not None:
            widen_to_resident(
                slots.ids_S, slots.most_S, self._block, self._width, arrived_E, pinned_E, slots.widths_S
            )  # fmt: skip
