"""The cache's decisions as compiled loops; `reference.py` says the same in plain Python.

Reserved blocks are resident or on their way; arrived ones are resident. What is pinned or on its way never goes.
"""

from __future__ import annotations

from typing import Any

from numba import njit


@njit(cache=True, nogil=True)
def fill_need(ids_N: Any, blocks_N: Any, need_E: Any) -> None:
    """The most blocks that any entry asks of each expert."""
    need_E[:] = 0
    for n in range(ids_N.size):
        need_E[ids_N[n]] = max(need_E[ids_N[n]], blocks_N[n])


@njit(cache=True, nogil=True)
def floor_of(i: int, j: int, reserved_LE: Any, arrived_LE: Any, pinned_LE: Any) -> int:
    """Blocks of expert j of layer i that may not be evicted."""
    if arrived_LE[i, j] < reserved_LE[i, j]:
        return int(reserved_LE[i, j])
    return int(pinned_LE[i, j])


@njit(cache=True, nogil=True)
def evictable(reserved_LE: Any, arrived_LE: Any, pinned_LE: Any) -> int:
    """How many blocks may be evicted."""
    total = 0
    for i in range(reserved_LE.shape[0]):
        for j in range(reserved_LE.shape[1]):
            total += max(0, reserved_LE[i, j] - floor_of(i, j, reserved_LE, arrived_LE, pinned_LE))
    return total


@njit(cache=True, nogil=True)
def _fullest_layer(now: int, share: float, reserved_LE: Any, arrived_LE: Any, pinned_LE: Any, coming: int) -> int:
    """The layer furthest over its share among those with something to evict; of equals the one visited last."""
    best, most = -1, 0.0
    for step in range(reserved_LE.shape[0]):
        i = (now - step) % reserved_LE.shape[0]
        held, free = 0, False
        for j in range(reserved_LE.shape[1]):
            held += reserved_LE[i, j]
            free = free or reserved_LE[i, j] > floor_of(i, j, reserved_LE, arrived_LE, pinned_LE)
        over = held + (coming if i == now else 0) - share
        if free and (best < 0 or over > most):
            best, most = i, over
    return best


@njit(cache=True, nogil=True)
def make_room(
    now: int, short: int, coming: int, share: float, whole: bool, score_LEB: Any, near_D: Any,
    reserved_LE: Any, arrived_LE: Any, pinned_LE: Any, out_N3: Any,
) -> tuple[int, int]:  # fmt: skip
    """Evict `short` blocks, always the tail block worth least (of equals: lowest layer, then expert).

    Args:
        now: the layer visited last.
        short: blocks to evict; at least as many are evictable.
        coming: blocks about to be reserved for layer `now`.
        share: a layer's equal share of the memory in blocks; negative: layers have no shares.
        whole: evict all of an expert that may go, even where fewer blocks would do.
        score_LEB: worth of blocks.
        near_D: factor by the distance of a layer.
        reserved_LE: changed in place.
        arrived_LE: changed in place.
        pinned_LE: blocks that stay.
        out_N3: [N, 3], filled with the (layer, expert, blocks kept) of every eviction.

    Returns:
        how many rows were filled, and how many blocks evicted.
    """
    num_layers, num_experts = reserved_LE.shape
    count, evicted = 0, 0
    while short > 0:
        only = -1
        if share >= 0:
            only = _fullest_layer(now, share, reserved_LE, arrived_LE, pinned_LE, coming)
        vi, vj, worst, ni, nj, next_worst = -1, -1, 0.0, -1, -1, 0.0
        for i in range(num_layers):
            if only >= 0 and i != only:
                continue
            near = near_D[(i - now - 1) % num_layers]
            for j in range(num_experts):
                held = reserved_LE[i, j]
                if held <= floor_of(i, j, reserved_LE, arrived_LE, pinned_LE):
                    continue
                worth = score_LEB[i, j, held - 1] * near
                if vi < 0 or worth < worst:
                    ni, nj, next_worst = vi, vj, worst
                    vi, vj, worst = i, j, worth
                elif ni < 0 or worth < next_worst:
                    ni, nj, next_worst = i, j, worth
        near = near_D[(vi - now - 1) % num_layers]
        stays = floor_of(vi, vj, reserved_LE, arrived_LE, pinned_LE)
        held = reserved_LE[vi, vj]
        limit = held if whole else 1 if only >= 0 else short
        while held > stays and limit > 0:
            worth = score_LEB[vi, vj, held - 1] * near
            if not whole and ni >= 0 and (worth > next_worst or (worth == next_worst and (vi, vj) > (ni, nj))):
                break
            held -= 1
            limit -= 1
            short -= 1
            evicted += 1
        reserved_LE[vi, vj] = held
        arrived_LE[vi, vj] = held
        if count and out_N3[count - 1, 0] == vi and out_N3[count - 1, 1] == vj:
            count -= 1
        out_N3[count, 0], out_N3[count, 1], out_N3[count, 2] = vi, vj, held
        count += 1
    return count, evicted


@njit(cache=True, nogil=True)
def missing_of(layer: int, need_E: Any, reserved_LE: Any, out_N3: Any) -> int:
    """Fill (expert, first block, one past the last) of what must be read for a layer; how many rows."""
    count = 0
    for e in range(need_E.size):
        if need_E[e] > reserved_LE[layer, e]:
            out_N3[count, 0], out_N3[count, 1], out_N3[count, 2] = e, reserved_LE[layer, e], need_E[e]
            count += 1
    return count
