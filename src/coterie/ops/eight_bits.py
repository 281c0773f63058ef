"""Products with experts in eight bits: rows of integers, each with a scale.

Few rows, as decoding has them, are compiled loops over the integers as they lie, quicker on CPUs than bfloat16's
product since there is half to read; more are multiplied in the input's type, into which integers are converted first.

Shapes: N rows, H hidden size, k neurons.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor
from torch.nn.functional import linear

_FEW = 4  # rows up to which reading integers for each is quicker than converting them once
_EXACT = {"reassoc", "contract", "nsz"}  # sums in any order, but what is no number stays none


def gate_up_of(x_NH: Tensor, prefix_k3H: Tensor, scale_3k: Tensor) -> Tensor:
    """Gate and up of neurons, all of gate first: [N, 2k], in the input's type, without biases.

    Args:
        x_NH: [N, H] the input.
        prefix_k3H: [k, 3, H] int8.
        scale_3k: [3, k] float32.
    """
    if _compiled(x_NH):
        both_N2k = torch.empty(len(x_NH), 2 * len(prefix_k3H))
        _gate_up(x_NH.float().numpy(), prefix_k3H.numpy(), scale_3k.numpy(), both_N2k.numpy())
        return both_N2k.to(x_NH.dtype)
    exact_NH = _wide(x_NH)
    parts = [linear(exact_NH, prefix_k3H[:, part].to(exact_NH.dtype)) * scale_3k[part] for part in (0, 1)]
    return torch.cat(parts, dim=-1).to(x_NH.dtype)


def down_of(hidden_Nk: Tensor, prefix_k3H: Tensor, scale_3k: Tensor) -> Tensor:
    """The neurons' outputs added up, [N, H], in the input's type; arguments as for `gate_up_of`."""
    if _compiled(hidden_Nk):
        output_NH = torch.zeros(len(hidden_Nk), prefix_k3H.shape[2])
        scaled_Nk = hidden_Nk.float() * scale_3k[2]
        _down(scaled_Nk.numpy(), prefix_k3H.numpy(), output_NH.numpy())
        return output_NH.to(hidden_Nk.dtype)
    exact_Nk = _wide(hidden_Nk)
    output_NH = (exact_Nk * scale_3k[2]).to(exact_Nk.dtype) @ prefix_k3H[:, 2].to(exact_Nk.dtype)
    return output_NH.to(hidden_Nk.dtype)


def _wide(rows: Tensor) -> Tensor:
    """Rows in a type in which products with integers neither overflow nor vanish: float16 has too few exponents."""
    return rows.float() if rows.dtype == torch.float16 else rows


def _compiled(rows: Tensor) -> bool:
    return len(rows) <= _FEW and rows.device.type == "cpu" and rows.dtype != torch.float64


@njit(cache=True, nogil=True, fastmath=_EXACT)
def _gate_up(x_NH: Any, prefix_k3H: Any, scale_3k: Any, out_N2k: Any) -> None:
    count = prefix_k3H.shape[0]
    for row in range(x_NH.shape[0]):
        x = x_NH[row]
        for n in range(count):
            gate = up = np.float32(0)
            for h in range(x.size):
                gate += x[h] * np.float32(prefix_k3H[n, 0, h])
                up += x[h] * np.float32(prefix_k3H[n, 1, h])
            out_N2k[row, n], out_N2k[row, count + n] = gate * scale_3k[0, n], up * scale_3k[1, n]


@njit(cache=True, nogil=True, fastmath=_EXACT)
def _down(scaled_Nk: Any, prefix_k3H: Any, out_NH: Any) -> None:
    count = prefix_k3H.shape[0]
    for row in range(scaled_Nk.shape[0]):
        out, of = out_NH[row], scaled_Nk[row]
        for n in range(0, count - count % 4, 4):  # four at once, so that the sums are stored a quarter as often
            for h in range(out.size):
                first = of[n] * np.float32(prefix_k3H[n, 2, h]) + of[n + 1] * np.float32(prefix_k3H[n + 1, 2, h])
                last = of[n + 2] * np.float32(prefix_k3H[n + 2, 2, h]) + of[n + 3] * np.float32(prefix_k3H[n + 3, 2, h])
                out[h] += first + last
        for n in range(count - count % 4, count):
            for h in range(out.size):
                out[h] += of[n] * np.float32(prefix_k3H[n, 2, h])
