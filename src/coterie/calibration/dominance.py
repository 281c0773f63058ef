"""Which expert of a pair is needed more, from routing weights and from one backward pass.

Source: CRISP section 3.3.2 names the dominant expert by ablation (`ablation.py`); both scores here are beyond it. The
Fisher score needs no re-runs: per token s = -w dL/dw is the first-order change of the loss from masking the expert. Its
mean is zero at a trained optimum, so the score is the mean of its square.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def anchor_pairs(
    ids_TK: NDArray[np.integer], weights_TK: NDArray[np.floating]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Slots of every token by falling weight (the first is the anchor); of equal weights the first slot leads.

    Returns:
        ([T, K] int64 slots in that order, [T, K] int64 ids in that order).
    """
    order_TK = np.argsort(-weights_TK, axis=1, kind="stable")
    return order_TK, np.take_along_axis(ids_TK, order_TK, axis=1).astype(np.int64)


def role_sums(ids_TK: NDArray[np.int64], values_TK: NDArray[np.floating], num_experts: int) -> NDArray[np.float64]:
    """Sums over the uses of each pair of what its first member scores.

    Args:
        ids_TK: [T, K] ids by falling weight; the pairs are the first with each other.
        values_TK: [T, K] scores in the same order.
        num_experts: E.

    Returns:
        [E, E] float64: at [i, j] the sum of i's scores over the tokens that use {i, j}.
    """
    anchor_TP = np.broadcast_to(ids_TK[:, :1], ids_TK[:, 1:].shape).reshape(-1)
    other_TP = ids_TK[:, 1:].reshape(-1)
    values = values_TK.astype(np.float64)
    of_anchor = np.broadcast_to(values[:, :1], values[:, 1:].shape).reshape(-1)
    size = num_experts * num_experts
    sums: NDArray[np.float64] = np.zeros(size)
    sums += np.bincount(anchor_TP * num_experts + other_TP, of_anchor, minlength=size)
    sums += np.bincount(other_TP * num_experts + anchor_TP, values[:, 1:].reshape(-1), minlength=size)
    return sums.reshape(num_experts, num_experts)
