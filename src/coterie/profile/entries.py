"""Routing decisions as the counting kernels read them: one dtype and layout, so that each compiles once."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def entries(
    ids_TK: NDArray[Any], kept_TK: NDArray[np.bool_] | None, num_experts: int
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Contiguous, writable copies of the ids and of what is kept.

    Args:
        ids_TK: [T, K] expert ids of any integer type.
        kept_TK: [T, K] which of them count, or None: all.
        num_experts: E; the ids must lie below it, which reading a trace has checked.

    Returns:
        [T, K] int32 ids and [T, K] bool.
    """
    ids = np.array(ids_TK, dtype=np.int32, order="C")
    assert ids.size == 0 or (ids.min() >= 0 and ids.max() < num_experts), "the kernels index by these ids"
    kept = np.ones(ids.shape, dtype=np.bool_) if kept_TK is None else np.array(kept_TK, dtype=np.bool_, order="C")
    assert kept.shape == ids.shape
    return ids, kept
