"""Straight lines through measured times: a fixed time, and so much for every unit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True)
class Line:
    """seconds = base + slope x units.

    Attributes:
        base: fixed time, seconds, at least 0.
        slope: seconds a unit, at least 0.
        residual: the largest difference of a measured time from the line, as a share of the measured time.
    """

    base: float
    slope: float
    residual: float

    def at(self, units: float) -> float:
        """Seconds for so many units."""
        return self.base + self.slope * units


def fit_line(units: ArrayLike, seconds: ArrayLike) -> Line:
    """The line that makes relative differences least in squares, with neither part below 0.

    Relative, since the sizes span powers of ten and the small ones tell the fixed time (the alpha-beta model of links).

    Args:
        units: [N] bytes or pairs, at least two different.
        seconds: [N] measured, above 0.
    """
    x, y = np.asarray(units, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    assert x.size == y.size >= 2
    assert (y > 0).all()
    columns = np.stack([1 / y, x / y], axis=1)
    base, slope = np.linalg.lstsq(columns, np.ones_like(y), rcond=None)[0]
    if base < 0 or slope < 0:  # the best of the two lines that touch the bound
        through_zero = (0.0, float((columns[:, 1]).sum() / (columns[:, 1] ** 2).sum()))
        flat = (float(columns[:, 0].sum() / (columns[:, 0] ** 2).sum()), 0.0)
        base, slope = min(through_zero, flat, key=lambda line: float(((columns @ line - 1) ** 2).sum()))
    residual = float(np.abs(columns @ np.array([base, slope]) - 1).max())
    return Line(float(base), float(slope), residual)
