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
        width: the widest that a group runs it.
    """

    def __init__(self, visit: Visit, expert: int, step: int) -> None:
        self._work, self._step = visit.work, step
        self.expert, self.first, self.width = expert, 0, visit.width_of(expert)
        self._widths = {index: visit.work.groups[index].width for index in visit.groups_of[expert]}
        self._sums: dict[int, Tensor] = {}

    @property
    def end(self) -> int:
        """Where the next piece ends."""
        return min(self.first + self._step, self.width)

    @property
    def done(self) -> bool:
        """Whether every piece has been computed."""
        return self.first >= self.width

    def compute(self, run: RunPiece) -> None:
        """The next piece of every group that is wide enough."""
        first, end = self.first, self.end
        for index, width in self._widths.items():
            if width <= first:
                continue
            piece = _piece(run, first, min(end, width))
            output_NH = self._work.outputs(index, piece)
            if width > self._step:  # in float32 at least: rounding every sum of pieces would add up
                output_NH = output_NH if output_NH.dtype == torch.float64 else output_NH.float()
            self._sums[index] = self._sums[index] + output_NH if first else output_NH
        self.first = end

    def outputs(self, dtype: torch.dtype) -> dict[int, Tensor]:
        """The groups' outputs, [N, H] each, once done."""
        assert self.done, "pieces are left"
        return {index: total_NH.to(dtype) for index, total_NH in self._sums.items()}


def _piece(run: RunPiece, first: int, end: int) -> Run:
    """What computes this piece, whatever width a group has."""
    return lambda _, __, x_NH, width_N: run(first, end, x_NH, width_N)
