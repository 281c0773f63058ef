"""How many neurons run at a threshold, and the threshold at which a share of them does, on a sample of decisions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie.profile.model_profile import ModelProfile

LEAST_WEIGHT = 1e-12  # a routing weight of zero has no logarithm
_HALVINGS = 40
_NEAR = 1e-4  # of all neurons


class ValueShares:
    """Shares of the policy `value`, neuron by neuron and in logarithms: i runs iff log w + log v_i >= threshold."""

    def __init__(self, profile: ModelProfile) -> None:
        """Sort a profile's sample by expert."""
        spec = profile.spec
        self._log_weights: list[tuple[int, int, NDArray[np.float64]]] = []
        weights_LSK = np.maximum(profile.sample_weights_LSK, LEAST_WEIGHT).astype(np.float64)
        for layer in range(spec.num_layers):
            ids_N, log_N = profile.sample_ids_LSK[layer].reshape(-1), np.log(weights_LSK[layer].reshape(-1))
            order_N = np.argsort(ids_N, kind="stable")
            ends_E = np.cumsum(np.bincount(ids_N, minlength=spec.num_experts))
            for expert, mine in enumerate(np.split(log_N[order_N], ends_E[:-1])):
                if mine.size:
                    self._log_weights.append((layer, expert, mine))
        self._neurons = profile.sample_ids_LSK.size * profile.width

    def share(self, log_value_LEI: NDArray[np.floating], threshold: float) -> float:
        """The share of the sample's neurons that run.

        Args:
            log_value_LEI: [L, E, I] logarithms of what neurons are worth, in any order.
            threshold: a logarithm too.
        """
        return self._share(np.sort(log_value_LEI, axis=2), threshold)

    def threshold(self, log_value_LEI: NDArray[np.floating], share: float) -> float:
        """The lowest threshold at which at most `share` of the neurons run, to within 1e-4 of them.

        Args:
            log_value_LEI: as for `share`.
            share: in (0, 1].
        """
        rising_LEI = np.sort(log_value_LEI, axis=2)
        lightest = min(float(mine.min()) for _, _, mine in self._log_weights)
        low, high = float(rising_LEI.min()) + lightest, float(rising_LEI.max()) + 1e-6
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            found = self._share(rising_LEI, middle)
            if found > share:
                low = middle
            else:
                high = middle
                if found >= share - _NEAR:
                    break
        return high

    def _share(self, rising_LEI: NDArray[np.floating], threshold: float) -> float:
        width = rising_LEI.shape[2]
        runs = 0
        for layer, expert, log_N in self._log_weights:
            runs += width * log_N.size - int(np.searchsorted(rising_LEI[layer, expert], threshold - log_N).sum())
        return runs / self._neurons
