"""The decisions of the latest forward calls, kept beside each layer until they are worth moving.

During a call each layer costs two small copies into a buffer on its own device: nothing is allocated, nothing waits for
the host. Padding is taken out only when the buffers are emptied.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError
from coterie.models.batch_tokens import BatchTokens
from coterie.trace.growing import GrowingTrace

if TYPE_CHECKING:
    from torch import Tensor


class DecisionBuffer:
    """Fixed room for the decisions of every MoE layer, emptied into a growing trace.

    Args:
        num_layers: MoE layers.
        top_k: experts chosen for each token.
        capacity: slots (tokens, padding included) for each layer; a forward call of more makes it larger.
        sink: where decisions go when the room is used up.
    """

    def __init__(self, num_layers: int, top_k: int, capacity: int, sink: GrowingTrace) -> None:
        self._num_layers, self._top_k, self._capacity, self._sink = num_layers, top_k, capacity, sink
        self._buffers: list[tuple[Tensor, Tensor] | None] = [None] * num_layers
        self._used = 0  # slots that hold finished forward calls
        self._size = 0  # slots of the forward call that runs, after those
        self._runs = [0] * num_layers
        self._calls: list[tuple[NDArray[np.bool_], dict[str, NDArray[Any]]]] = []

    def begin(self, size: int) -> None:
        """A forward call of so many slots (batch x sequence) starts; one that did not end is forgotten."""
        if self._used + size > self._capacity:
            self.empty()
            if size > self._capacity:
                self._capacity, self._buffers = size, [None] * self._num_layers
        self._size = size
        self._runs = [0] * self._num_layers

    def put(self, layer: int, ids_TK: Tensor, weights_TK: Tensor) -> None:
        """Copy the decisions of one layer in the forward call that runs.

        Raises:
            ConfigError: when they are not for every slot of the call.
        """
        if ids_TK.shape[0] != self._size:
            raise ConfigError(
                f"MoE layer {layer} was given {ids_TK.shape[0]} tokens in a forward call of {self._size}; recording "
                "needs every layer to see the whole batch: run the model itself and not parts of it"
            )
        ids, weights = self._buffers[layer] or self._allocate(layer, ids_TK)
        ids.narrow(0, self._used, self._size).copy_(ids_TK)
        weights.narrow(0, self._used, self._size).copy_(weights_TK.detach())
        self._runs[layer] += 1

    def end(self, tokens: BatchTokens, step: int) -> None:
        """The forward call has run; its tokens count from now on.

        Raises:
            ConfigError: when a layer did not run exactly once.
        """
        for layer, runs in enumerate(self._runs):
            if runs != 1:
                raise ConfigError(
                    f"MoE layer {layer} ran {runs} times in one forward call; recording needs it to run once: switch "
                    "off gradient checkpointing, layer skipping and early exits"
                )
        count = tokens.sequence_ids_R.size
        columns = {
            "sequence_ids": tokens.sequence_ids_R, "positions": tokens.positions_R,
            "phase": np.full(count, tokens.phase), "step": np.full(count, step),
        }  # fmt: skip
        self._calls.append((tokens.keep_T, columns))
        self._used, self._size = self._used + self._size, 0

    def empty(self) -> None:
        """Move everything to the growing trace, without the padding; errors are the trace's."""
        if self._calls:
            keep_T = np.concatenate([keep for keep, _ in self._calls])
            names = self._calls[0][1]
            columns = {name: np.concatenate([columns[name] for _, columns in self._calls]) for name in names}
            self._sink.append(self._layers(keep_T), columns)
        self._used, self._calls = 0, []

    def _layers(self, keep_T: NDArray[np.bool_]) -> Iterator[tuple[NDArray[np.int32], NDArray[np.float32]]]:
        """Each layer's ids and weights, [R, K] each, without the padding."""
        assert keep_T.size == self._used
        for buffers in self._buffers:
            assert buffers is not None
            ids, weights = (buffer[: self._used].cpu().numpy()[keep_T] for buffer in buffers)
            yield ids, weights

    def _allocate(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Room for one layer's ids and weights, [slots, K] each, on the device where it decides."""
        torch = importlib.import_module("torch")
        shape = (self._capacity, self._top_k)
        with torch.inference_mode(False):  # else the mode of the first call would say who may write to them
            ids = torch.empty(shape, dtype=torch.int32, device=like.device)
            weights = torch.empty(shape, dtype=torch.float32, device=like.device)
        self._buffers[layer] = ids, weights
        return ids, weights
