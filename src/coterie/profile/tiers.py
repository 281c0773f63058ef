"""Hot, warm and cold combinations, and how many uses sit in combinations whose tier the counts cannot tell."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie.profile.model_profile import ModelProfile

HOT, WARM, COLD = 0, 1, 2
_DRAWS = 16


def tiers(counts_EE: NDArray[np.int64], alpha: float = 0.6, beta: float = 0.9) -> NDArray[np.int8]:
    """The tier of every pair: `HOT`, `WARM` or `COLD`.

    Source: CRISP section 3.3.1: pairs by falling frequency, hot up to a share alpha of the uses, warm up to beta; the
    pair that crosses a threshold is the last below it. Unseen pairs are cold.

    Args:
        counts_EE: [E, E] symmetric uses.
        alpha: share of the uses that hot pairs hold.
        beta: share that hot and warm pairs hold.

    Returns:
        [E, E] int8, symmetric; the diagonal is cold.
    """
    rows, columns = np.triu_indices(len(counts_EE), 1)
    table = np.full(counts_EE.shape, COLD, dtype=np.int8)
    table[rows, columns] = table[columns, rows] = _tiers_of(counts_EE[rows, columns], alpha, beta)
    return table


def tier_error(profile: ModelProfile, alpha: float = 0.6, beta: float = 0.9) -> float:
    """About which share of the uses sits in pairs that chance put into another tier than they belong to.

    Source: beyond the paper. Each layer's counts are drawn anew, 16 times, as if every use fell independently
    (Poisson); uses of pairs that change tier are averaged over draws and layers. It is chance within one kind of text
    that this tells of: topics make real uses come in bursts, and another kind of text has other pairs.

    Args:
        profile: of a model.
        alpha: see `tiers`.
        beta: see `tiers`.

    Returns:
        Within [0, 1]; 0.0 for top-1 routing, which has no pairs.
    """
    rng = np.random.default_rng(0)
    rows, columns = np.triu_indices(profile.spec.num_experts, 1)
    shares = []
    for counts_EE in profile.pairs_LEE:
        uses = counts_EE[rows, columns]
        if not uses.any():
            continue
        tier = _tiers_of(uses, alpha, beta)
        for _ in range(_DRAWS):
            drawn = _tiers_of(rng.poisson(uses), alpha, beta)
            shares.append(uses[drawn != tier].sum() / uses.sum())
    return float(np.mean(shares)) if shares else 0.0


def _tiers_of(uses_P: NDArray[np.int64], alpha: float, beta: float) -> NDArray[np.int8]:
    order = np.argsort(-uses_P, kind="stable")
    before = np.cumsum(uses_P[order]) - uses_P[order]  # uses of more frequent pairs: below alpha, this one is hot
    total = uses_P.sum()
    tier = np.full(uses_P.shape, COLD, dtype=np.int8)
    seen = uses_P[order] > 0
    tier[order[seen & (before < beta * total - 1e-9)]] = WARM
    tier[order[seen & (before < alpha * total - 1e-9)]] = HOT
    return tier
