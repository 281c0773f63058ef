"""The decisions of the latest forward calls, kept beside each layer until they are worth moving.

During a call each layer costs two small copies into a buffer on its own device: nothing is allocated, nothing waits for
the host. Padding is taken out only when the buffers are emptied.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


class DecisionBuffer:
    """Fixed room for the decisions of every MoE layer.

    Args:
        num_layers: MoE layers.
        top_k: experts chosen for each token.
        capacity: slots (tokens, padding included) for each layer; a forward call of more makes it larger.
    """

    def __init__(self, num_layers: int, top_k: int, capacity: int) -> None:
        self._num_layers, self._top_k, self._capacity = num_layers, top_k, capacity
        self._buffers: list[tuple[Tensor, Tensor] | None] = [None] * num_layers
        self._used = 0  # slots that hold finished forward calls
        self._size = 0  # slots of the forward call that runs, after those
        self._runs = [0] * num_layers

    def has_room(self, size: int) -> bool:
        """Whether a forward call of so many slots fits; if not, empty first."""
        return self._used + size <= self._capacity

    def begin(self, size: int) -> None:
        """A forward call of so many slots (batch x sequence) starts; one that did not end is forgotten."""
        if size > self._capacity:
            self._capacity, self._buffers = size, [None] * self._num_layers
        assert self.has_room(size)
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
        if weights_TK.requires_grad:
            weights_TK = weights_TK.detach()
        weights.narrow(0, self._used, self._size).copy_(weights_TK)
        self._runs[layer] += 1

    def end(self) -> None:
        """The forward call has run; its slots count from now on.

        Raises:
            ConfigError: when a layer did not run exactly once.
        """
        for layer, runs in enumerate(self._runs):
            if runs != 1:
                raise ConfigError(
                    f"MoE layer {layer} ran {runs} times in one forward call; recording needs it to run once: switch "
                    "off gradient checkpointing, layer skipping and early exits"
                )
        self._used, self._size = self._used + self._size, 0

    def layers(self, keep_T: NDArray[np.bool_]) -> Iterator[tuple[NDArray[np.int32], NDArray[np.float32]]]:
        """Each layer's ids and weights, [R, K] each.

        Args:
            keep_T: [T] bool, which of the slots in use are wanted.
        """
        assert keep_T.size == self._used
        for buffers in self._buffers:
            assert buffers is not None
            ids, weights = (buffer[: self._used].cpu().numpy()[keep_T] for buffer in buffers)
            yield ids, weights

    def clear(self) -> None:
        """Forget what the slots hold."""
        self._used = 0

    def _allocate(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Room for one layer's ids and weights, [slots, K] each, on the device where it decides."""
        torch = importlib.import_module("torch")
        shape = (self._capacity, self._top_k)
        with torch.inference_mode(False):  # else the mode of the first call would say who may write to them
            ids = torch.empty(shape, dtype=torch.int32, device=like.device)
            weights = torch.empty(shape, dtype=torch.float32, device=like.device)
        self._buffers[layer] = ids, weights
        return ids, weights
