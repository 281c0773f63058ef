"""What pruning saves and what it costs: remote visits, and the routing weight that is kept."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie.pruning.destinations import LayerTokens


def remote_visits(tokens: LayerTokens, kept_TK: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Tokens that visit each device without living there, [G]."""
    from coterie.pruning import kernels

    return kernels.count_remote_visits(tokens.device_TK, kept_TK, tokens.home_T, len(tokens.cost_GG))


def remote_dpt(visits_G: NDArray[np.int64], num_tokens: int) -> float:
    """Remote devices per token: mean number of devices other than home that a token visits (CAP §II-C)."""
    return float(visits_G.sum() / num_tokens)


def remote_peak_traffic(visits_G: NDArray[np.int64], num_tokens: int) -> float:
    """Share of the tokens that visit the busiest device without living there: an all-to-all ends when it ends."""
    return float(visits_G.max() / num_tokens)


def kept_weight(tokens: LayerTokens, kept_TK: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Share of each token's routing weight that is still kept, [T]; 1 for a token that had nothing to lose."""
    from coterie.pruning import kernels

    return kernels.kept_weight(tokens.weight_TK, tokens.before_TK, kept_TK)
