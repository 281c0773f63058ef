"""Ratios of sums over windows (or other units), with intervals from resampling those."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_RESAMPLES = 1000


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95% interval; NaN where there is nothing to tell it by."""

    value: float
    low: float
    high: float

    def to_json(self) -> dict[str, Any]:
        """Value and interval; None for what is not a number."""
        return {"value": _plain(self.value), "interval_95": [_plain(self.low), _plain(self.high)]}


def estimate(
    sums_UX: NDArray[Any], figure: Callable[[NDArray[np.float64]], NDArray[np.float64]], seed: int = 0
) -> Estimate:
    """A figure of summed columns, and its bootstrap interval.

    Args:
        sums_UX: [U, X], what each unit (a window, a pair, an expert) adds to X sums.
        figure: from [R, X] sums to [R] figures, row by row, e.g. a ratio of two columns.
        seed: of the resampling.
    """
    values_UX = np.asarray(sums_UX, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(len(values_UX), size=(_RESAMPLES, len(values_UX)))
    # how often each unit was drawn, so that a resample is one matrix product however many columns there are
    times_RU = np.stack([np.bincount(row, minlength=len(values_UX)) for row in picks]).astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(figure(values_UX.sum(0, keepdims=True))[0])
        drawn_R = figure(times_RU @ values_UX)
    drawn_R = drawn_R[np.isfinite(drawn_R)]
    low, high = np.quantile(drawn_R, (0.025, 0.975)) if drawn_R.size else (math.nan, math.nan)
    return Estimate(value, float(low), float(high))


def ratio(above: int = 0, below: int = 1) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
    """The figure "column `above` over column `below`"."""
    return lambda sums_RX: sums_RX[:, above] / sums_RX[:, below]


def ratio_of_means(sums_RX: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of the columns (sum, count, other sum, other count): the first mean over the second."""
    first_R, second_R = sums_RX[:, 0] / sums_RX[:, 1], sums_RX[:, 2] / sums_RX[:, 3]
    # where the second may be zero or below, a ratio says nothing
    return np.where(second_R > 0, first_R / np.where(second_R > 0, second_R, 1.0), np.nan)


def kept(sums_RX: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of the columns (rise of the log-likelihood loss, tokens): perplexity before over perplexity after."""
    return np.exp(-sums_RX[:, 0] / sums_RX[:, 1])


def increase(sums_RX: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of the columns (rise of the log-likelihood loss, tokens): relative increase of perplexity."""
    return np.expm1(sums_RX[:, 0] / sums_RX[:, 1])


def plain(value: Any) -> Any:
    """A value as JSON has it: estimates and arrays unpacked, None for NaN and infinities."""
    if isinstance(value, Estimate):
        return value.to_json()
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        value = value.item()
    return _plain(value) if isinstance(value, float) else value


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None
