"""A policy's curve of bytes against loss, read between its points, with what resampling windows does to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from coterie.study.widths.context import Point
from coterie.study.widths.estimates import Estimate, estimate

Losses = NDArray[np.float64]
"""[W, S] of a point: rise of the loss, or KL, of every token."""


class Curve:
    """Points by falling bytes, from full width on, where nothing is lost.

    Between two points the loss is taken to be straight. Curves bend the other way (the last bytes cost most), so this
    errs to the curve's disadvantage.
    """

    def __init__(self, points: Sequence[Point], loss: Callable[[Point], Losses]) -> None:
        """Take the points that are narrower than full width.

        Args:
            points: of one policy on one bench, at least one.
            loss: which loss to read.
        """
        falling = sorted((point for point in points if point.bytes < 1), key=lambda point: -point.bytes)
        self._loss = loss
        self.bytes_P = np.array([1.0, *(point.bytes for point in falling)])
        self._sums_WP = np.stack([loss(point).sum(1) for point in falling], axis=1).astype(np.float64)
        self._tokens = float(loss(falling[0]).shape[1])

    @property
    def least_bytes(self) -> float:
        """Bytes of the narrowest point."""
        return float(self.bytes_P[-1])

    def further_at_equal_bytes(self, point: Point, seed: int = 0) -> Estimate:
        """How much more another policy's point loses than this curve at as many bytes, nats a token; below 0: less.

        Args:
            point: of the same bench, with no fewer bytes than the curve's narrowest.
            seed: of the resampling.
        """
        assert point.bytes >= self.least_bytes

        def figure(sums_RX: NDArray[np.float64]) -> NDArray[np.float64]:
            curve_RP, own_R = self._split(sums_RX)
            at_R = [np.interp(point.bytes, self.bytes_P[::-1], curve_P[::-1]) for curve_P in curve_RP]
            further: NDArray[np.float64] = own_R - np.array(at_R)
            return further

        return estimate(self._with(point), figure, seed)

    def bytes_at_equal_loss(self, point: Point, seed: int = 0) -> Estimate:
        """Bytes at which this curve loses what another policy's point does.

        Going from full width down, the first place where the loss passes the point's; the narrowest point's bytes
        where it never does, so the curve needs no more than that.
        """

        def figure(sums_RX: NDArray[np.float64]) -> NDArray[np.float64]:
            curve_RP, own_R = self._split(sums_RX)
            return np.array(
                [crossing(self.bytes_P, curve_P, own) for curve_P, own in zip(curve_RP, own_R, strict=True)]
            )

        return estimate(self._with(point), figure, seed)

    def _with(self, point: Point) -> NDArray[np.float64]:
        """[W, P + 2] sums of every window: the curve's points, the other point, tokens."""
        own_W1 = self._loss(point).sum(1, keepdims=True)
        return np.concatenate([self._sums_WP, own_W1, np.full_like(own_W1, self._tokens, dtype=np.float64)], axis=1)

    def _split(self, sums_RX: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean loss along the curve, full width first, [R, P], and of the other point, [R]."""
        mean_RX = sums_RX[:, :-1] / sums_RX[:, -1:]
        return np.concatenate([np.zeros_like(mean_RX[:, :1]), mean_RX[:, :-1]], axis=1), mean_RX[:, -1]


def crossing(bytes_P: NDArray[np.float64], loss_P: NDArray[np.float64], level: float) -> float:
    """Bytes where a loss first passes a level, going along the points.

    Args:
        bytes_P: [P] falling.
        loss_P: [P] loss there.
        level: the loss to find.

    Returns:
        The first bytes if the loss is above the level there already, the last if it is nowhere.
    """
    above = np.flatnonzero(loss_P > level)
    if not above.size:
        return float(bytes_P[-1])
    at = int(above[0])
    if at == 0:
        return float(bytes_P[0])
    share = (level - loss_P[at - 1]) / (loss_P[at] - loss_P[at - 1])
    return float(bytes_P[at - 1] + share * (bytes_P[at] - bytes_P[at - 1]))


def rise(point: Point) -> Losses:
    """Rise of the negative log-likelihood, nats."""
    return point.measured.nll_WS - point.measured.base_WS


def divergence(point: Point) -> Losses:
    """KL from the unchanged model, nats."""
    return point.measured.kl_WS.astype(np.float64)
