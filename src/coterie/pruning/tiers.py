"""How common a combination of experts is: hot, warm or cold."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError

TIERS = ("hot", "warm", "cold")
HOT, WARM, COLD = 0, 1, 2
_MARGIN = 1e-12  # so that thresholds computed from one another do not depend on rounding


def uses_before(pairs_LEE: NDArray[Any]) -> NDArray[np.float64]:
    """The share of its layer's uses that more frequent combinations hold, for every combination.

    Source: CRISP §3.3.1. Of equally frequent pairs the one with the lower experts comes first.

    Args:
        pairs_LEE: [L, E, E] uses, symmetric.

    Returns:
        [L, E, E] in [0, 1), symmetric; infinite for combinations that were never used, and on the diagonal.
    """
    num_layers, num_experts, _ = pairs_LEE.shape
    before_LEE = np.full(pairs_LEE.shape, np.inf)
    low_P, high_P = np.triu_indices(num_experts, 1)
    for layer in range(num_layers):
        before_P = share_before(pairs_LEE[layer, low_P, high_P])
        before_LEE[layer, low_P, high_P] = before_LEE[layer, high_P, low_P] = before_P
    return before_LEE


def share_before(uses_P: NDArray[Any]) -> NDArray[np.float64]:
    """The share of all uses that more frequent combinations hold, for each of a list; infinite for the unused."""
    order_P = np.argsort(-uses_P, kind="stable")
    falling_P = uses_P[order_P]
    share_P = np.full(uses_P.shape, np.inf)
    if falling_P.sum() > 0:
        share_P[order_P] = np.where(falling_P > 0, (np.cumsum(falling_P) - falling_P) / falling_P.sum(), np.inf)
    return share_P


def tiers_from(before: NDArray[np.float64], alpha: float, beta: float) -> NDArray[np.uint8]:
    """The tier of every combination from what `uses_before` or `share_before` gives.

    Hot are the most frequent up to a share alpha of the uses, warm those up to beta, cold the rest and the unseen. The
    combination that crosses a threshold is on the more frequent side.

    Source: CRISP §3.3.1 (alpha 0.6, beta 0.9).

    Returns:
        [L, E, E] uint8, symmetric: 0 hot, 1 warm, 2 cold (also on the diagonal, where nothing is looked up).

    Raises:
        ConfigError: unless 0 <= alpha <= beta <= 1.
    """
    if not 0 <= alpha <= beta <= 1:
        raise ConfigError(
            f"alpha {alpha:g} and beta {beta:g} must be rising shares of the uses within 0 and 1, e.g. 0.6 and 0.9"
        )
    above_alpha, above_beta = before >= alpha - _MARGIN, before >= beta - _MARGIN
    return above_alpha.astype(np.uint8) + above_beta.astype(np.uint8)


def tiers(pairs_LEE: NDArray[Any], alpha: float = 0.6, beta: float = 0.9) -> NDArray[np.uint8]:
    """The tier of every combination from its uses [L, E, E]; see `tiers_from`."""
    return tiers_from(uses_before(pairs_LEE), alpha, beta)


def tier_shares(tier_LEE: NDArray[np.uint8], pairs_LEE: NDArray[Any]) -> dict[str, dict[str, float]]:
    """Each tier's share of the combinations (all E(E-1)/2, unseen ones included) and of the uses, means over layers."""
    low_P, high_P = np.triu_indices(tier_LEE.shape[1], 1)
    tier_LP, uses_LP = tier_LEE[:, low_P, high_P], pairs_LEE[:, low_P, high_P].astype(np.float64)
    share_LP = uses_LP / np.maximum(uses_LP.sum(1, keepdims=True), 1)
    return {
        name: {
            "combinations": float((tier_LP == tier).mean()) if tier_LP.size else 0.0,
            "uses": float((share_LP * (tier_LP == tier)).sum(1).mean()),
        }
        for tier, name in enumerate(TIERS)
    }
