"""The price of a visit: thetas that bring a layer's devices down to one level of traffic, and layers to one price.

A step of the model takes what its layers take one after the other, so what counts is the mean of the layers' peaks.
Within a layer the least weight is lost for a peak when every device comes down to that peak. Between layers the least
is lost for a mean of peaks when one level less costs the same weight in every layer: levels fall in order of price.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.progress import Progress, silent
from coterie.pruning import kernels
from coterie.pruning.routed import RoutedTrace
from coterie.trace.routing_trace import TokenSelector

LEVELS = 4096  # levels of traffic for which thetas are tabulated; one level is 1/4096 of the tokens
THETA_DECIMALS = 6  # written files hold exactly the thetas that were used
_NEVER = 2.0  # no share of a token's weight is as large


@dataclass(frozen=True)
class Prices:
    """Thetas of rising strength, from every visit to none; a step lowers one layer by one level.

    Source: beyond CAP; the Lagrangian of "lose least weight, mean over layers of the peak within a target".

    Attributes:
        theta_NLG: [LEVELS + 1, L, G], as `theta_at_levels` gives them.
        layer_S: [S] layer that each step lowers.
    """

    theta_NLG: NDArray[np.float64]
    layer_S: NDArray[np.int64]

    @property
    def num_strengths(self) -> int:
        """How many strengths there are, S + 1: 0 prunes nothing, the last leaves no remote visit."""
        return self.layer_S.size + 1

    def theta(self, strength: int) -> NDArray[np.float64]:
        """The thetas of a strength, [L, G]."""
        num_layers = self.theta_NLG.shape[1]
        level_L = LEVELS - np.bincount(self.layer_S[:strength], minlength=num_layers)
        theta_LG: NDArray[np.float64] = self.theta_NLG[level_L, np.arange(num_layers)]
        return theta_LG


def fit_prices(routed: RoutedTrace, tokens: TokenSelector, progress: Progress = silent) -> Prices:
    """Thetas for every strength, fitted on the selected tokens.

    Args:
        routed: the trace and its devices.
        tokens: which tokens to use.
        progress: told of every layer.
    """
    return price_layers(theta_at_levels(routed, tokens, progress))


def price_layers(theta_NLG: NDArray[np.float64]) -> Prices:
    """The order in which layers come down: the visit that a device loses next weighs about its theta there, so a layer
    pays the sum of its thetas for a level; these rise as levels fall, so its own steps stay in order.

    Args:
        theta_NLG: [LEVELS + 1, L, G], falling in N.
    """
    price_SL = theta_NLG[-2::-1].sum(axis=2)  # of coming down to levels LEVELS - 1 .. 0
    order = np.argsort(price_SL.ravel(), kind="stable")
    return Prices(theta_NLG, order % theta_NLG.shape[1])


def theta_at_levels(routed: RoutedTrace, tokens: TokenSelector, progress: Progress = silent) -> NDArray[np.float64]:
    """For each level of traffic the theta of every layer and device at which the device keeps that many visits.

    Homes are where a scheduler happened to put sequences: a device that is home to many tokens looks idle to remote
    traffic, and would not the next time. So every token counts as if it lived on each device equally often.

    Args:
        routed: the trace and its devices.
        tokens: which tokens to use.
        progress: told of every layer.

    Returns:
        [LEVELS + 1, L, G]: entry n admits at most n / LEVELS remote visits per token to each device; the first
        admits none, thetas fall from one level to the next, and 0 admits every visit.
    """
    theta_NLG = np.empty((LEVELS + 1, routed.trace.num_layers, routed.topology.num_devices))
    for layer in range(routed.trace.num_layers):
        theta_NLG[:, layer] = _layer_thetas(routed, layer, tokens)
        progress("fitting prices", layer + 1, routed.trace.num_layers)
    return np.round(theta_NLG, THETA_DECIMALS)


def _layer_thetas(routed: RoutedTrace, layer: int, tokens: TokenSelector) -> NDArray[np.float64]:
    """One layer's thetas, [LEVELS + 1, G]."""
    visits, num_tokens = [], 0
    for piece in routed.layer_pieces(layer, tokens):
        visits.append(kernels.visit_weights(piece.device_TK, piece.weight_TK, piece.before_TK))
        num_tokens += len(piece.home_T)
    device_V, a_V = (np.concatenate(arrays) for arrays in zip(*visits, strict=True))
    cost_GG = routed.topology.cost_matrix()
    devices = range(routed.topology.num_devices)
    columns = [_quantiles(a_V[device_V == d], np.delete(cost_GG[:, d], d), num_tokens) for d in devices]
    return np.stack(columns, axis=1)


def _quantiles(a_V: NDArray[np.float64], cost_H: NDArray[np.float64], num_tokens: int) -> NDArray[np.float64]:
    """One device's thetas, [LEVELS + 1]: midway between the last visit that a level admits and the next.

    Args:
        a_V: weight of every visit to the device.
        cost_H: cost of the visit from each other device; a token lives on each, and on this one, equally often.
        num_tokens: T.
    """
    costs, counts = np.unique(cost_H, return_counts=True)
    keys = np.concatenate([a_V / cost for cost in costs]) if costs.size else np.empty(0)
    expected = np.repeat(counts / (cost_H.size + 1), a_V.size)  # visits that one key stands for
    order = np.argsort(-keys)
    keys, total = keys[order], np.cumsum(expected[order])
    last_of_tie = np.append(keys[1:] != keys[:-1], True)[: keys.size]
    steps, reached = keys[last_of_tie], total[last_of_tie]
    admitted = np.searchsorted(reached, np.arange(LEVELS + 1) / LEVELS * num_tokens, side="right")
    bounds = np.concatenate([[_NEVER], steps, [0.0]])
    theta_N: NDArray[np.float64] = (bounds[admitted] + bounds[admitted + 1]) / 2
    theta_N[admitted == 0] = _NEVER
    theta_N[admitted == steps.size] = 0.0
    theta_N[0] = _NEVER
    return theta_N
