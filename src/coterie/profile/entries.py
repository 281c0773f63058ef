"""Routing decisions as the counting kernels read them: one dtype and layout, a bounded piece at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.trace.check import pieces


def entries(
    ids_TK: NDArray[Any], kept_TK: NDArray[np.bool_] | None, num_experts: int
) -> Iterator[tuple[slice, NDArray[np.int32], NDArray[np.bool_]]]:
    """Contiguous, writable copies of the ids and of what is kept, so that each kernel compiles once.

    Args:
        ids_TK: [T, K] expert ids of any integer type; may be memory-mapped.
        kept_TK: [T, K] which of them count, or None: all.
        num_experts: E; the ids must lie below it, which reading a trace has checked.

    Yields:
        For each piece of tokens its slice, [t, K] int32 ids and [t, K] bool.
    """
    assert kept_TK is None or kept_TK.shape == ids_TK.shape
    for piece in pieces(len(ids_TK)):
        ids = np.array(ids_TK[piece], dtype=np.int32, order="C")
        assert ids.min() >= 0, "the kernels index by these ids"
        assert ids.max() < num_experts, "the kernels index by these ids"
        kept = np.ones(ids.shape, np.bool_) if kept_TK is None else np.array(kept_TK[piece], np.bool_, order="C")
        yield piece, ids, kept
