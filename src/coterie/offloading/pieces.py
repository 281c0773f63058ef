"""One expert's computation in a visit, a piece of its neurons after the other, as they arrive.

An expert's output is a sum over its neurons. So its first neurons compute while the next are still being read, and of
the last read only a piece is left to compute. Pieces always begin at the same neurons and are added in their order:
which of them had to be waited for changes no bit.

Shapes: N rows of a group, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from coterie.offloading.visit import Visit
from coterie.ops.gated_ffn import Run

RunPiece = Callable[[int, int, Tensor, Tensor | None], Tensor]
"""(first neuron, one past the last, x [N, H], widths [N] or None) -> [N, H]."""


class PiecewiseExpert:
    """What is left to compute of an expert, and the sums so far.

    Source: beyond the paper.

    Args:
        visit: the visit.
        expert: the expert, which some of its groups run.
        step: neurons in a piece.

    Attributes:
        expert: the expert.
        first: the first neuron that has not been computed.
        end: one past the last neuron of the next piece.
        width: the widest that a group runs it.
        rows: of all its groups.
        outputs: of its groups, [N, H] each, once done; until then sums.
    """

    __slots__ = ("_groups", "_step", "_work", "end", "expert", "first", "outputs", "rows", "width")

    def __init__(self, visit: Visit, expert: int, step: int) -> None:
        groups = visit.work.groups
        self._work, self._step, self.expert = visit.work, step, expert
        self._groups = [(index, groups[index].width) for index in visit.groups_of[expert]]
        self.width, self.rows = visit.width_of(expert), visit.rows_of(expert)
        self.first, self.end = 0, min(step, self.width)
        self.outputs: dict[int, Tensor] = {}

    @property
    def done(self) -> bool:
        """Whether every piece has been computed."""
        return self.first >= self.width

    def compute(self, run: RunPiece) -> None:
        """The next piece of every group that is wide enough."""
        first, end, step = self.first, self.end, self._step
        for index, width in self._groups:
            if width <= first:
                continue
            output_NH = self._work.outputs(index, _piece(run, first, min(end, width)))
            if width > step:  # in float32 at least: rounding every sum of pieces would add up
                total_NH = output_NH if output_NH.dtype == torch.float64 else output_NH.float()
                total_NH = self.outputs[index] + total_NH if first else total_NH
                output_NH = total_NH.to(output_NH.dtype) if width <= end else total_NH
            self.outputs[index] = output_NH
        self.first, self.end = end, min(end + step, self.width)


def _piece(run: RunPiece, first: int, end: int) -> Run:
    """What computes this piece, whatever width a group has."""
    return lambda _, __, x_NH, width_N: run(first, end, x_NH, width_N)
