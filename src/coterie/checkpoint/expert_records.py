"""Experts of a checkpoint as records `[I, 3, H]`, gathered one at a time from wherever its files hold their parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.checkpoint.expert_tensors import FLOAT_BYTES, NeuronAxis, neuron_axes
from coterie.checkpoint.safetensors_io import StoredTensor
from coterie.checkpoint.store_layout import StoreLayout
from coterie.errors import CheckpointError

Order = NDArray[np.integer[Any]]


class ExpertRecords:
    """The routed experts of a checkpoint, read one by one.

    Args:
        tensors: the checkpoint's, by name.
        model_type: its architecture.
        layer_ids: the model layer of each MoE layer.
        shape: MoE layers, experts, neurons of an expert, elements of a row.

    Attributes:
        layout: of the store that its experts fill.
        names: the tensors that are the experts'.

    Raises:
        CheckpointError: for experts that are quantised, have biases, are not understood or not complete.
    """

    def __init__(
        self, tensors: Mapping[str, StoredTensor], model_type: str, layer_ids: Iterable[int],
        shape: tuple[int, int, int, int],
    ) -> None:  # fmt: skip
        layers, experts, width, hidden = shape
        axes = neuron_axes(tensors, model_type, layer_ids, (layers, experts, width))
        self._parts: dict[tuple[int, int | None, str], tuple[StoredTensor, NeuronAxis]] = {}
        for name, axis in axes.items():
            if axis.part.endswith("bias") or axis.along == "pairs":
                raise CheckpointError(f"{name}: experts with biases ({model_type}) cannot be packed into a store yet")
            _check_hidden(name, tensors[name], axis, hidden)
            self._parts[axis.layer, axis.expert, axis.part] = (tensors[name], axis)
        dtypes = sorted({tensors[name].dtype for name in axes})
        if len(dtypes) > 1:
            raise CheckpointError(f"the experts are stored as {' and '.join(dtypes)}; a store holds one type")
        self.layout = StoreLayout(layers, experts, width, hidden, dtypes[0])
        self.names = frozenset(axes)

    def record(self, layer: int, expert: int, order_I: Order | None = None) -> NDArray[Any]:
        """One expert, gate row, up row and down column of each neuron side by side.

        Args:
            layer: MoE layer.
            expert: the expert.
            order_I: neuron r of the record is neuron order[r] of the checkpoint; None: as they are.

        Returns:
            [I, 3, H] unsigned integers of the elements' size: moved, never computed with.

        Raises:
            CheckpointError: when a file became shorter.
        """
        fused = (layer, None, "gate_up") in self._parts
        if fused:
            both = self._read(layer, expert, None, "gate_up")
            gate_IH, up_IH = both[: self.layout.width], both[self.layout.width :]
        else:
            gate_IH, up_IH = self._read(layer, expert, expert, "gate"), self._read(layer, expert, expert, "up")
        down_HI = self._read(layer, expert, None if fused else expert, "down")
        record_I3H = np.empty((self.layout.width, 3, self.layout.hidden_size), gate_IH.dtype)
        for part, values_IH in enumerate((gate_IH, up_IH, down_HI.T)):
            record_I3H[:, part] = values_IH if order_I is None else values_IH[np.asarray(order_I, np.int64)]
        return record_I3H

    def _read(self, layer: int, expert: int, owner: int | None, part: str) -> NDArray[Any]:
        tensor, _ = self._parts[layer, owner, part]
        shape = tensor.shape if owner is not None else tensor.shape[1:]
        nbytes = tensor.nbytes if owner is not None else tensor.nbytes // tensor.shape[0]
        element = np.dtype(f"u{FLOAT_BYTES[tensor.dtype]}")
        start, count = tensor.start + (0 if owner is not None else expert * nbytes), nbytes // element.itemsize
        values = np.fromfile(tensor.file, element, count, offset=start)
        if len(values) < count:
            raise CheckpointError(f"{tensor.file} became shorter while it was read; download it again")
        return values.reshape(shape)


def _check_hidden(name: str, tensor: StoredTensor, axis: NeuronAxis, hidden: int) -> None:
    own = tensor.shape if axis.expert is not None else tensor.shape[1:]
    assert axis.axis is not None, "only biases have no axis of neurons"
    if own[1 - axis.axis] != hidden:
        raise CheckpointError(f"{name} has shape {list(tensor.shape)}, which does not fit a hidden size of {hidden}")
