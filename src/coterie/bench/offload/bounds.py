"""What no runtime can beat: seconds that a token takes at least, from bytes, a bandwidth and the time to compute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.offloading.demand import skip_missing
from coterie.policies.cache import ExpertCache
from coterie.policies.eviction import EvictionPolicy
from coterie.simulate.offload import Uses


def served(
    uses: Uses, policy: EvictionPolicy, budget_blocks: int, weights_TLK: NDArray[Any] | None = None, factor: float = 0
) -> Iterator[tuple[int, NDArray[Any], NDArray[Any], int]]:
    """Serve all uses in order from an empty cache.

    Args:
        uses: what is asked.
        policy: decides evictions.
        budget_blocks: the budget.
        weights_TLK: [T, L, K] float32, routing weights; needed with a factor.
        factor: F of skip-on-miss; 0: nothing is skipped.

    Yields:
        layer, ids [K], blocks [K] that are left after skipping, blocks that were read.

    Raises:
        BudgetError: when what a token needs in one layer does not fit.
    """
    cache = ExpertCache(uses.shape, budget_blocks, policy)
    top_k, wanted = uses.ids_TLK.shape[2], np.float32(factor)
    for token in range(len(uses.ids_TLK)):
        for layer in range(uses.shape.num_layers):
            ids_K, blocks_K = uses.ids_TLK[token, layer], uses.blocks_TLK[token, layer]
            if factor and weights_TLK is not None:
                blocks_K = blocks_K.copy()
                skip_missing(ids_K, weights_TLK[token, layer], top_k, wanted, 1, cache.reserved_LE[layer], blocks_K)
            _, read = cache.serve(layer, ids_K, blocks_K)
            yield layer, ids_K, blocks_K, read


def reads_of(
    uses: Uses, policy: EvictionPolicy, budget_blocks: int, weights_TLK: NDArray[Any] | None = None, factor: float = 0
) -> NDArray[np.int64]:
    """Blocks that every token reads, [T]; see `served`."""
    read = [read for *_, read in served(uses, policy, budget_blocks, weights_TLK, factor)]
    read_T: NDArray[np.int64] = np.array(read, np.int64).reshape(len(uses.ids_TLK), -1).sum(axis=1)
    return read_T


def certain_blocks(uses: Uses, weights_TLK: NDArray[np.float32], factor: float) -> NDArray[np.int64]:
    """[T, L, K] blocks that run whatever is resident: without those that skip-on-miss may skip.

    Args:
        uses: what is asked.
        weights_TLK: [T, L, K] routing weights.
        factor: F; 0: nothing is skipped.
    """
    if not factor:
        return uses.blocks_TLK
    share_TLK = weights_TLK / np.maximum(weights_TLK.sum(axis=2, keepdims=True), np.float32(1e-20))
    certain_TLK: NDArray[np.int64] = np.where(share_TLK * weights_TLK.shape[2] < factor, 0, uses.blocks_TLK)
    return certain_TLK


def beyond_budget(uses: Uses, budget_blocks: int) -> NDArray[np.int64]:
    """Blocks that every token runs beyond what can be resident when it begins, [T]: no cache reads less for it.

    Source: design of the bound for widths, one token at a time.
    """
    beyond_T: NDArray[np.int64] = np.maximum(uses.blocks_TLK.sum(axis=(1, 2)) - budget_blocks, 0)
    return beyond_T


def least_seconds(compute_seconds: float, nbytes: float, bandwidth: float) -> float:
    """The longer of computing and reading, perfectly overlapped.

    Args:
        compute_seconds: of a token, everything resident.
        nbytes: to read for it.
        bandwidth: bytes per second.
    """
    return max(compute_seconds, nbytes / bandwidth)


def segments(total: int, rounds: int, tokens: int, first: int) -> list[NDArray[Any]]:
    """Which tokens each round times: `tokens` consecutive ones, the rounds spread evenly from `first` to `total`.

    Returns:
        One [tokens] array of indices a round.
    """
    room = total - first - tokens
    starts = [first + (room * number) // max(1, rounds - 1) for number in range(rounds)]
    return [np.arange(start, start + tokens) for start in starts]
