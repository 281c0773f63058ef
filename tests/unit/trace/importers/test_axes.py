"""Which axis counts tokens, and reading pieces in stored order."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.errors import TraceError
from coterie.trace.importers import axes as axes_module
from coterie.trace.importers.axes import find_axes, offsets


@pytest.mark.parametrize(
    ("shape", "tokens", "starts", "num_layers", "layers_first"),
    [
        ((26, 900, 6), {}, None, 0, True),  # the longest axis
        ((900, 26, 6), {}, None, 0, False),
        ((26, 9, 6), {"example": 9}, None, 0, True),  # fewer tokens than layers, told by an array of one value a token
        ((9, 26, 6), {"example": 9}, None, 0, False),
        ((26, 9, 6), {}, [0, 4, 9], 0, True),  # by the last offset
        ((9, 26, 6), {}, [0, 4, 9], 0, False),
        ((9, 26, 6), {}, [0, 12], 0, True),  # offsets without the end: 12 is beyond 9 tokens
        ((26, 9, 6), {}, None, 26, True),  # by the model
        ((9, 26, 6), {}, None, 26, False),
        ((9, 9, 6), {}, None, 26, None),
    ],
)
def test_the_order_is_told_by_what_counts_tokens(shape, tokens, starts, num_layers, layers_first):
    starts = None if starts is None else np.array(starts)
    if layers_first is None:
        with pytest.raises(TraceError, match="nothing tells layers from tokens"):
            find_axes(shape, tokens, starts, num_layers)
        return
    found = find_axes(shape, tokens, starts, num_layers)
    assert found.layers_first == layers_first
    assert bool(found.inferred) == (not tokens and starts is None and not num_layers)
    assert {found.num_layers, found.num_tokens} == set(shape[:2])


@pytest.mark.parametrize(
    ("shape", "tokens", "starts", "message"),
    [
        ((26, 900), {}, None, r"shape \[26, 900\]"),
        ((26, 0, 6), {}, None, r"shape \[26, 0, 6\]"),
        ((26, 900, 6), {"example": 899}, None, "example 899"),
        ((26, 900, 6), {"example": 900, "prompt": 26}, None, "example 900, prompt 26"),
        ((26, 900, 6), {}, [0, 901], "seq_starts ends at 901"),
    ],
)
def test_what_fits_no_order_is_refused(shape, tokens, starts, message):
    with pytest.raises(TraceError, match=message):
        find_axes(shape, tokens, None if starts is None else np.array(starts), 0)


@pytest.mark.parametrize("layers_first", [True, False])
def test_blocks_cover_the_array_in_stored_order(monkeypatch, layers_first):
    monkeypatch.setattr(axes_module, "PIECE_BYTES", 100)
    expected = np.arange(4 * 30 * 3, dtype=np.int16).reshape(4, 30, 3)
    stored = expected if layers_first else np.ascontiguousarray(expected.transpose(1, 0, 2))
    axes = find_axes(stored.shape, {}, None, 0)
    target, position = np.full_like(expected, -1), 0
    blocks = list(axes.blocks(2))
    assert len(blocks) > 4
    for layers, tokens in blocks:
        count = (layers.stop - layers.start) * (tokens.stop - tokens.start) * 3
        assert count * 2 <= 100
        target[layers, tokens] = axes.to_decisions(stored.ravel()[position : position + count])
        position += count
    assert np.array_equal(target, expected)


def test_offsets_may_lack_the_end():
    assert offsets(np.array([0, 3]), 5).tolist() == [0, 3, 5]
    assert offsets(np.array([0, 3, 5]), 5).tolist() == [0, 3, 5]
    for wrong in ([1, 3], [0, 3, 3, 5], [0, 4, 2]):
        with pytest.raises(TraceError, match="does not rise from 0 to 5"):
            offsets(np.array(wrong), 5)
