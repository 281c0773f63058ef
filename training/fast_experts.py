"""The experts of one layer, computed quickly on a CPU in bf16, forward and backward.

oneDNN builds a kernel for every new matrix shape it meets. Here each expert's tokens are padded with zero rows to a
multiple of 64, so that few shapes occur; and the gradients of all experts are written into two tensors instead of
being gathered from many views.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

NAME = "padded_training"
ROWS = 64


def register() -> None:
    """Make the implementation known to Transformers under `NAME`."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(NAME, experts_forward)


def experts_forward(module: Any, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """What Transformers calls in place of the experts' own forward; [T, H]."""
    return PaddedExperts.apply(hidden_TH, weights_TK, module.gate_up_proj, module.down_proj, ids_TK)


def padded_rows(ids_TK: Tensor, num_experts: int) -> tuple[Tensor, list[tuple[int, int]]]:
    """Where each (token, slot) lies when rows are grouped by expert and groups padded to multiples of `ROWS`.

    Returns:
        ([T * K] row of each slot, for each expert its (first row, end row)).
    """
    flat = ids_TK.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=num_experts)
    padded = (counts + ROWS - 1) // ROWS * ROWS
    ends = torch.cumsum(padded, 0)
    shift = (ends - padded) - (torch.cumsum(counts, 0) - counts)
    rows = torch.empty_like(flat)
    rows[order] = torch.arange(flat.numel()) + shift[flat[order]]
    limits = ends.tolist()
    return rows, list(zip([0, *limits[:-1]], limits, strict=True))


class PaddedExperts(torch.autograd.Function):
    """Gated feed-forward experts (SiLU), weighted and summed over each token's K."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, weights_TK: Tensor, gate_up: Tensor, down: Tensor, ids_TK: Tensor
    ) -> Tensor:
        """[T, H] from hidden [T, H], weights [T, K], gate_up [E, 2I, H], down [E, H, I], ids [T, K]."""
        tokens, top_k = ids_TK.shape
        rows, spans = padded_rows(ids_TK, len(gate_up))
        x = hidden_TH.new_zeros(spans[-1][1], hidden_TH.shape[1])
        x[rows] = hidden_TH.repeat_interleave(top_k, 0)
        projected = x.new_empty(len(x), gate_up.shape[1])
        for expert, (first, end) in enumerate(spans):
            if first < end:
                torch.mm(x[first:end], gate_up[expert].t(), out=projected[first:end])
        gate, up = projected.chunk(2, -1)
        act = functional.silu(gate) * up
        y = torch.empty_like(x)
        for expert, (first, end) in enumerate(spans):
            if first < end:
                torch.mm(act[first:end], down[expert].t(), out=y[first:end])
        y_TKH = y[rows].view(tokens, top_k, -1)
        ctx.save_for_backward(x, projected, act, y_TKH, weights_TK, gate_up, down, rows)
        ctx.spans = spans
        return (y_TKH * weights_TK.to(y.dtype)[..., None]).sum(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of hidden, weights, gate_up and down; none for the ids."""
        x, projected, act, y_TKH, weights_TK, gate_up, down, rows = ctx.saved_tensors
        grad_TH = grads[0]
        d_weights = (y_TKH * grad_TH[:, None]).sum(-1).to(weights_TK.dtype)
        dy = torch.zeros_like(x)
        dy[rows] = (grad_TH[:, None] * weights_TK.to(x.dtype)[..., None]).view(len(rows), -1)
        d_act, d_down = torch.empty_like(act), torch.zeros_like(down)
        for expert, (first, end) in enumerate(ctx.spans):
            if first < end:
                torch.mm(dy[first:end], down[expert], out=d_act[first:end])
                torch.mm(dy[first:end].t(), act[first:end], out=d_down[expert])
        gate, up = projected.chunk(2, -1)
        d_projected = torch.cat((torch.ops.aten.silu_backward(d_act * up, gate), d_act * functional.silu(gate)), -1)
        dx, d_gate_up = torch.empty_like(x), torch.zeros_like(gate_up)
        for expert, (first, end) in enumerate(ctx.spans):
            if first < end:
                torch.mm(d_projected[first:end], gate_up[expert], out=dx[first:end])
                torch.mm(d_projected[first:end].t(), x[first:end], out=d_gate_up[expert])
        d_hidden = dx[rows].view(*y_TKH.shape).sum(1)
        return d_hidden, d_weights, d_gate_up, d_down, None
