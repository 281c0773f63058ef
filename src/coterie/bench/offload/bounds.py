"""What no runtime can beat: seconds that a token takes at least, from bytes, a bandwidth and the time to compute."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.policies.cache import ExpertCache
from coterie.policies.eviction import EvictionPolicy
from coterie.simulate.offload import Uses


def reads_of(uses: Uses, policy: EvictionPolicy, budget_blocks: int) -> NDArray[np.int64]:
    """Blocks that every token reads, [T], served in order from an empty cache.

    Raises:
        BudgetError: when what a token needs in one layer does not fit.
    """
    cache, read_T = ExpertCache(uses.shape, budget_blocks, policy), np.zeros(len(uses.ids_TLK), np.int64)
    for token in range(len(read_T)):
        for layer in range(uses.shape.num_layers):
            _, blocks = cache.serve(layer, uses.ids_TLK[token, layer], uses.blocks_TLK[token, layer])
            read_T[token] += blocks
    return read_T


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
