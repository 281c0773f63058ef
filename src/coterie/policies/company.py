"""Keep what the company so far makes likely to be used soon: learned online, one small logistic model a layer."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from coterie.policies.eviction import CacheShape, EvictionPolicy

_NEIGHBOURS = (0, 2, 4)
"""Layers back, whose choices say most: this one, two and four before; the previous token's choice here comes on top."""
_SMALLEST_AVERAGE = 1e-3


class Company(EvictionPolicy):
    """Evicts what is least likely to be used soon, given which experts were just chosen.

    The value of an expert is how soon it will be chosen again: the mean of `discount ** (n - 1)`, n the tokens until
    then. It is a logistic function of two moving averages of the expert's use, whether it was just chosen, and one
    weight for every expert chosen just now in this layer, two and four layers before, and by the previous token. Every
    visit teaches the value that the one before predicted: 1 for what is chosen now, else `discount` times its new
    value (temporal-difference learning, Adagrad's steps). Nothing has to be recorded beforehand; what an earlier trace
    teaches stays when the same object serves on.

    With widths, a block is chosen whenever its expert is and runs that wide; a moving average says how often.

    Source: beyond the paper; co-activation across tokens and layers as CAP section IV uses it within one. The
    constants were chosen on the earlier halves of two decode traces (`benchmarks/offload_policies.py`).

    Args:
        shape: what is cached.
        discount: what a token later is worth, in (0, 1).
        averages: what stays of the two moving averages from one token to the next.
        rate: step of the weights of company.
        dense_rate: step of the other weights.
    """

    name = "company"

    def __init__(
        self, shape: CacheShape, discount: float = 0.8, averages: tuple[float, float] = (0.5, 0.95),
        rate: float = 0.2, dense_rate: float = 0.02,
    ) -> None:  # fmt: skip
        super().__init__(shape)
        layers, experts = shape.num_layers, shape.num_experts
        self._rates = np.array([*averages, discount, rate, dense_rate])
        self._back_G = np.array([back for back in _NEIGHBOURS if back < layers], np.int64)
        sources = self._back_G.size + 1
        self._chosen_LE: NDArray[np.int16] = np.full((layers, experts), -1, np.int16)
        self._company_LGE: NDArray[np.int16] = np.full((layers, sources, experts), -1, np.int16)
        self._weight_LGEE: NDArray[np.float32] = np.zeros((layers, sources, experts, experts), np.float32)
        self._step_LGEE: NDArray[np.float32] = np.full_like(self._weight_LGEE, 0.1)
        self._dense_L4: NDArray[np.float64] = np.tile(np.array([0.0, 0.7, 0.0, 0.0]), (layers, 1))
        self._dense_step_L4: NDArray[np.float64] = np.ones((layers, 4))
        self._features_LE4: NDArray[np.float64] = np.zeros((layers, experts, 4))
        self._averages_LE2: NDArray[np.float64] = np.full((layers, experts, 2), 1 / experts)
        self._width_LEB: NDArray[np.float64] = np.ones_like(self.score_LEB)
        self._value_LE: NDArray[np.float64] = np.zeros((layers, experts))
        self.near_D = discount ** (np.arange(1, layers + 1) / layers)

    def touch(self, layer: int, need_E: NDArray[np.int32]) -> None:
        """See `EvictionPolicy`."""
        chosen = np.flatnonzero(need_E)
        before_E = self._chosen_LE[layer].copy()
        self._chosen_LE[layer, : chosen.size] = chosen
        self._chosen_LE[layer, chosen.size :] = -1
        _learn(
            need_E, self._value_LE[layer], self._features_LE4[layer], self._averages_LE2[layer],
            self._company_LGE[layer], self._chosen_LE, before_E, layer, self._back_G, self._weight_LGEE[layer],
            self._step_LGEE[layer], self._dense_L4[layer], self._dense_step_L4[layer], self._rates,
        )  # fmt: skip
        _spread(need_E, self._value_LE[layer], self._width_LEB[layer], self.score_LEB[layer], self._rates)


@njit(cache=True, nogil=True)
def _logit(company_GE: Any, weight_GEE: Any, dense_4: Any, features_4: Any, e: int) -> float:
    z = 0.0
    for i in range(4):
        z += dense_4[i] * features_4[i]
    for g in range(company_GE.shape[0]):
        for n in range(company_GE.shape[1]):
            if company_GE[g, n] < 0:
                break
            z += weight_GEE[g, company_GE[g, n], e]
    return z


@njit(cache=True, nogil=True)
def _learn(
    need_E: Any, value_E: Any, features_E4: Any, averages_E2: Any, company_GE: Any, chosen_LE: Any, before_E: Any,
    layer: int, back_G: Any, weight_GEE: Any, step_GEE: Any, dense_4: Any, dense_step_4: Any, rates: Any,
) -> None:  # fmt: skip
    """Predict every expert's new value, and correct the weights by what the old prediction missed."""
    num_experts = need_E.size
    old_GE, old_value_E, old_features_E4 = company_GE.copy(), value_E.copy(), features_E4.copy()
    for g in range(back_G.size):
        company_GE[g] = chosen_LE[(layer - back_G[g]) % chosen_LE.shape[0]]
    company_GE[back_G.size] = before_E
    for e in range(num_experts):
        used = 1.0 if need_E[e] > 0 else 0.0
        for i in range(2):
            averages_E2[e, i] = rates[i] * averages_E2[e, i] + (1 - rates[i]) * used
            share = min(max(averages_E2[e, i], _SMALLEST_AVERAGE), 1 - _SMALLEST_AVERAGE)
            features_E4[e, i] = np.log(share / (1 - share))
        features_E4[e, 2], features_E4[e, 3] = used, 1.0
        value_E[e] = 1 / (1 + np.exp(-_logit(company_GE, weight_GEE, dense_4, features_E4[e], e)))
    for e in range(num_experts):
        if old_features_E4[e, 3] == 0:  # never predicted yet
            continue
        missed = old_value_E[e] - (1.0 if need_E[e] > 0 else rates[2] * value_E[e])
        for i in range(4):
            slope = missed * old_features_E4[e, i]
            dense_step_4[i] += slope * slope
            dense_4[i] -= rates[4] * slope / np.sqrt(dense_step_4[i])
        for g in range(old_GE.shape[0]):
            for n in range(num_experts):
                f = old_GE[g, n]
                if f < 0:
                    break
                step_GEE[g, f, e] += missed * missed
                weight_GEE[g, f, e] -= rates[3] * missed / np.sqrt(step_GEE[g, f, e])


@njit(cache=True, nogil=True)
def _spread(need_E: Any, value_E: Any, width_EB: Any, score_EB: Any, rates: Any) -> None:
    """The value of every block: its expert's, for a chance per token that is a share `width` of the expert's."""
    discount = rates[2]
    for e in range(value_E.size):
        if score_EB.shape[1] == 1:
            score_EB[e, 0] = value_E[e]
            continue
        # a chance p per token is worth p / (1 - discount (1 - p)); this is p, from the value
        chance = value_E[e] * (1 - discount) / (1 - discount * value_E[e])
        for b in range(score_EB.shape[1]):
            if need_E[e] > 0:
                width_EB[e, b] = rates[1] * width_EB[e, b] + (1 - rates[1]) * (1.0 if b < need_E[e] else 0.0)
            p = chance * width_EB[e, b]
            score_EB[e, b] = p / (1 - discount * (1 - p))
