"""Which experts the next layer will choose, guessed from this layer's choice and counts of what followed before."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray


class Transitions:
    """Counts, for every layer, which experts the next layer chose with each expert of this one.

    An expert's guess is the sum over the chosen experts of log(how often it follows that one / how often it is chosen
    at all), times how often it is chosen: the odds of independent witnesses. Counts fade, so that routing may drift.

    Source: beyond the paper; CAP's co-activation, from one layer to the next.

    Args:
        num_layers: MoE layers; after the last comes the first, for the next token.
        num_experts: experts in a layer.
        fade: what stays of a count from one token to the next.
        prior: how many visits an expert's own frequency counts for beside what followed.
    """

    def __init__(self, num_layers: int, num_experts: int, fade: float = 0.9995, prior: float = 5.0) -> None:
        self._follows_LEE: NDArray[np.float64] = np.zeros((num_layers, num_experts, num_experts))
        self._seen_LE: NDArray[np.float64] = np.zeros((num_layers, num_experts))
        self._chosen_LE: NDArray[np.float64] = np.full((num_layers, num_experts), 1 / num_experts)
        self._previous: tuple[int, NDArray[np.int64]] | None = None
        self._fade, self._prior = fade, prior

    def observe(self, layer: int, ids_N: NDArray[Any]) -> None:
        """A layer chose these experts; counts as following the layer observed just before, if that is its neighbour."""
        ids = np.asarray(ids_N, np.int64)
        if self._previous is not None and (self._previous[0] + 1) % len(self._chosen_LE) == layer:
            before, chosen = self._previous
            _count(self._follows_LEE[before], self._seen_LE[before], chosen, ids, self._fade)
        self._chosen_LE[layer] *= self._fade
        self._chosen_LE[layer, ids] += 1 - self._fade
        self._previous = (layer, ids)

    def scores(self, layer: int, ids_N: NDArray[Any]) -> NDArray[np.float64]:
        """How much speaks for each expert of the layer after `layer`, given what that one chose.

        Returns:
            [E] float64 log-odds up to a constant; higher is likelier.
        """
        after = (layer + 1) % len(self._chosen_LE)
        base_E = np.maximum(self._chosen_LE[after], 1e-6)
        ids = np.asarray(ids_N, np.int64)
        follows_NE = self._follows_LEE[layer, ids] + self._prior * base_E
        share_NE = follows_NE / (self._seen_LE[layer, ids] + self._prior)[:, None]
        return np.asarray(np.log(base_E) + np.log(share_NE / base_E).sum(axis=0))

    def predict(self, layer: int, ids_N: NDArray[Any], count: int) -> NDArray[np.int64]:
        """The `count` likeliest experts of the layer after `layer`, likeliest first."""
        return np.argsort(-self.scores(layer, ids_N), kind="stable")[:count]


@njit(cache=True, nogil=True)
def _count(follows_EE: Any, seen_E: Any, before_N: Any, after_N: Any, fade: float) -> None:
    for f in before_N:
        follows_EE[f] *= fade
        seen_E[f] = seen_E[f] * fade + 1
        for e in after_N:
            follows_EE[f, e] += 1


def recall(ids_TLK: NDArray[Any], count: int, warm: int = 0) -> float:
    """Share of the chosen experts that were among `count` guesses made one layer before, learning all the while.

    Args:
        ids_TLK: [T, L, K] choices in order.
        count: guesses for each layer.
        warm: the first tokens that only teach.
    """
    tokens, layers, top_k = ids_TLK.shape
    guess = Transitions(layers, int(ids_TLK.max()) + 1)
    found = asked = 0
    predicted: NDArray[np.int64] | None = None
    for token in range(tokens):
        for layer in range(layers):
            ids = ids_TLK[token, layer]
            if predicted is not None and token >= warm:
                found += int(np.isin(ids, predicted).sum())
                asked += top_k
            guess.observe(layer, ids)
            predicted = guess.predict(layer, ids, count)
    return found / max(asked, 1)
