"""Windows that slide over a text so that every token is predicted once, from enough context."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from coterie.errors import ConfigError

DEFAULT_WINDOW = 1024
MIN_WINDOW = 2


@dataclass(frozen=True)
class Window:
    """Tokens `start` to `end` of a text, of which those from `first_scored` on are predicted in this window."""

    start: int
    end: int
    first_scored: int


def sliding_windows(num_tokens: int, window: int, stride: int) -> Iterator[Window]:
    """Windows of equal length over a text; token 0 has no context, every other token is scored exactly once.

    The first window scores all but its first token, each later one the next `stride` tokens, so that a token sees at
    least `window - stride` tokens before it. The last window ends with the text and may score fewer.

    Args:
        num_tokens: tokens of the text, at least `window`.
        window: tokens of a window, at least 2.
        stride: tokens from one window's end to the next, 1 to `window - 1`.
    """
    assert MIN_WINDOW <= window <= num_tokens
    assert 1 <= stride < window
    yield Window(0, window, 1)
    for scored in range(window, num_tokens, stride):
        end = min(scored + stride, num_tokens)
        yield Window(end - window, end, scored)


def count_windows(num_tokens: int, window: int, stride: int) -> int:
    """How many windows `sliding_windows` gives."""
    return 1 + -(-(num_tokens - window) // stride)


def in_batches(windows: Iterable[Window], size: int) -> Iterator[tuple[Window, ...]]:
    """Consecutive windows in groups of `size`, the last perhaps smaller."""
    remaining = iter(windows)
    while group := tuple(itertools.islice(remaining, size)):
        yield group


def choose_window(config: Any, window: int | None, stride: int | None) -> tuple[int, int]:
    """The window and stride that were asked for, or the defaults: what the model can read up to 1,024, and half of it.

    Args:
        config: the model's configuration; `max_position_embeddings` is the longest text it can read.
        window: tokens of a window; None for the default.
        stride: tokens from one window to the next; None for half the window.

    Raises:
        ConfigError: for a window longer than the model can read, or a stride that would leave a token unscored.
    """
    limit = getattr(config, "max_position_embeddings", None)
    if window is None:
        window = min(DEFAULT_WINDOW, limit or DEFAULT_WINDOW)
    if stride is None:
        stride = max(1, window // 2)
    if window < MIN_WINDOW:
        raise ConfigError(f"a window of {window} tokens predicts nothing; choose at least {MIN_WINDOW}")
    if limit is not None and window > limit:
        raise ConfigError(f"a window of {window} tokens is more than the {limit} that the model reads; choose fewer")
    if not 1 <= stride < window:
        raise ConfigError(
            f"a stride of {stride} tokens does not fit a window of {window}: each scored token needs context; "
            f"choose 1 to {window - 1}"
        )
    return window, stride
