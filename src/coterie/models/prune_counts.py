"""What pruning a live model drops and saves, summed up beside the model without waiting for it."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from coterie.ops.prune_stats import PruneStats, num_sums, stats_of

if TYPE_CHECKING:
    from torch import Tensor


class PruneCounter:
    """Sums over tokens, layer by layer, on the layers' devices; read by `stats`."""

    def __init__(self, num_layers: int, num_devices: int) -> None:
        self._torch = importlib.import_module("torch")
        self._sums = importlib.import_module("coterie.ops.prune_sums")
        self._num_devices = num_devices
        self._tokens_L = [0] * num_layers
        self._sums_L: list[Tensor] = []  # [2 + 2 G] each, as `ops.prune_sums` adds them

    def attach(self, devices: Sequence[Any]) -> None:
        """Make room for the sums, unless an earlier block did; `devices`: where each layer is."""
        if self._sums_L:
            return
        size = num_sums(self._num_devices)
        self._sums_L = [self._torch.zeros(size, dtype=self._torch.float64, device=device) for device in devices]

    def add(self, layer: int, device_TK: Tensor, weights_TK: Tensor, kept_TK: Tensor, home_T: Tensor | None) -> None:
        """Count the tokens of one forward call in one layer."""
        self._tokens_L[layer] += len(kept_TK)
        self._sums_L[layer] += self._sums.sums_of(device_TK, weights_TK, kept_TK, home_T, self._num_devices)

    def stats(self) -> PruneStats:
        """The means so far; zeros before the first token."""
        if not self._sums_L:
            self.attach(["cpu"] * len(self._tokens_L))
        return stats_of(np.stack([sums.cpu().numpy() for sums in self._sums_L]), self._tokens_L[0])
