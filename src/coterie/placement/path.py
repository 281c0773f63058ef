"""From candidates of every layer to placements of the model: the path from cheapest to most balanced.

A step of a model takes the sum over layers of what each layer takes, so what counts is the mean over layers of
cost and of B. Lowering mean B at the least mean cost is a chain of per-layer steps along each layer's lower
convex hull of (B, cost), taken in order of their price, cost per B: the classic greedy for a sum of convex
functions, optimal at every step. (One limit B_k for all layers, as in algorithms §2, spends balance where it
is dear; the greedy never does worse on the means.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Path:
    """Points from the cheapest to the most balanced; S steps, so S + 1 points.

    Attributes:
        start_L: [L] candidate of each layer at the first point.
        layer_S: [S] layer that each step changes.
        candidate_S: [S] the candidate it changes to.
        price_S: [S] cost per B of each step, rising.
    """

    start_L: NDArray[np.int64]
    layer_S: NDArray[np.int64]
    candidate_S: NDArray[np.int64]
    price_S: NDArray[np.float64]

    @property
    def num_points(self) -> int:
        """Points on the path."""
        return self.layer_S.size + 1

    def choice(self, point: int) -> NDArray[np.int64]:
        """The candidate of every layer at a point, [L]."""
        choice_L = self.start_L.copy()
        for layer, candidate in zip(self.layer_S[:point], self.candidate_S[:point], strict=True):
            choice_L[layer] = candidate
        return choice_L

    def at_price(self, price: float) -> int:
        """The point after all steps that cost at most `price` per B."""
        return int(np.searchsorted(self.price_S, price, side="right"))

    def table(self, values: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
        """A value of the chosen candidate of every layer at every point, [S + 1, L].

        Args:
            values: for each layer the value of each candidate, [A].
        """
        current_L = np.array([values[layer][candidate] for layer, candidate in enumerate(self.start_L)])
        rows = [current_L.copy()]
        for layer, candidate in zip(self.layer_S, self.candidate_S, strict=True):
            current_L[layer] = values[layer][candidate]
            rows.append(current_L.copy())
        return np.stack(rows)

    def means(self, values: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
        """The mean over layers of `table`, [S + 1]."""
        means: NDArray[np.float64] = self.table(values).mean(axis=1)
        return means


def build_path(costs: Sequence[NDArray[np.float64]], balances: Sequence[NDArray[np.float64]]) -> Path:
    """The path through candidates with these costs and B.

    Args:
        costs: for each layer the cost of each candidate, [A].
        balances: for each layer the B of each candidate, [A].
    """
    starts, steps = [], []
    for layer, (cost, balance) in enumerate(zip(costs, balances, strict=True)):
        hull = lower_hull(balance, cost)
        starts.append(hull[0])
        for before, after in pairwise(hull):
            price = (cost[after] - cost[before]) / (balance[before] - balance[after])
            steps.append((float(price), layer, after))
    steps.sort(key=lambda step: step[:2])  # prices rise along a hull, so a layer's own steps stay in order
    columns: list[Any] = [list(column) for column in zip(*steps, strict=True)] or [[], [], []]
    return Path(
        np.asarray(starts, dtype=np.int64), np.asarray(columns[1], dtype=np.int64),
        np.asarray(columns[2], dtype=np.int64), np.asarray(columns[0], dtype=np.float64),
    )  # fmt: skip


def lower_hull(balance: NDArray[np.float64], cost: NDArray[np.float64]) -> list[int]:
    """Candidates on the lower convex hull, from the cheapest to the one with the smallest B."""
    hull: list[int] = []
    for candidate in sorted(range(cost.size), key=lambda i: (cost[i], balance[i])):
        if hull and balance[candidate] >= balance[hull[-1]]:
            continue
        while len(hull) > 1 and _price(balance, cost, hull[-2], hull[-1]) >= _price(balance, cost, hull[-1], candidate):
            hull.pop()
        if len(hull) == 1 and cost[candidate] <= cost[hull[0]]:
            hull.pop()
        hull.append(candidate)
    return hull


def _price(balance: NDArray[np.float64], cost: NDArray[np.float64], before: int, after: int) -> float:
    return float((cost[after] - cost[before]) / (balance[before] - balance[after]))
