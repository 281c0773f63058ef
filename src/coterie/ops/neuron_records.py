"""Experts run from records `[I, 3, H]`: gate row, up row and down column of a neuron side by side, any prefix of them.

Shapes: N rows, H hidden size, k the neurons of a prefix, E experts, I neurons of one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

Gate = Callable[[Tensor], Tensor]
"""(all of gate, then all of up [.., 2k]) -> [.., k]."""


@dataclass(frozen=True)
class Biases:
    """The biases of one layer's experts, neurons in the records' order.

    Attributes:
        gate_up_E2I: [E, 2, I] of gate, and of up.
        down_EH: [E, H].
    """

    gate_up_E2I: Tensor
    down_EH: Tensor


def gate_of(experts: Any) -> Gate:
    """The activation of a Transformers experts module, for gate and up one after the other."""
    own: Gate = experts._apply_gate
    if experts.is_concatenated:
        return own

    def gate(both_N2k: Tensor) -> Tensor:
        return own(torch.stack(both_N2k.chunk(2, dim=-1), dim=-1).flatten(-2))  # gate and up of a neuron side by side

    return gate


def biases_of(experts: Any) -> Biases | None:
    """The biases of a Transformers experts module; None where it has none."""
    if not experts.has_bias:
        return None
    both = experts.gate_up_proj_bias
    parts = both.chunk(2, dim=-1) if experts.is_concatenated else (both[:, ::2], both[:, 1::2])
    return Biases(torch.stack(parts, dim=1), experts.down_proj_bias)


def run_record(
    record_I3H: Tensor, width: int, gate: Gate, x_NH: Tensor, width_N: Tensor | None = None,
    biases: Biases | None = None, expert: int = 0, first: int = 0,
) -> Tensor:  # fmt: skip
    """The outputs of an expert's first neurons, not yet weighted; nothing is copied, and only they are read.

    In pieces, the next one beginning with neuron `first` where the last one ended, the outputs add up to those of all.

    Args:
        record_I3H: [I, 3, H].
        width: neurons to compute, at least 1; more than `first`.
        gate: the experts module's own, see `gate_of`.
        x_NH: [N, H] its input.
        width_N: [N] neurons to use for each row, at most `width`; None for all.
        biases: of the layer's experts.
        expert: which of them it is; matters for biases alone.
        first: the first neuron to compute; the piece that begins with neuron 0 has the bias of the outputs.

    Returns:
        [N, H].
    """
    prefix_k3H = record_I3H[first:width]
    bias_2k = (None, None) if biases is None else biases.gate_up_E2I[expert, :, first:width]
    both_N2k = torch.cat([linear(x_NH, prefix_k3H[:, part], bias_2k[part]) for part in (0, 1)], dim=-1)
    hidden_Nk = gate(both_N2k)
    if width_N is not None:
        beyond_Nk = torch.arange(first, width, device=width_N.device) >= width_N[:, None]
        hidden_Nk = hidden_Nk.masked_fill(beyond_Nk, 0)
    output_NH = hidden_Nk @ prefix_k3H[:, 2]
    return output_NH if biases is None or first > 0 else output_NH + biases.down_EH[expert]
