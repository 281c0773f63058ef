"""What tells tiers and roles apart, and how wide they run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError
from coterie.pruning.tiers import TIERS, tiers_from


@dataclass(frozen=True)
class TierSettings:
    """CRISP's settings, with the paper's values. Source: CRISP §3.3.

    Attributes:
        alpha: share of the uses that hot combinations hold.
        beta: share that hot and warm ones hold.
        warm_aux: width of the auxiliary expert of a warm combination, as a share of I.
        cold_aux: the same for a cold one.
        role_widths: (dominant, auxiliary) for hot, warm and cold, in place of the two above: any shares of I.
        prices: for the policy value, what the bytes of a hot, a warm and a cold combination cost; None: all the same.
        dominance: the method in the profile that tells who dominates; None: the best one there.
    """

    alpha: float = 0.6
    beta: float = 0.9
    warm_aux: float = 0.5
    cold_aux: float = 0.0
    role_widths: Sequence[tuple[float, float]] | None = None
    prices: Sequence[float] | None = None
    dominance: str | None = None

    def __post_init__(self) -> None:
        tiers_from(np.zeros((0, 0, 0)), self.alpha, self.beta)  # refuses thresholds that do not rise
        self.shares(symmetric=False)
        prices = self.prices
        if prices is not None and (len(prices) != len(TIERS) or not all(0 < price < math.inf for price in prices)):
            raise ConfigError(f"prices {_listed(prices)} are not three positive numbers for hot, warm and cold")

    def shares(self, symmetric: bool) -> NDArray[np.float64]:
        """[3, 2] width of every (tier, role) as a share of I; symmetric: both roles share their tier's bytes equally.

        Raises:
            ConfigError: when a width is not within 0 and 1, or some are missing.
        """
        given = self.role_widths or ((1.0, 1.0), (1.0, self.warm_aux), (1.0, self.cold_aux))
        flat = [share for pair in given for share in pair]
        if len(flat) != 2 * len(TIERS) or not all(0 <= share <= 1 for share in flat):
            raise ConfigError(
                f"widths {_listed(flat)} are not (dominant, auxiliary) for each of hot, warm and cold, within 0 and 1"
            )
        share_CR = np.array(flat, dtype=np.float64).reshape(len(TIERS), 2)
        return share_CR.mean(1, keepdims=True).repeat(2, 1) if symmetric else share_CR

    def bounds(self, not_hot: float) -> tuple[float, float]:
        """Alpha and beta where a share `not_hot` of the uses is not hot, with (1 - beta) / (1 - alpha) as given."""
        if not_hot == 1 - self.alpha:
            return self.alpha, self.beta
        cold = (1 - self.beta) / (1 - self.alpha) if self.alpha < 1 else 0.0
        return 1 - not_hot, 1 - not_hot * cold


def _listed(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)
