"""What the routers of a model do: collected while it runs, and a loss that keeps them from using few experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def collect_routing(model: Any) -> Iterator[list[tuple[Tensor, Tensor, Tensor]]]:
    """A list that receives, layer by layer, (logits [T, E], weights [T, K], ids [T, K]) of each forward pass.

    Whoever holds it clears it between passes. The hooks are gone afterwards.
    """
    collected: list[tuple[Tensor, Tensor, Tensor]] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _module, _inputs, output: collected.append(output))
        for layer in model.model.layers
        if hasattr(layer.mlp, "experts")
    ]
    try:
        yield collected
    finally:
        for hook in hooks:
            hook.remove()


def balance_loss(routing: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """Load-balancing loss, layer by layer, then the mean over layers: 1 when every expert is used alike.

    Source: Switch Transformer (arXiv:2101.03961), equation 4, with each token's K choices counted as K uses. Unlike
    Transformers' own, layers are not pooled: a layer cannot hide its skew behind another's.
    """
    losses = []
    for logits_TE, _, ids_TK in routing:
        num_experts = logits_TE.shape[-1]
        used_E = torch.bincount(ids_TK.reshape(-1), minlength=num_experts) / ids_TK.numel()
        probability_E = logits_TE.float().softmax(-1).mean(0)
        losses.append(num_experts * (used_E * probability_E).sum())
    return torch.stack(losses).mean()


def load_counts(routing: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """Uses of every expert, [L, E] int64."""
    return torch.stack([torch.bincount(ids.reshape(-1), minlength=logits.shape[-1]) for logits, _, ids in routing])
