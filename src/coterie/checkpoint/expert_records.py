"""Experts of a checkpoint as records `[I, 3, H]`, gathered one at a time from wherever its files hold their parts.

Biases are no part of the records: they are a few thousandths of an expert at most, and stay with the rest of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.checkpoint.expert_tensors import FLOAT_BYTES, NeuronAxis, neuron_axes
from coterie.checkpoint.reorder import along_axis
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
        names: the tensors whose values the records hold: all of the experts' but their biases.
        biases: the names of those.

    Raises:
        CheckpointError: for experts that are quantised, are not understood or not complete, or have biases one by one.
    """

    def __init__(
        self, tensors: Mapping[str, StoredTensor], model_type: str, layer_ids: Iterable[int],
        shape: tuple[int, int, int, int],
    ) -> None:  # fmt: skip
        layers, experts, width, hidden = shape
        axes = neuron_axes(tensors, model_type, layer_ids, (layers, experts, width))
        self._parts: dict[tuple[int, int | None, str], tuple[StoredTensor, NeuronAxis]] = {}
        self._biases: dict[str, tuple[StoredTensor, NeuronAxis]] = {}
        for name, axis in axes.items():
            if not axis.part.endswith("bias"):
                _check_hidden(name, tensors[name], axis, hidden)
                self._parts[axis.layer, axis.expert, axis.part] = (tensors[name], axis)
            elif axis.expert is None:
                self._biases[name] = (tensors[name], axis)
            else:
                raise CheckpointError(
                    f"{name}: biases of single experts cannot be packed; fused ones can, as gpt_oss's"
                )
        self.biases = frozenset(self._biases)
        self.names = frozenset(axes.keys() - self.biases)
        dtypes = sorted({tensors[name].dtype for name in self.names})
        if len(dtypes) > 1:
            raise CheckpointError(f"the experts are stored as {' and '.join(dtypes)}; a store holds one type")
        self.layout = StoreLayout(layers, experts, width, hidden, dtypes[0])

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
            both, (_, axis) = self._read(layer, expert, None, "gate_up"), self._parts[layer, None, "gate_up"]
            width = self.layout.width
            pairs = axis.along == "pairs"
            gate_IH, up_IH = (both[::2], both[1::2]) if pairs else (both[:width], both[width:])
        else:
            gate_IH, up_IH = self._read(layer, expert, expert, "gate"), self._read(layer, expert, expert, "up")
        down_IH = self._read(layer, expert, None if fused else expert, "down")
        record_I3H = np.empty((self.layout.width, 3, self.layout.hidden_size), gate_IH.dtype)
        for part, values_IH in enumerate((gate_IH, up_IH, down_IH)):
            record_I3H[:, part] = values_IH if order_I is None else values_IH[np.asarray(order_I, np.int64)]
        return record_I3H

    def ordered_biases(self, order_LEI: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """The biases that have an axis of neurons, by name, laid out as they were, with the neurons in this order.

        Args:
            order_LEI: [L, E, I] neuron r of a record is neuron order[r] of the checkpoint.

        Returns:
            Unsigned integers of the elements' size, as in `record`.
        """
        moved = {}
        for name, (tensor, axis) in self._biases.items():
            if axis.axis is not None:
                values = _values(tensor, tensor.start, tensor.nbytes).reshape(tensor.shape)
                rows = zip(values, order_LEI[axis.layer], strict=True)
                moved[name] = np.stack([row[along_axis(order_I, axis.along)] for row, order_I in rows])
        return moved

    def _read(self, layer: int, expert: int, owner: int | None, part: str) -> NDArray[Any]:
        """One expert's part, its neurons along the first axis."""
        tensor, axis = self._parts[layer, owner, part]
        shape = tensor.shape if owner is not None else tensor.shape[1:]
        nbytes = tensor.nbytes if owner is not None else tensor.nbytes // tensor.shape[0]
        values = _values(tensor, tensor.start + (0 if owner is not None else expert * nbytes), nbytes).reshape(shape)
        return values if axis.axis == 0 else values.T


def _values(tensor: StoredTensor, start: int, nbytes: int) -> NDArray[Any]:
    """Elements of a tensor, as unsigned integers."""
    element = np.dtype(f"u{FLOAT_BYTES[tensor.dtype]}")
    try:
        values = np.fromfile(tensor.file, element, nbytes // element.itemsize, offset=start)
    except OSError as error:
        raise CheckpointError(f"cannot read {tensor.file}: {error.strerror or error}; check the disk") from error
    if values.nbytes < nbytes:
        raise CheckpointError(f"{tensor.file} became shorter while it was read; download it again")
    return values


def _check_hidden(name: str, tensor: StoredTensor, axis: NeuronAxis, hidden: int) -> None:
    own = tensor.shape if axis.expert is not None else tensor.shape[1:]
    assert axis.axis is not None, "only biases have no axis of neurons"
    if own[1 - axis.axis] != hidden:
        raise CheckpointError(f"{name} has shape {list(tensor.shape)}, which does not fit a hidden size of {hidden}")
