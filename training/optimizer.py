"""AdamW on float32 master weights of a model whose own weights and gradients are bf16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


class FlatGroup:
    """Parameters that share a weight decay, laid out as one bf16 row with one float32 master row.

    The parameters and their gradients become views of the rows, so that a step is a few long vector operations.
    """

    def __init__(self, parameters: list[nn.Parameter], decay: float) -> None:
        self.decay = decay
        self.master = nn.Parameter(torch.cat([parameter.detach().float().flatten() for parameter in parameters]))
        self.weights = self.master.detach().to(torch.bfloat16)
        self.grads = torch.zeros_like(self.weights)
        start = 0
        for parameter in parameters:
            end = start + parameter.numel()
            parameter.data = self.weights[start:end].view(parameter.shape)
            parameter.grad = self.grads[start:end].view(parameter.shape)
            start = end
        self.master.grad = torch.zeros_like(self.master)

    def publish(self) -> None:
        """Round the master weights into the model's."""
        self.weights.copy_(self.master.detach())


@dataclass
class MasterAdamW:
    """AdamW with weight decay on matrices alone."""

    groups: list[FlatGroup]
    adam: torch.optim.AdamW

    @classmethod
    def of(cls, model: nn.Module, decay: float, betas: tuple[float, float]) -> MasterAdamW:
        """Take over a float32 model: it is bf16 afterwards."""
        matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
        vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
        groups = [FlatGroup(matrices, decay), FlatGroup(vectors, 0.0)]
        options = [{"params": [group.master], "weight_decay": group.decay} for group in groups]
        return cls(groups, torch.optim.AdamW(options, lr=0.0, betas=betas, eps=1e-8, fused=True))

    def step(self, learning_rate: float, max_norm: float) -> float:
        """Clip, step, round, clear the gradients; returns the norm before clipping."""
        masters = [group.master for group in self.groups]
        for group in self.groups:
            assert group.master.grad is not None
            group.master.grad.copy_(group.grads)
        norm = float(nn.utils.clip_grad_norm_(masters, max_norm))
        for options in self.adam.param_groups:
            options["lr"] = learning_rate
        self.adam.step()
        for group in self.groups:
            group.publish()
            group.grads.zero_()
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Master weights and moments."""
        return {"masters": [group.master.detach() for group in self.groups], "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        for group, master in zip(self.groups, state["masters"], strict=True):
            group.master.data.copy_(master)
            group.publish()
        self.adam.load_state_dict(state["adam"])
