"""How many uses sit in combinations whose tier the counts cannot tell."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.profile.combinations import anchor_pair_counts
from coterie.profile.model_profile import ModelProfile
from coterie.pruning.tiers import share_before, tiers_from

_DRAWS = 16
_STRETCHES = 32  # of 8, 16, 32 and 64 nearest to how far other training text moved tiers, on both shipped models


def tier_error(profile: ModelProfile, alpha: float = 0.6, beta: float = 0.9) -> float:
    """About which share of the uses sits in pairs that chance put into another tier than they belong to.

    Source: beyond the paper. Each layer's counts are drawn anew, 16 times, about what they are; uses of pairs that
    change tier are averaged over draws and layers. Uses come in bursts, since texts have topics: how much wider than
    independent uses they scatter is told by the sample, cut into 32 stretches. It is chance within one mixture of texts
    that this tells of; another kind of text has other pairs.

    Args:
        profile: of a model.
        alpha: share of the uses that hot pairs hold.
        beta: share that hot and warm pairs hold.

    Returns:
        Within [0, 1]; 0.0 for top-1 routing, which has no pairs.
    """
    rng = np.random.default_rng(0)
    rows, columns = np.triu_indices(profile.spec.num_experts, 1)
    kept = profile.sample_ids_LSK.shape[1] / profile.num_tokens
    shares = []
    for counts_EE, ids_SK in zip(profile.pairs_LEE, profile.sample_ids_LSK, strict=True):
        uses = counts_EE[rows, columns]
        if not uses.any():
            continue
        tier = tiers_from(share_before(uses), alpha, beta)
        # thinning a text to its sample thins its excess over independent uses by the same factor
        spread = np.sqrt((1 + max(0.0, _dispersion(ids_SK, profile.spec.num_experts) - 1) / kept) * uses)
        for _ in range(_DRAWS):
            drawn = np.maximum(uses + spread * rng.standard_normal(uses.size), 0)
            shares.append(uses[tiers_from(share_before(drawn), alpha, beta) != tier].sum() / uses.sum())
    return float(np.mean(shares)) if shares else 0.0


def _dispersion(ids_SK: NDArray[np.integer[Any]], num_experts: int) -> float:
    """Variance over mean of a pair's uses in stretches of a sample, over all pairs; 1 where uses are independent."""
    stretches = min(_STRETCHES, len(ids_SK))
    if stretches < 2:
        return 1.0
    bounds = np.arange(stretches + 1) * len(ids_SK) // stretches
    counts = np.stack(
        [anchor_pair_counts(ids_SK[start:end], None, None, num_experts) for start, end in itertools.pairwise(bounds)]
    )
    mean = counts.mean(axis=0)
    return float(((counts - mean) ** 2).sum() / (stretches - 1) / mean.sum())
