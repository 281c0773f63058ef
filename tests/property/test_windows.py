"""Sliding windows, for any length, window and stride."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coterie.evaluate.windows import count_windows, in_batches, sliding_windows


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int]:
    window = draw(st.integers(2, 40))
    return draw(st.integers(window, 300)), window, draw(st.integers(1, window - 1))


@given(shapes())
def test_every_token_but_the_first_is_scored_exactly_once(shape: tuple[int, int, int]) -> None:
    num_tokens, window, stride = shape
    windows = list(sliding_windows(num_tokens, window, stride))
    scored = [token for each in windows for token in range(each.first_scored, each.end)]
    assert scored == list(range(1, num_tokens))
    assert len(windows) == count_windows(num_tokens, window, stride)


@given(shapes())
def test_windows_are_whole_and_give_context(shape: tuple[int, int, int]) -> None:
    num_tokens, window, stride = shape
    for number, each in enumerate(sliding_windows(num_tokens, window, stride)):
        assert each.end - each.start == window
        assert 0 <= each.start < each.first_scored < each.end <= num_tokens
        assert number == 0 or each.first_scored - each.start >= window - stride


@given(shapes(), st.integers(1, 7))
def test_batches_keep_order_and_size(shape: tuple[int, int, int], size: int) -> None:
    windows = list(sliding_windows(*shape))
    batches = list(in_batches(windows, size))
    assert [each for batch in batches for each in batch] == windows
    assert all(len(batch) == size for batch in batches[:-1])
    assert 1 <= len(batches[-1]) <= size
