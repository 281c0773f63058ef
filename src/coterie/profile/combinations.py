"""Which experts are chosen together, as the pairs that width pruning tells apart, and how skewed their use is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numba import njit
from numpy.typing import NDArray

from coterie.errors import TraceError, unknown_name
from coterie.profile.coactivation import coactivation_counts
from coterie.profile.entries import entries
from coterie.trace.routing_trace import ALL_TOKENS, RoutingTrace, TokenSelector

PairKind = Literal["anchor pairs", "pairs"]
PAIR_KINDS: tuple[PairKind, ...] = ("anchor pairs", "pairs")


def natural_pairs(trace: RoutingTrace) -> PairKind:
    """The combinations a trace can tell: "anchor pairs", or all "pairs" where it has neither weights nor an order."""
    can_tell = trace.spec.top_k <= 2 or trace.weight_ordered or trace.weights is not None
    return "anchor pairs" if can_tell else "pairs"


def combination_counts(
    trace: RoutingTrace, layer: int, tokens: TokenSelector = ALL_TOKENS, pairs: PairKind = "anchor pairs"
) -> NDArray[np.int64]:
    """Uses of every combination of experts in one layer.

    With top-2 a combination is the pair of chosen experts. With more, whole sets of K are nearly unique, so a token
    is read as its anchor pairs: its highest-weighted expert with each other one it chose. Only kept entries count.

    Source: CRISP sections 2.1 and 3.3.1 for pairs; anchor pairs are this package's reading of K > 2, equal at K = 2.

    Args:
        trace: the trace.
        layer: MoE layer.
        tokens: which tokens count.
        pairs: "anchor pairs", or "pairs": every two experts that a token chose, for traces that cannot tell
            the anchor.

    Returns:
        [E, E] int64 uses, symmetric (a pair is unordered), zero on the diagonal.

    Raises:
        TraceError: when the anchor is asked for and K > 2, but the trace has neither weights nor an order by weight.
        ConfigError: for an unknown kind of pairs.
    """
    if pairs not in PAIR_KINDS:
        raise unknown_name("kind of pairs", pairs, PAIR_KINDS)
    routing = trace.layer(layer, tokens)
    if pairs == "pairs" or trace.spec.top_k <= 2:
        counts_EE = coactivation_counts(routing.expert_ids_TK, routing.kept_TK, trace.spec.num_experts)
        np.fill_diagonal(counts_EE, 0)
        return counts_EE
    weights_TK = None if trace.weight_ordered else routing.weights_TK
    if weights_TK is None and not trace.weight_ordered:
        raise TraceError(
            f"anchor pairs of top-{trace.spec.top_k} routing need each token's highest-weighted expert, and this trace "
            'has neither weights nor an order by weight; record them (topk_weights) or count all "pairs"'
        )
    return anchor_pair_counts(routing.expert_ids_TK, weights_TK, routing.kept_TK, trace.spec.num_experts)


def anchor_pair_counts(
    ids_TK: NDArray[Any], weights_TK: NDArray[Any] | None, kept_TK: NDArray[np.bool_] | None, num_experts: int
) -> NDArray[np.int64]:
    """Uses of every pair (a token's highest-weighted kept expert, another kept one).

    Args:
        ids_TK: [T, K] expert ids, distinct within a token, all below `num_experts`.
        weights_TK: [T, K] routing weights, or None: slots are ordered by falling weight. Of equal weights the
            first slot's is the highest.
        kept_TK: [T, K] which of them count, or None: all.
        num_experts: E.

    Returns:
        [E, E] int64 uses, symmetric, zero on the diagonal.
    """
    counts_EE = np.zeros((num_experts, num_experts), dtype=np.int64)
    for piece, ids, kept in entries(ids_TK, kept_TK, num_experts):
        # equal weights make the first kept slot the anchor, which is what an order by weight means
        weights = np.zeros(ids.shape) if weights_TK is None else np.array(weights_TK[piece], np.float64, order="C")
        _add_anchor_pairs(ids, weights, kept, counts_EE)
    return counts_EE + counts_EE.T


def top_share(counts_EE: NDArray[np.int64], share: float = 0.25) -> float:
    """Share of the uses that the most frequent combinations hold.

    Source: CRISP section 2.1, "the top 25% of expert combinations". The combinations are all E(E-1)/2 unordered
    pairs, unseen ones included: the definition under which published figures compare across traces of any length.

    Args:
        counts_EE: [E, E] symmetric uses from `combination_counts`.
        share: which part of the combinations is meant by the most frequent, in (0, 1]; rounded up to whole ones.

    Returns:
        Within [0, 1]; 0.0 where there are no uses.
    """
    uses = _falling_uses(counts_EE)
    total = uses.sum()
    # the margin keeps 0.1 * 30 = 3.0000000000000004 from counting as four combinations
    count = int(np.ceil(share * uses.size - 1e-9))
    return float(uses[:count].sum() / total) if total else 0.0


def shares_needed(counts_EE: NDArray[np.int64], uses: Sequence[float] = (0.6, 0.9)) -> tuple[float, ...]:
    """Smallest shares of the combinations that hold given shares of the uses.

    Source: CRISP section 3.3.1, thresholds alpha and beta; combinations as in `top_share`. The combination that
    crosses a threshold is included.

    Args:
        counts_EE: [E, E] symmetric uses from `combination_counts`.
        uses: shares of the uses, each in (0, 1].

    Returns:
        For each a share of the combinations; 0.0 where there are no uses.
    """
    falling = _falling_uses(counts_EE)
    cumulative = np.cumsum(falling)
    total = cumulative[-1] if falling.size else 0
    if not total:
        return tuple(0.0 for _ in uses)
    return tuple(float((np.searchsorted(cumulative, wanted * total - 1e-9) + 1) / falling.size) for wanted in uses)


def _falling_uses(counts_EE: NDArray[np.int64]) -> NDArray[np.int64]:
    """Uses of all unordered pairs, [E(E-1)/2], most used first."""
    return np.sort(counts_EE[np.triu_indices(len(counts_EE), 1)])[::-1]


@njit(cache=True, nogil=True)
def _add_anchor_pairs(
    ids_TK: NDArray[np.int32], weights_TK: NDArray[np.float64], kept_TK: NDArray[np.bool_], counts_EE: NDArray[np.int64]
) -> None:
    num_slots = ids_TK.shape[1]
    for t in range(ids_TK.shape[0]):
        anchor = -1
        for k in range(num_slots):
            if kept_TK[t, k] and (anchor < 0 or weights_TK[t, k] > weights_TK[t, anchor]):
                anchor = k
        for k in range(num_slots):
            if kept_TK[t, k] and k != anchor:
                counts_EE[ids_TK[t, anchor], ids_TK[t, k]] += 1
