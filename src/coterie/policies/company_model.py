"""How likely each expert is, given the company so far: logistic models, one a layer, that learn as they are used.

An expert's log-odds are a sum of two moving averages of its own use (as log-odds), whether it was chosen the last time,
a constant, and one weight for every expert of its company: those chosen in some layers just before, and in the same
layer the time before. Steps are Adagrad's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

_SMALLEST_AVERAGE = 1e-3
_FEATURES = 4


class CompanyModel:
    """The weights of every layer, and the company its last prediction was made from.

    Args:
        num_layers: MoE layers, L.
        num_experts: experts in a layer, E.
        back: layers back whose choices count, 0: the layer visited last. Those beyond the model are left out.
        averages: what stays of the two moving averages from one token to the next.
        rate: step of the weights of company.
        dense_rate: step of the other weights.
    """

    def __init__(
        self, num_layers: int, num_experts: int, back: tuple[int, ...], averages: tuple[float, float], rate: float,
        dense_rate: float,
    ) -> None:  # fmt: skip
        self.num_layers, self.num_experts = num_layers, num_experts
        self._rates = np.array([*averages, rate, dense_rate])
        self._back_G = np.array([number for number in back if number < num_layers], np.int64)
        sources = self._back_G.size + 1
        self._chosen_LE: NDArray[np.int16] = np.full((num_layers, num_experts), -1, np.int16)
        self._before_LE: NDArray[np.int16] = np.full((num_layers, num_experts), -1, np.int16)
        self._averages_LE2: NDArray[np.float64] = np.full((num_layers, num_experts, 2), 1 / num_experts)
        self._company_LGE: NDArray[np.int16] = np.full((num_layers, sources, num_experts), -1, np.int16)
        self._features_LEF: NDArray[np.float64] = np.zeros((num_layers, num_experts, _FEATURES))
        self._weight_LGEE: NDArray[np.float32] = np.zeros((num_layers, sources, num_experts, num_experts), np.float32)
        self._step_LGEE: NDArray[np.float32] = np.full_like(self._weight_LGEE, 0.1)
        self._dense_LF: NDArray[np.float64] = np.tile(np.array([0.0, 0.7, 0.0, 0.0]), (num_layers, 1))
        self._dense_step_LF: NDArray[np.float64] = np.ones((num_layers, _FEATURES))

    def observe(self, layer: int, need_E: NDArray[np.int32]) -> None:
        """A layer was visited and chose the experts whose entry is above 0."""
        _observe(
            need_E, self._chosen_LE[layer], self._before_LE[layer], self._averages_LE2[layer], self._rates
        )  # fmt: skip

    def predict(self, layer: int, at: int, chance_E: NDArray[np.float64]) -> None:
        """Fill the chance of every expert of `layer`, from what was observed up to the visit of layer `at`."""
        last = self._before_LE if at == layer else self._chosen_LE
        _predict(
            layer, at, self._back_G, self._chosen_LE, last, self._averages_LE2[layer], self._company_LGE[layer],
            self._features_LEF[layer], self._weight_LGEE[layer], self._dense_LF[layer], chance_E,
        )  # fmt: skip

    def correct(self, layer: int, missed_E: NDArray[np.float64]) -> None:
        """Learn from the layer's last prediction less what it should have been; nothing before the first one."""
        _correct(
            missed_E, self._company_LGE[layer], self._features_LEF[layer], self._weight_LGEE[layer],
            self._step_LGEE[layer], self._dense_LF[layer], self._dense_step_LF[layer], self._rates,
        )  # fmt: skip

    def repredict(self, layer: int, need_E: NDArray[np.int32], value_E: NDArray[np.float64], discount: float) -> None:
        """Observe a visit, predict how soon each expert comes again, and learn what the old prediction missed.

        Args:
            layer: the layer that is visited.
            need_E: [E] above 0 where chosen.
            value_E: [E] the old values, replaced by the new ones.
            discount: what a token later is worth.
        """
        _repredict(
            layer, need_E, self._back_G, self._chosen_LE, self._before_LE, self._averages_LE2[layer],
            self._company_LGE[layer], self._features_LEF[layer], self._weight_LGEE[layer], self._step_LGEE[layer],
            self._dense_LF[layer], self._dense_step_LF[layer], self._rates, value_E, discount,
        )  # fmt: skip


