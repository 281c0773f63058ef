"""What pruning a live model drops and saves, summed up beside the model without waiting for it."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PruneStats:
    """Figures of a pruned run; arrays are [L], means over tokens, padding included.

    Attributes:
        num_tokens: tokens that each layer saw.
        kept_weight: share of a token's routing weight that is kept.
        emptied: share of the tokens that lost every expert.
        devices_per_token: devices that a token visits, its home included.
        remote_dpt: devices other than home that it visits.
        remote_peak_traffic: the same to the busiest device alone.
    """

    num_tokens: int
    kept_weight: NDArray[np.float64]
    emptied: NDArray[np.float64]
    devices_per_token: NDArray[np.float64]
    remote_dpt: NDArray[np.float64]
    remote_peak_traffic: NDArray[np.float64]

    def to_json(self) -> dict[str, Any]:
        """Means over layers, and the per-layer values under "layers"."""
        arrays = {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        means = {name: float(value.mean()) for name, value in arrays.items()}
        layers = {name: value.tolist() for name, value in arrays.items()}
        return {"num_tokens": self.num_tokens, **means, "layers": layers}


class PruneCounter:
    """Sums over tokens, layer by layer, on the layers' devices; read by `stats`."""

    def __init__(self, num_layers: int, num_devices: int) -> None:
        self._torch = importlib.import_module("torch")
        self._op = importlib.import_module("coterie.ops.prune_destinations")
        self._num_devices = num_devices
        self._tokens_L = [0] * num_layers
        self._sums_L: list[Tensor] = []  # [2 + 2 G]: kept weight, emptied tokens, visits and remote visits by device

    def attach(self, devices: Sequence[Any]) -> None:
        """Make room for the sums, unless an earlier block did; `devices`: where each layer is."""
        if self._sums_L:
            return
        size = 2 + 2 * self._num_devices
        self._sums_L = [self._torch.zeros(size, dtype=self._torch.float64, device=device) for device in devices]

    def add(self, layer: int, device_TK: Tensor, weights_TK: Tensor, kept_TK: Tensor, home_T: Tensor | None) -> None:
        """Count the tokens of one forward call in one layer."""
        torch, op = self._torch, self._op
        visited_TG = op.visits_per_device(device_TK, kept_TK, self._num_devices)
        remote_TG = visited_TG
        if home_T is not None:
            away_TG = torch.arange(self._num_devices, device=home_T.device) != home_T[:, None]
            remote_TG = visited_TG & away_TG
        self._tokens_L[layer] += len(kept_TK)
        self._sums_L[layer] += torch.cat([
            op.kept_share(weights_TK, kept_TK).sum(dtype=torch.float64)[None],
            (~kept_TK.any(-1)).sum(dtype=torch.float64)[None],
            visited_TG.sum(0, dtype=torch.float64), remote_TG.sum(0, dtype=torch.float64),
        ])  # fmt: skip

    def stats(self) -> PruneStats:
        """The means so far; zeros before the first token."""
        tokens = self._tokens_L[0]
        if not self._sums_L:
            self.attach(["cpu"] * len(self._tokens_L))
        sums_LS = np.stack([sums.cpu().numpy() for sums in self._sums_L]) / max(1, tokens)
        visits_LG, remote_LG = np.split(sums_LS[:, 2:], 2, axis=1)
        return PruneStats(
            tokens, sums_LS[:, 0], sums_LS[:, 1], visits_LG.sum(axis=1), remote_LG.sum(axis=1), remote_LG.max(axis=1)
        )
