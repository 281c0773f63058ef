"""The work of one token, as decoding has it: one expert a slot, nothing to sort, gather or scatter.

Shapes: K top-k, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.ops.gated_ffn import Group, Run, SlotGroups, weighted_sum


@dataclass(frozen=True)
class OneToken:
    """One token's slots, to be computed in whatever order; what `SlotGroups` is for many, bit for bit.

    Attributes:
        groups: one a slot, in the order of slots.
        hidden_1H: [1, H] the experts' input.
    """

    groups: list[Group]
    hidden_1H: Tensor

    def outputs(self, index: int, run: Run) -> Tensor:
        """See `SlotGroups.outputs`; [1, H]."""
        group = self.groups[index]
        if group.width == 0:
            return torch.zeros_like(self.hidden_1H)
        return run(group.expert, group.width, self.hidden_1H, None)

    def combine(self, outputs: list[Tensor], weights_TK: Tensor) -> Tensor:
        """See `SlotGroups.combine`; [1, H]."""
        return weighted_sum(torch.cat(outputs)[None], weights_TK).to(self.hidden_1H.dtype)


def work_of(
    hidden_TH: Tensor, ids_TK: Tensor, widths_TK: Tensor, limits: tuple[int, int]
) -> SlotGroups | OneToken:  # fmt: skip
    """A layer's work in groups that are computed together.

    Args:
        hidden_TH: [T, H] the experts' input.
        ids_TK: [T, K] integers, the chosen experts.
        widths_TK: [T, K] integers from 0 to I: neurons to run.
        limits: experts, neurons of one.

    Raises:
        ConfigError: for a width or an expert that cannot be.
    """
    if len(hidden_TH) != 1:
        return SlotGroups.of(hidden_TH, ids_TK, widths_TK, limits)
    slots = zip(ids_TK[0].tolist(), widths_TK[0].tolist(), strict=True)
    groups = [Group(expert, width, 1) for expert, width in slots]
    for group in groups:
        group.require_within(limits)
    return OneToken(groups, hidden_TH)
