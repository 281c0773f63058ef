"""Which experts the next layer will choose, guessed one layer ahead from the company so far."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.policies.company_model import CompanyModel


class NextLayer:
    """Guesses the next layer's experts from the last three layers' choices and the previous token's; learns online.

    Source: beyond the paper. Counts of which expert follows which, read as independent witnesses, found 0.65 and 0.60
    of the choices where this finds 0.84 and 0.74 (OLMoE and gpt-oss-20b, earlier halves).

    Args:
        num_layers: MoE layers; after the last comes the first, for the next token.
        num_experts: experts in a layer.
        rate: step of the weights of company.
    """

    def __init__(self, num_layers: int, num_experts: int, rate: float = 0.3) -> None:
        self._model = CompanyModel(num_layers, num_experts, (0, 1, 2), (0.5, 0.95), rate, 0.02)
        self._chance_LE: NDArray[np.float64] = np.zeros((num_layers, num_experts))

    def observe(self, layer: int, ids_N: NDArray[Any]) -> NDArray[np.float64]:
        """A layer chose these experts; layers come in order.

        Returns:
            [E] float64, the chance of each expert of the next layer.
        """
        need_E = np.zeros(self._model.num_experts, np.int32)
        need_E[ids_N] = 1
        self._model.correct(layer, self._chance_LE[layer] - need_E)
        self._model.observe(layer, need_E)
        after = (layer + 1) % self._model.num_layers
        if after != layer:
            self._model.predict(after, layer, self._chance_LE[after])
        chance_E: NDArray[np.float64] = self._chance_LE[after]
        return chance_E

    def likeliest(self, layer: int, count: int) -> NDArray[np.int64]:
        """The `count` likeliest experts of a layer, by its last prediction, likeliest first."""
        return np.argsort(-self._chance_LE[layer], kind="stable")[:count]


def recall(ids_TLK: NDArray[Any], count: int, warm: int = 0) -> float:
    """Share of the chosen experts that were among `count` guesses made one layer before, learning all the while.

    Args:
        ids_TLK: [T, L, K] choices in order, of at least two layers.
        count: guesses for each layer.
        warm: the first tokens that only teach.
    """
    tokens, layers, top_k = ids_TLK.shape
    guess = NextLayer(layers, int(ids_TLK.max()) + 1)
    found = asked = 0
    for token in range(tokens):
        for layer in range(layers):
            ids = ids_TLK[token, layer]
            if token >= warm:
                found += int(np.isin(ids, guess.likeliest(layer, count)).sum())
                asked += top_k
            guess.observe(layer, ids)
    return found / max(asked, 1)
