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

from coterie.ops.eight_bits import down_of, gate_up_of

Gate = Callable[[Tensor], Tensor]
"""(all of gate, then all of up [.., 2k]) -> [.., k]."""


@dataclass(frozen=True)
class Biases:
    """What is resident of one layer's experts beside their records: biases and scales, neurons in the records' order.

    Attributes:
        gate_up_E2I: [E, 2, I] biases of gate, and of up; None: there are none.
        down_EH: [E, H] biases; None with the others.
        scale_E3I: [E, 3, I] float32, what each gate row, up row and down column of integers is to be multiplied by;
            None: records hold the weights themselves.
    """

    gate_up_E2I: Tensor | None = None
    down_EH: Tensor | None = None
    scale_E3I: Tensor | None = None


def gate_of(experts: Any) -> Gate:
    """The activation of a Transformers experts module, for gate and up one after the other."""
    own: Gate = experts._apply_gate
    if experts.is_concatenated:
        return own

    def gate(both_N2k: Tensor) -> Tensor:
        return own(torch.stack(both_N2k.chunk(2, dim=-1), dim=-1).flatten(-2))  # gate and up of a neuron side by side

    return gate


def biases_of(experts: Any, scale_E3I: Tensor | None = None) -> Biases | None:
    """The biases of a Transformers experts module, with the scales of its records; None where it has neither."""
    if not experts.has_bias:
        return None if scale_E3I is None else Biases(scale_E3I=scale_E3I)
    both = experts.gate_up_proj_bias
    parts = both.chunk(2, dim=-1) if experts.is_concatenated else (both[:, ::2], both[:, 1::2])
    return Biases(torch.stack(parts, dim=1), experts.down_proj_bias, scale_E3I)


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
    biases = biases or _NOTHING
    bias_2k = (None, None) if biases.gate_up_E2I is None else biases.gate_up_E2I[expert, :, first:width]
    scale_3k = None if biases.scale_E3I is None else biases.scale_E3I[expert, :, first:width]
    if scale_3k is None:
        both_N2k = torch.cat([linear(x_NH, prefix_k3H[:, part], bias_2k[part]) for part in (0, 1)], dim=-1)
    else:
        both_N2k = gate_up_of(x_NH, prefix_k3H, scale_3k)
        if biases.gate_up_E2I is not None:
            both_N2k = both_N2k + biases.gate_up_E2I[expert, :, first:width].reshape(-1)
    hidden_Nk = gate(both_N2k)
    if width_N is not None:
        beyond_Nk = torch.arange(first, width, device=width_N.device) >= width_N[:, None]
        hidden_Nk = hidden_Nk.masked_fill(beyond_Nk, 0)
    output_NH = hidden_Nk @ prefix_k3H[:, 2] if scale_3k is None else down_of(hidden_Nk, prefix_k3H, scale_3k)
    return output_NH if biases.down_EH is None or first > 0 else output_NH + biases.down_EH[expert]


_NOTHING = Biases()
