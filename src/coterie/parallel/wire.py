"""A token on its way to a device: its experts' ids, their weights and its hidden state, side by side in one row.

Shapes: V rows, K top-k, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowFormat:
    """How a row is laid out: K int32 ids, K weights, H elements.

    Attributes:
        top_k: K.
        hidden_size: H.
        weight_dtype: of the weights: wide enough for any router's, and the same on all ranks.
        dtype: of the hidden state.
    """

    top_k: int
    hidden_size: int
    weight_dtype: torch.dtype
    dtype: torch.dtype

    @property
    def payload_bytes(self) -> int:
        """Bytes of the hidden state of one row, which is also what comes back."""
        return self.hidden_size * int(self.dtype.itemsize)

    @property
    def metadata_bytes(self) -> int:
        """Bytes of ids and weights of one row."""
        return self.top_k * (4 + int(self.weight_dtype.itemsize))

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.metadata_bytes + self.payload_bytes

    def pack(self, hidden_VH: Tensor, ids_VK: Tensor, weights_VK: Tensor) -> Tensor:
        """Rows of bytes, [V, row_bytes] uint8."""
        parts = (ids_VK.to(torch.int32), weights_VK, hidden_VH)
        return torch.cat([_bytes(part) for part in parts], dim=1)

    def unpack(self, rows_VB: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states [V, H], ids [V, K] int64 and weights [V, K]; the inverse of `pack`."""
        first, second = 4 * self.top_k, self.metadata_bytes  # where weights and hidden state begin
        return (
            _values(rows_VB[:, second:], self.dtype),
            _values(rows_VB[:, :first], torch.int32).to(torch.int64),
            _values(rows_VB[:, first:second], self.weight_dtype),
        )


def _bytes(values_VX: Tensor) -> Tensor:
    if not len(values_VX):
        return values_VX.new_empty((0, values_VX.shape[1] * values_VX.element_size()), dtype=torch.uint8)
    return values_VX.contiguous().view(torch.uint8)


def _values(rows_VB: Tensor, dtype: torch.dtype) -> Tensor:
    """Columns of bytes as numbers; copied, so that they are aligned."""
    width = rows_VB.shape[1] // dtype.itemsize
    if not len(rows_VB):
        return rows_VB.new_empty((0, width), dtype=dtype)
    return rows_VB.contiguous().view(dtype)
