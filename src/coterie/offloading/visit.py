"""What one forward pass of a layer asks of the cache, and then computes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from coterie.ops.gated_ffn import SlotGroups
from coterie.ops.one_token import OneToken, work_of


class Visit:
    """A layer's tokens, what they ask of each expert, and, once widths are final, the work in groups.

    Attributes:
        layer: MoE layer.
        need_E: [E] int32, how many of its first blocks each expert needs; not to be kept beyond the visit.
        need: the same by expert, for those that need any.
        rows: slots that each of these runs.
        chosen: experts that its tokens chose, skipped ones included.
        missing: experts of which a needed block is neither resident nor on its way.
        work: its groups.
        groups_of: indices of groups by expert.
        idle: indices of the groups of width 0.
    """

    def __init__(self, layer: int, need_E: NDArray[np.int32], asked: list[list[int]], chosen: int) -> None:
        self.layer, self.need_E, self.chosen = layer, need_E, chosen
        self.need = {expert: blocks for expert, blocks, _ in asked}
        self.rows = [rows for *_, rows in asked]
        self.missing = 0
        self.work: SlotGroups | OneToken
        self.groups_of: dict[int, list[int]] = {}
        self.idle: list[int] = []

    def group(self, hidden_TH: Tensor, ids_TK: Tensor, widths_TK: Tensor, limits: tuple[int, int]) -> None:
        """Group the slots by expert and width; with prefixes that are resident, experts that need nothing may run."""
        where = hidden_TH.device
        self.work = work_of(hidden_TH, ids_TK.to(where), widths_TK.to(where), limits)
        for index, group in enumerate(self.work.groups):
            if group.width == 0:
                self.idle.append(index)
            else:
                self.groups_of.setdefault(group.expert, []).append(index)

    def width_of(self, expert: int) -> int:
        """The widest that any of its tokens runs it."""
        return max(self.work.groups[index].width for index in self.groups_of[expert])

    def rows_of(self, expert: int) -> int:
        """How many tokens it has."""
        return sum(self.work.groups[index].count for index in self.groups_of[expert])


def no_expert(*_: Any) -> Tensor:
    """What a group of width 0 would run."""
    raise AssertionError("a group of width 0 runs no expert")
