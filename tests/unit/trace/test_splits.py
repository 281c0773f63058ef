"""Splits by whole sequence, in order, at the nearest boundary."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError, TraceError
from coterie.spec import MoESpec
from coterie.trace.routing_trace import ALL_TOKENS, RoutingTrace
from coterie.trace.splits import split


def make(sequence_ids: Any, tokens: int | None = None) -> RoutingTrace:
    count = tokens if sequence_ids is None else len(sequence_ids)
    ids = np.zeros((1, count, 1), dtype=np.uint8)
    given = None if sequence_ids is None else np.asarray(sequence_ids, dtype=np.int32)
    return RoutingTrace(ids, MoESpec("toy", 1, 2, 1), sequence_ids=given)


def parts(trace: RoutingTrace, second: float, within: Any = ALL_TOKENS) -> tuple[list[int], list[int], str]:
    found, tokens = split(trace, second, within), np.arange(trace.num_tokens)
    first, last = tokens[found.first].tolist(), tokens[found.second].tolist()
    assert (found.num_first, found.num_second) == (len(first), len(last))
    return first, last, found.by


@pytest.mark.parametrize(("second", "boundary"), [(0.5, 6), (0.9, 3), (0.55, 3), (0.05, 6), (0.4, 6)])
def test_the_boundary_is_the_nearest_one(second: float, boundary: int) -> None:
    """Sequences of 3, 3 and 4 tokens: boundaries at 3 and 6."""
    first, last, by = parts(make([0] * 3 + [1] * 3 + [2] * 4), second)
    assert (first, last, by) == (list(range(boundary)), list(range(boundary, 10)), "sequence")


def test_sequences_count_in_order_of_appearance_not_of_number() -> None:
    first, last, _ = parts(make([9, 9, 4, 4, 0, 0, 7, 7]), 0.5)
    assert (first, last) == ([0, 1, 2, 3], [4, 5, 6, 7])


def test_interleaved_sequences_stay_whole() -> None:
    first, last, by = parts(make([0, 1, 0, 2, 1, 3, 2, 3]), 0.5)
    assert (first, last, by) == ([0, 1, 2, 4], [3, 5, 6, 7], "sequence")


def test_contiguous_parts_are_slices() -> None:
    found = split(make([0, 0, 1, 1]), 0.5)
    assert (found.first, found.second) == (slice(0, 2), slice(2, 4))


@pytest.mark.parametrize("sequences", [None, [5] * 10])
def test_without_two_sequences_it_is_by_token(sequences: Any) -> None:
    for second, boundary in ((0.5, 5), (0.3, 7), (0.999, 1), (0.001, 9)):
        first, last, by = parts(make(sequences, 10), second)
        assert (first, last, by) == (list(range(boundary)), list(range(boundary, 10)), "token")


def test_within_a_selection() -> None:
    trace = make([0, 0, 1, 1, 2, 2, 3, 3])
    assert parts(trace, 0.5, slice(0, 4)) == ([0, 1], [2, 3], "sequence")
    assert parts(trace, 0.5, np.array([0, 1, 6, 7])) == ([0, 1], [6, 7], "sequence")
    assert parts(trace, 0.5, slice(4, 6)) == ([4], [5], "token")


@pytest.mark.parametrize("second", [0.0, 1.0, -0.5, 1.5, float("nan")])
def test_a_share_that_leaves_nothing(second: float) -> None:
    with pytest.raises(ConfigError, match="held-out share"):
        split(make([0, 1]), second)


def test_one_token_cannot_be_split() -> None:
    with pytest.raises(TraceError, match="1 token cannot be split in two"):
        split(make(None, 1), 0.5)
    with pytest.raises(TraceError, match="1 token cannot be split in two"):
        split(make([0, 1, 2]), 0.5, slice(2, 3))
