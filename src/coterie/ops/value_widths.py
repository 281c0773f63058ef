"""The widths of the policy `value` on CPUs, as one compiled loop: a dozen torch calls take longer than one token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from coterie.ops.widths import WidthTables


def host_widths(tables: WidthTables) -> Callable[[int, Tensor, Tensor], Tensor]:
    """`tables.widths`, quicker where tensors are on the CPU and the policy is `value` without prices.

    It is for running at once: it leaves torch, so no graph can be captured of it.
    """
    if tables.policy != "value" or tables.priced or tables.tables["threshold"].device.type != "cpu":
        return tables.widths
    value_LES, threshold = tables.tables["value_LES"].numpy(), tables.tables["threshold"].item()

    def widths(layer: int, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        ids, weights = ids_TK.long().contiguous(), weights_TK.detach().float().contiguous()
        width_TK = torch.empty_like(ids)
        fill_value_widths(
            ids.numpy(), weights.numpy(), value_LES[layer], threshold, tables.step, tables.width, width_TK.numpy()
        )
        return width_TK

    return widths


@njit(cache=True, nogil=True)
def fill_value_widths(
    ids_TK: Any, weights_TK: Any, value_ES: Any, threshold: float, step: int, width: int, width_TK: Any
) -> None:  # fmt: skip
    """What `pruning.widths` says for `value` without prices, bit for bit: float32, one operation after the other.

    Args:
        ids_TK: [T, K] int64, experts that exist.
        weights_TK: [T, K] float32, not negative.
        value_ES: [E, S] float32, what the first neuron of every step is worth.
        threshold: of weight x value, a float32 number.
        step: neurons of a step.
        width: neurons of an expert, I.
        width_TK: [T, K] int64, filled.
    """
    tokens, top_k = ids_TK.shape
    for t in range(tokens):
        total = weights_TK[t, 0]
        for k in range(1, top_k):
            total += weights_TK[t, k]
        for k in range(top_k):
            share = weights_TK[t, k] / total if total != 0 else np.float32(1 / top_k)
            count = 0
            for s in range(value_ES.shape[1]):
                count += share * value_ES[ids_TK[t, k], s] >= threshold
            width_TK[t, k] = min(count * step, width)
