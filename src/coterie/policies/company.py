"""Keep what the company so far makes likely to be used soon; learned online."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from coterie.policies.company_model import CompanyModel
from coterie.policies.eviction import CacheShape, EvictionPolicy

_WIDTH_FADE = 0.95


class Company(EvictionPolicy):
    """Evicts what is least likely to be used soon, given which experts were just chosen.

    The value of an expert is how soon it will be chosen again: the mean of `discount ** (n - 1)`, n the tokens until
    then, predicted by a `CompanyModel` from what was chosen just now in this layer, two and four layers before, and by
    the previous token. Every visit teaches the value that the one before predicted: 1 for what is chosen now, else
    `discount` times its new value (temporal-difference learning). Nothing has to be recorded beforehand; what an
    earlier trace teaches stays when the same object serves on.

    With widths, a block is chosen whenever its expert is and runs that wide; a moving average says how often.

    Source: beyond the paper; co-activation across tokens and layers, as CAP section IV uses it within one. The
    constants were chosen on the earlier halves of two decode traces (`benchmarks/offload_policies.py`).

    Args:
        shape: what is cached.
        discount: what a token later is worth, in (0, 1).
        averages: what stays of two moving averages of an expert's use from one token to the next.
        rate: step of the weights of company.
        dense_rate: step of the other weights.
    """

    name = "company"

    def __init__(
        self, shape: CacheShape, discount: float = 0.8, averages: tuple[float, float] = (0.5, 0.95),
        rate: float = 0.2, dense_rate: float = 0.02,
    ) -> None:  # fmt: skip
        super().__init__(shape)
        self._discount = discount
        self._model = CompanyModel(shape.num_layers, shape.num_experts, (0, 2, 4), averages, rate, dense_rate)
        self._value_LE: NDArray[np.float64] = np.zeros((shape.num_layers, shape.num_experts))
        self._width_LEB: NDArray[np.float64] = np.ones_like(self.score_LEB)
        self.near_D = discount ** (np.arange(1, shape.num_layers + 1) / shape.num_layers)

    def touch(self, layer: int, need_E: NDArray[np.int32]) -> None:
        """See `EvictionPolicy`."""
        self._model.repredict(layer, need_E, self._value_LE[layer], self._discount)
        _spread(need_E, self._value_LE[layer], self._width_LEB[layer], self.score_LEB[layer], self._discount)


@njit(cache=True, nogil=True)
def _spread(need_E: Any, value_E: Any, width_EB: Any, score_EB: Any, discount: float) -> None:
    """The value of every block: its expert's, for a chance per token that is a share `width` of the expert's."""
    blocks = score_EB.shape[1]
    for e in range(value_E.size):
        if blocks == 1:
            score_EB[e, 0] = value_E[e]
            continue
        # a chance p per token is worth p / (1 - discount (1 - p)); this is p, from the value
        chance = value_E[e] * (1 - discount) / (1 - discount * value_E[e])
        for b in range(blocks):
            if need_E[e] > 0:
                used = 1.0 if b < need_E[e] else 0.0
                width_EB[e, b] = _WIDTH_FADE * width_EB[e, b] + (1 - _WIDTH_FADE) * used
            p = chance * width_EB[e, b]
            score_EB[e, b] = p / (1 - discount * (1 - p))
