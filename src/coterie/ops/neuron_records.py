"""Experts run from records `[I, 3, H]`: gate row, up row and down column of a neuron side by side, any prefix of them.

Shapes: N rows, H hidden size, k the neurons of a prefix.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear


def run_record(
    record_I3H: Tensor, width: int, gate: Callable[[Tensor], Tensor], x_NH: Tensor, width_N: Tensor | None = None
) -> Tensor:
    """The outputs of an expert's first neurons, not yet weighted; nothing is copied, and only they are read.

    Args:
        record_I3H: [I, 3, H].
        width: neurons to compute, at least 1.
        gate: (all of gate, then all of up [.., 2k]) -> [.., k], the experts module's own.
        x_NH: [N, H] its input.
        width_N: [N] neurons to use for each row, at most `width`; None for all.

    Returns:
        [N, H].
    """
    prefix_k3H = record_I3H[:width]
    both_N2k = torch.cat([linear(x_NH, prefix_k3H[:, 0]), linear(x_NH, prefix_k3H[:, 1])], dim=-1)
    hidden_Nk = gate(both_N2k)
    if width_N is not None:
        beyond_Nk = torch.arange(width, device=width_N.device) >= width_N[:, None]
        hidden_Nk = hidden_Nk.masked_fill(beyond_Nk, 0)
    return hidden_Nk @ prefix_k3H[:, 2]
