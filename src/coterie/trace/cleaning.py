"""Rows that no user's token made: an engine's warm-up and its padding."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.trace.check import pieces
from coterie.trace.routing_trace import TOKEN_FIELDS, RoutingTrace
from coterie.trace.storage import describe, writing

MIN_RUN_ROWS = 4
NEGLIGIBLE_BITS = 256.0


@dataclass(frozen=True)
class IdleRows:
    """Which rows no token made.

    Attributes:
        keep_T: [T] bool, false for idle rows.
        warm_up: idle rows in runs before the first real token.
        padding: all others.
    """

    keep_T: NDArray[np.bool_]
    warm_up: int
    padding: int


def find_idle_rows(ids_LTK: NDArray[Any], kept_LTK: NDArray[Any] | None, num_experts: int) -> IdleRows:
    """Find the rows of warm-up and padding.

    A run of consecutive tokens with the same experts in every layer is idle when chance does not make such runs: at
    least 4 rows, and (rows - 1) repetitions of one in C(E, K) sets in each of L layers carry at least 256 bits. A row
    whose ids are all zero (K > 1: one expert K times, which no router chooses) or that keeps nothing is padding.
    Most tokens are settled by the first layer or two; the others are not read for them.

    Args:
        ids_LTK: [L, T, K] expert ids; may be memory-mapped.
        kept_LTK: [L, T, K] bool, or None: all kept.
        num_experts: E.
    """
    num_layers, num_tokens, top_k = ids_LTK.shape
    blank_T = np.zeros(num_tokens, dtype=np.bool_)
    repeats_T = np.zeros(num_tokens, dtype=np.bool_)
    for tokens in pieces(num_tokens):
        first = max(tokens.start - 1, 0)
        zero, unused = np.full(tokens.stop - first, top_k > 1), np.full(tokens.stop - first, kept_LTK is not None)
        same = np.ones(tokens.stop - first - 1, dtype=np.bool_)
        for layer in range(num_layers):
            if not (same.any() or zero.any() or unused.any()):
                break
            ids = np.asarray(ids_LTK[layer, first : tokens.stop])
            zero &= ~ids.any(axis=1)
            same &= (ids[1:] == ids[:-1]).all(axis=1)
            if kept_LTK is not None:
                kept = np.asarray(kept_LTK[layer, first : tokens.stop])
                unused &= ~kept.any(axis=1)
                same &= (kept[1:] == kept[:-1]).all(axis=1)
        blank_T[first : tokens.stop] = zero | unused
        repeats_T[first + 1 : tokens.stop] = same
    run_T = np.zeros(num_tokens, dtype=np.bool_)
    shortest = _shortest_run(num_layers, top_k, num_experts)
    for begin, end in _runs(repeats_T):
        run_T[begin:end] = end - begin >= shortest
    idle_T = blank_T | run_T
    first_real = num_tokens if idle_T.all() else int(np.argmin(idle_T))
    warm_up = int((run_T & ~blank_T)[:first_real].sum())
    return IdleRows(~idle_T, warm_up, int(idle_T.sum()) - warm_up)


def _shortest_run(num_layers: int, top_k: int, num_experts: int) -> float:
    """The fewest identical rows that chance does not explain."""
    bits = num_layers * math.log2(max(1, math.comb(num_experts, top_k)))
    return max(MIN_RUN_ROWS, math.ceil(NEGLIGIBLE_BITS / bits) + 1) if bits else math.inf


def _runs(repeats_T: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Begin and end of each maximal run of equal rows, of at least two rows, from "equals the row before it"."""
    edges = np.flatnonzero(np.diff(repeats_T.astype(np.int8), prepend=0, append=0))
    for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        yield begin - 1, end


def select_tokens(trace: RoutingTrace, keep_T: NDArray[np.bool_], dtype: type[Any], path: Path) -> RoutingTrace:
    """Copy the selected tokens to a memory-mapped file, a piece at a time.

    Args:
        trace: the trace to copy from.
        keep_T: [T] bool, which tokens to copy; at least one.
        dtype: of the copied expert ids; it must hold them.
        path: the file to make.
    """
    count = int(keep_T.sum())
    shape = (trace.num_layers, count, trace.spec.top_k)
    held = {name: getattr(trace, name) for name in ("expert_ids", "weights", "kept", *TOKEN_FIELDS)}
    held = {name: values for name, values in held.items() if values is not None}
    arrays = {
        name: (dtype if name == "expert_ids" else values.dtype, shape if values.ndim == 3 else shape[1:2])
        for name, values in held.items()
    }
    with writing(path, arrays, describe(trace)) as target:
        for name, values in held.items():
            for row in range(len(values)) if values.ndim == 3 else (...,):
                start = 0
                for tokens in pieces(trace.num_tokens):
                    chosen = values[row][tokens][keep_T[tokens]]
                    target[name][row][start : start + len(chosen)] = chosen
                    start += len(chosen)
    changed: dict[str, Any] = dict(target)
    return replace(trace, **changed)
