"""The language-model loss, computed a few hundred tokens at a time so that all logits never exist at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ROWS = 256


class HeadLoss(torch.autograd.Function):
    """Mean cross-entropy of `hidden @ weight.T` against targets; gradients are made on the way forward."""

    @staticmethod
    def forward(ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor) -> Tensor:
        """Scalar float32 from hidden [T, H], weight [V, H] and targets [T] int64."""
        tokens = len(targets_T)
        d_hidden, d_weight = torch.empty_like(hidden_TH), torch.zeros(weight_VH.shape)
        total = torch.zeros(())
        for first in range(0, tokens, ROWS):
            part, target = hidden_TH[first : first + ROWS], targets_T[first : first + ROWS, None]
            probability = torch.mm(part, weight_VH.t()).float()
            chosen = probability.gather(1, target)
            highest = probability.amax(1, keepdim=True)
            scale = probability.sub_(highest).exp_().sum(1, keepdim=True)
            total += (scale.log() + highest - chosen).sum()
            probability.div_(scale * tokens)
            probability.scatter_add_(1, target, torch.full_like(chosen, -1.0 / tokens))
            d_logits = probability.to(hidden_TH.dtype)
            torch.mm(d_logits, weight_VH, out=d_hidden[first : first + ROWS])
            d_weight += torch.mm(d_logits.t(), part)
        ctx.save_for_backward(d_hidden, d_weight.to(weight_VH.dtype))
        return total / tokens

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        """Gradients of hidden and weight; none for the targets."""
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * grads[0].to(d_hidden.dtype), d_weight * grads[0].to(d_weight.dtype), None
