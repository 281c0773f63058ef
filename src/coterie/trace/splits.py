"""Which tokens fit, which validate, which only measure: whole sequences, in order, so that drift is included."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, TraceError
from coterie.trace.routing_trace import ALL_TOKENS, RoutingTrace, TokenSelector


@dataclass(frozen=True)
class Split:
    """A trace's tokens in two parts.

    Attributes:
        first: selects the tokens of the earlier sequences.
        second: selects the others.
        num_first: tokens in the first part.
        num_second: tokens in the second part.
        by: "sequence" or "token".
    """

    first: TokenSelector
    second: TokenSelector
    num_first: int
    num_second: int
    by: str


def split(trace: RoutingTrace, second: float, within: TokenSelector = ALL_TOKENS) -> Split:
    """Split the tokens selected by `within` so that about the share `second` of them, the latest, is the second part.

    By whole sequence, at the boundary nearest to the share asked for; by token where the selection holds fewer
    than two sequences.

    Args:
        trace: the trace.
        second: share of the tokens for the second part, in (0, 1).
        within: the tokens to split.

    Raises:
        ConfigError: when the share is outside (0, 1).
        TraceError: when there are fewer than two tokens.
    """
    if not 0 < second < 1:
        raise ConfigError(f"a held-out share of {second:g} leaves nothing to fit or nothing to measure; use e.g. 0.5")
    tokens = np.arange(trace.num_tokens, dtype=np.int64)[within]
    if tokens.size < 2:
        raise TraceError(
            f"{tokens.size} token cannot be split in two; record more (some 8,000 make a stable placement)"
        )
    ids = None if trace.sequence_ids is None else np.asarray(trace.sequence_ids[within])
    in_second, by = _second_part(ids, tokens.size, second)
    first_tokens, second_tokens = tokens[~in_second], tokens[in_second]
    return Split(_selector(first_tokens), _selector(second_tokens), first_tokens.size, second_tokens.size, by)


def _second_part(sequence_ids: NDArray[Any] | None, num_tokens: int, share: float) -> tuple[NDArray[np.bool_], str]:
    """Which tokens are in the second part, [T] bool, and what was split by."""
    if sequence_ids is not None:
        _, first_seen, inverse, counts = np.unique(
            sequence_ids, return_index=True, return_inverse=True, return_counts=True
        )
        if counts.size > 1:
            order = np.argsort(first_seen, kind="stable")
            ends = np.cumsum(counts[order])[:-1]
            boundary = int(np.argmin(np.abs(ends - (1 - share) * num_tokens)))
            late = np.zeros(counts.size, dtype=np.bool_)
            late[order[boundary + 1 :]] = True
            return late[inverse.ravel()], "sequence"
    boundary = min(max(1, round((1 - share) * num_tokens)), num_tokens - 1)
    return np.arange(num_tokens) >= boundary, "token"


def _selector(tokens: NDArray[np.int64]) -> TokenSelector:
    """A slice where the tokens are contiguous: a slice of a memory map reads nothing yet."""
    first, last = int(tokens[0]), int(tokens[-1])
    return slice(first, last + 1) if last - first + 1 == tokens.size else tokens
