"""What a visit asks of each expert, and how that gives way to what is resident; compiled, since decoding waits for it.

Shapes: S = T x K slots, token by token; E experts. Widths are in neurons, `block` of them in a block of the cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit


@njit(cache=True, nogil=True)
def fill_demand(ids_S: Any, widths_S: Any, block: int, width: int, need_E: Any, rows_E: Any, out_N3: Any) -> Any:
    """Blocks that each expert needs for its widest slot.

    Args:
        ids_S: [S] int64, the chosen experts.
        widths_S: [S] int64, neurons that each slot runs.
        block: neurons of a block.
        width: neurons of an expert, I.
        need_E: [E] int32, filled: blocks.
        rows_E: [E] int32, scratch.
        out_N3: [E, 3] int64, filled for every expert that needs any: expert, blocks, slots that run.

    Returns:
        (rows of `out_N3`, experts chosen, skipped ones included, the first slot that cannot be or -1).
    """
    need_E[:] = 0
    rows_E[:] = -1
    chosen = count = 0
    for s in range(ids_S.size):
        e, w = ids_S[s], widths_S[s]
        if e < 0 or e >= need_E.size or w < 0 or w > width:
            return 0, 0, s
        chosen += rows_E[e] < 0
        rows_E[e] = max(rows_E[e], 0) + (w > 0)
        need_E[e] = max(need_E[e], (w + block - 1) // block)
    for e in range(need_E.size):
        if need_E[e] > 0:
            out_N3[count, 0], out_N3[count, 1], out_N3[count, 2] = e, need_E[e], rows_E[e]
            count += 1
    return count, chosen, -1


@njit(cache=True, nogil=True)
def skip_missing(
    ids_S: Any, weights_S: Any, top_k: int, factor: Any, block: int, resident_E: Any, widths_S: Any
) -> int:  # fmt: skip
    """Skip the slots that miss with a weight under F / K, but where another token has their expert read so wide.

    Args:
        ids_S: [S] int64, the chosen experts.
        weights_S: [S] float32, their routing weights, not negative; normalised here over a token's K.
        top_k: slots of a token, K.
        factor: F, float32.
        block: neurons of a block.
        resident_E: [E] int32, blocks that are resident or on their way.
        widths_S: [S] int64, neurons that each slot runs; set to 0 where it is skipped.

    Returns:
        how many slots were skipped.
    """
    reach_E = resident_E.astype(np.int64) * block
    light_S = np.zeros(ids_S.size, np.bool_)
    for first in range(0, ids_S.size, top_k):
        total = weights_S[first]
        for s in range(first + 1, first + top_k):
            total += weights_S[s]
        for s in range(first, first + top_k):
            share = weights_S[s] / total if total > 0 else np.float32(1 / top_k)
            light_S[s] = share * np.float32(top_k) < factor
            if not light_S[s]:
                reach_E[ids_S[s]] = max(reach_E[ids_S[s]], widths_S[s])
    count = 0
    for s in range(ids_S.size):
        if light_S[s] and widths_S[s] > reach_E[ids_S[s]]:
            widths_S[s] = 0
            count += 1
    return count


@njit(cache=True, nogil=True)
def widen_to_resident(
    ids_S: Any, most_S: Any, block: int, width: int, resident_E: Any, pinned_E: Any, widths_S: Any
) -> None:  # fmt: skip
    """Let each slot run the resident prefix of its expert, where that is wider than planned.

    Args:
        ids_S: [S] int64, the chosen experts.
        most_S: [S] int64, neurons beyond which a slot is not widened.
        block: neurons of a block.
        width: neurons of an expert, I.
        resident_E: [E] int32, blocks that have arrived.
        pinned_E: [E] int32, blocks that must stay; raised to what is used.
        widths_S: [S] int64, neurons that each slot runs, raised.
    """
    for s in range(ids_S.size):
        e = ids_S[s]
        free = min(most_S[s], resident_E[e] * block, width)
        if free > widths_S[s]:
            widths_S[s] = free
            pinned_E[e] = max(pinned_E[e], (free + block - 1) // block)