@njit(cache=True, nogil=True)
def _observe(need_E: Any, chosen_E: Any, before_E: Any, averages_E2: Any, rates: Any) -> None:
    before_E[:] = chosen_E
    chosen_E[:] = -1
    count = 0
    for e in range(need_E.size):
        used = 1.0 if need_E[e] > 0 else 0.0
        if need_E[e] > 0:
            chosen_E[count] = e
            count += 1
        for i in range(2):
            averages_E2[e, i] = rates[i] * averages_E2[e, i] + (1 - rates[i]) * used


@njit(cache=True, nogil=True)
def _predict(
    layer: int, at: int, back_G: Any, chosen_LE: Any, last_LE: Any, averages_E2: Any, company_GE: Any,
    features_EF: Any, weight_GEE: Any, dense_F: Any, chance_E: Any,
) -> None:  # fmt: skip
    for g in range(back_G.size):
        company_GE[g] = chosen_LE[(at - back_G[g]) % chosen_LE.shape[0]]
    company_GE[back_G.size] = last_LE[layer]
    features_EF[:, 2] = 0.0
    features_EF[:, 3] = 1.0
    for n in range(chance_E.size):
        if chosen_LE[layer, n] < 0:
            break
        features_EF[chosen_LE[layer, n], 2] = 1.0
    for e in range(chance_E.size):
        for i in range(2):
            share = min(max(averages_E2[e, i], _SMALLEST_AVERAGE), 1 - _SMALLEST_AVERAGE)
            features_EF[e, i] = np.log(share / (1 - share))
        z = 0.0
        for i in range(dense_F.size):
            z += dense_F[i] * features_EF[e, i]
        for g in range(company_GE.shape[0]):
            for n in range(company_GE.shape[1]):
                if company_GE[g, n] < 0:
                    break
                z += weight_GEE[g, company_GE[g, n], e]
        chance_E[e] = 1 / (1 + np.exp(-z))


@njit(cache=True, nogil=True)
def _correct(
    missed_E: Any, company_GE: Any, features_EF: Any, weight_GEE: Any, step_GEE: Any, dense_F: Any,
    dense_step_F: Any, rates: Any,
) -> None:  # fmt: skip
    if features_EF[0, 3] == 0:  # never predicted
        return
    for e in range(missed_E.size):
        missed = missed_E[e]
        for i in range(dense_F.size):
            slope = missed * features_EF[e, i]
            dense_step_F[i] += slope * slope
            dense_F[i] -= rates[3] * slope / np.sqrt(dense_step_F[i])
        for g in range(company_GE.shape[0]):
            for n in range(company_GE.shape[1]):
                f = company_GE[g, n]
                if f < 0:
                    break
                step_GEE[g, f, e] += missed * missed
                weight_GEE[g, f, e] -= rates[2] * missed / np.sqrt(step_GEE[g, f, e])


@njit(cache=True, nogil=True)
def _repredict(
    layer: int, need_E: Any, back_G: Any, chosen_LE: Any, before_LE: Any, averages_E2: Any, company_GE: Any,
    features_EF: Any, weight_GEE: Any, step_GEE: Any, dense_F: Any, dense_step_F: Any, rates: Any, value_E: Any,
    discount: float,
) -> None:  # fmt: skip
    """The above as one call: decoding waits for it at every layer."""
    _observe(need_E, chosen_LE[layer], before_LE[layer], averages_E2, rates)
    old_features_EF, old_company_GE, missed_E = features_EF.copy(), company_GE.copy(), value_E.copy()
    _predict(
        layer, layer, back_G, chosen_LE, before_LE, averages_E2, company_GE, features_EF, weight_GEE, dense_F, value_E
    )  # fmt: skip
    for e in range(need_E.size):
        missed_E[e] -= 1.0 if need_E[e] > 0 else discount * value_E[e]
    _correct(missed_E, old_company_GE, old_features_EF, weight_GEE, step_GEE, dense_F, dense_step_F, rates)
