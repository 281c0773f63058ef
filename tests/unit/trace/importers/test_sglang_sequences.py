"""Requests followed from batch to batch."""

from __future__ import annotations

import itertools

from coterie.trace.importers.sglang_sequences import DECODE_BATCH, EXTEND_BATCH, MIXED_BATCH, SequenceTracker


def tracker() -> SequenceTracker:
    counter = itertools.count()
    return SequenceTracker(lambda: next(counter))


def test_requests_keep_their_number_from_prompt_to_end():
    follow = tracker()
    assert follow.label(EXTEND_BATCH, [3, 2], [0, 1, 2, 0, 1]) == ([0, 0, 0, 1, 1], [0] * 5)
    assert follow.label(DECODE_BATCH, None, [3, 2]) == ([0, 1], [1, 1])
    assert follow.label(EXTEND_BATCH, [2], [0, 1]) == ([2, 2], [0, 0])
    assert follow.label(DECODE_BATCH, None, [4, 3, 2])[0] == [0, 1, 2]
    assert follow.label(DECODE_BATCH, None, [5, 3])[0] == [0, 2]  # the second has ended


def test_equal_lengths_are_told_by_order():
    follow = tracker()
    follow.label(EXTEND_BATCH, [2, 2, 2], [0, 1] * 3)
    assert follow.label(DECODE_BATCH, None, [2, 2, 2])[0] == [0, 1, 2]
    assert follow.label(DECODE_BATCH, None, [3, 3, 3])[0] == [0, 1, 2]


def test_a_prompt_in_chunks_is_one_request():
    follow = tracker()
    assert follow.label(EXTEND_BATCH, [2, 4], [0, 1, 0, 1, 2, 3])[0] == [0, 0, 1, 1, 1, 1]
    assert follow.label(DECODE_BATCH, None, [2])[0] == [0]
    assert follow.label(EXTEND_BATCH, [3, 1], [4, 5, 6, 0])[0] == [1, 1, 1, 2]
    assert follow.label(DECODE_BATCH, None, [3, 7, 1])[0] == [0, 1, 2]


def test_a_cached_prefix_is_no_chunk():
    follow = tracker()
    follow.label(EXTEND_BATCH, [4], [0, 1, 2, 3])
    assert follow.label(EXTEND_BATCH, [2], [9, 10])[0] == [1, 1]


def test_mixed_batches_hold_prompts_and_decoded_tokens():
    follow = tracker()
    follow.label(EXTEND_BATCH, [5], [0, 1, 2, 3, 4])
    assert follow.label(MIXED_BATCH, [3, 1], [0, 1, 2, 5]) == ([1, 1, 1, 0], [0, 0, 0, 1])
    assert follow.label(DECODE_BATCH, None, [6, 3])[0] == [0, 1]


def test_padding_belongs_to_nobody():
    follow = tracker()
    assert follow.label(EXTEND_BATCH, [2], [0, 1, 0, 0])[0] == [0, 0, 1, 1]


def test_a_recording_may_begin_in_the_middle():
    follow = tracker()
    assert follow.label(DECODE_BATCH, None, [40, 7])[0] == [0, 1]
    assert follow.label(DECODE_BATCH, None, [41, 8])[0] == [0, 1]
