"""What pruning a model dropped and saved: the figures out of the sums of `prune_sums`. NumPy only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class PruneStats:
    """Figures of a pruned run; arrays are [L], means over tokens, padding included where it is counted.

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


def num_sums(num_devices: int) -> int:
    """How many sums `sums_of` gives: kept weight, emptied tokens, visits and remote visits of each device."""
    return 2 + 2 * num_devices


def stats_of(sums_LS: NDArray[np.float64], num_tokens: int) -> PruneStats:
    """The means; zeros before the first token.

    Args:
        sums_LS: [L, 2 + 2 G], each layer's sums of `sums_of`.
        num_tokens: tokens that each layer saw.
    """
    mean_LS = sums_LS / max(1, num_tokens)
    visits_LG, remote_LG = np.split(mean_LS[:, 2:], 2, axis=1)
    return PruneStats(
        num_tokens, mean_LS[:, 0], mean_LS[:, 1], visits_LG.sum(axis=1), remote_LG.sum(axis=1), remote_LG.max(axis=1)
    )
