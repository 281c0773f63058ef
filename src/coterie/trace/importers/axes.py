"""Which axis of an [a, b, K] array counts layers and which tokens, and how to read it in stored order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import TraceError
from coterie.trace.importers.base import PIECE_BYTES


@dataclass(frozen=True)
class Axes:
    """A three-axis array of decisions as it is stored.

    Attributes:
        layers_first: stored [L, T, K] rather than [T, L, K].
        num_layers: L.
        num_tokens: T.
        top_k: K.
        inferred: why, where it was concluded and not said; else empty.
    """

    layers_first: bool
    num_layers: int
    num_tokens: int
    top_k: int
    inferred: str = ""

    def blocks(self, itemsize: int) -> Iterator[tuple[slice, slice]]:
        """Layers and tokens of successive pieces in stored order, each at most `PIECE_BYTES` or one row."""
        row_bytes = self.top_k * itemsize * (1 if self.layers_first else self.num_layers)
        step = max(1, PIECE_BYTES // row_bytes)
        layers = [slice(layer, layer + 1) for layer in range(self.num_layers)]
        for layer in layers if self.layers_first else [slice(0, self.num_layers)]:
            for start in range(0, self.num_tokens, step):
                yield layer, slice(start, min(start + step, self.num_tokens))

    def to_decisions(self, flat: NDArray[Any]) -> NDArray[Any]:
        """A piece's elements in stored order as [layers, tokens, K]."""
        if self.layers_first:
            return flat.reshape(1, -1, self.top_k)
        return flat.reshape(-1, self.num_layers, self.top_k).transpose(1, 0, 2)


def find_axes(shape: tuple[int, ...], tokens: Mapping[str, int], starts: NDArray[Any] | None, num_layers: int) -> Axes:
    """Decide the axis order, from what counts tokens; where nothing does, tokens are the longest axis.

    Args:
        shape: of the decisions.
        tokens: the lengths of the arrays that hold one value a token, by name.
        starts: offsets at which sequences start, with or without the final T, or None.
        num_layers: L where it is known, else 0.

    Raises:
        TraceError: when no order fits, or both do and neither axis is longer.
    """
    if len(shape) != 3 or 0 in shape:
        raise TraceError(
            f"expert_ids has shape {list(shape)}; it is [layers, tokens, top-k] or [tokens, layers, top-k]"
        )
    orders = [Axes(True, *shape), Axes(False, shape[1], shape[0], shape[2])]
    fits = [axes for axes in orders if all(axes.num_tokens == count for count in tokens.values())]
    if not fits:
        lengths = ", ".join(f"{name} {count}" for name, count in tokens.items())
        raise TraceError(
            f"expert_ids has shape {list(shape)}, but the arrays of one value a token have length: {lengths}"
        )
    if starts is not None and starts.size:
        last = int(starts[-1])
        exact = [axes for axes in fits if axes.num_tokens == last]
        fits = exact or [axes for axes in fits if axes.num_tokens > last]
        if not fits:
            raise TraceError(f"seq_starts ends at {last}, expert_ids has shape {list(shape)}; offsets count tokens")
    if num_layers and any(axes.num_layers == num_layers for axes in fits):
        fits = [axes for axes in fits if axes.num_layers == num_layers]
    if len(fits) == 1:
        return fits[0]
    if shape[0] == shape[1]:
        raise TraceError(
            f"expert_ids has shape {list(shape)}: nothing tells layers from tokens; import more tokens than layers"
        )
    longest = max(fits, key=lambda axes: axes.num_tokens)
    return Axes(
        longest.layers_first, longest.num_layers, longest.num_tokens, longest.top_k, "tokens are the longest axis"
    )


def offsets(starts: NDArray[Any], num_tokens: int) -> NDArray[np.int64]:
    """Sequence offsets [S+1] from 0 to T.

    Args:
        starts: [S] or [S+1] offsets; the final T may be missing.
        num_tokens: T.

    Raises:
        TraceError: when they do not rise from 0.
    """
    full = starts.astype(np.int64)
    if full[-1] != num_tokens:
        full = np.append(full, num_tokens)
    if full[0] != 0 or (np.diff(full) <= 0).any():
        raise TraceError(
            f"seq_starts does not rise from 0 to {num_tokens}; it holds the offset of each sequence's start"
        )
    return full
