"""The neurons of one expert on some tokens, forward and backward, for every layout of the fused weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from coterie.errors import CheckpointError
from coterie.models.layers import MoELayer

if TYPE_CHECKING:
    from torch import Tensor


def check_experts(layer: MoELayer) -> None:
    """Refuse experts whose neurons cannot be told from their weights.

    Raises:
        CheckpointError: for an experts module without fused gated weights, or with a norm after each expert.
    """
    experts: Any = layer.experts
    fused = getattr(experts, "gate_up_proj", None), getattr(experts, "down_proj", None)
    gated = getattr(experts, "has_gate", False) and hasattr(experts, "_apply_gate")
    if any(getattr(tensor, "ndim", 0) != 3 for tensor in fused) or not gated or experts.has_post_expert_norm:
        raise CheckpointError(
            f"the experts of MoE layer {layer.index} ({type(experts).__name__}) are no gated feed-forward networks "
            "with gate_up_proj and down_proj of three axes; their neurons cannot be profiled"
        )


def num_neurons(experts: Any) -> int:
    """Neurons of one expert, I."""
    return int(experts.down_proj.shape[1 if experts.is_transposed else 2])


def activations(experts: Any, expert: int, hidden_NH: Tensor) -> Tensor:
    """[N, I] float32: act(gate x) * up x of one expert, by the module's own gating.

    Args:
        experts: an experts module of Transformers.
        expert: which of its experts.
        hidden_NH: [N, H] the tokens that chose it.
    """
    import torch

    weight = experts.gate_up_proj[expert]
    x, weight = _same_dtype(hidden_NH, weight)
    projected = x @ weight if experts.is_transposed else torch.nn.functional.linear(x, weight)
    if experts.has_bias:
        projected = projected + experts.gate_up_proj_bias[expert].to(projected.dtype)
    gated: Tensor = experts._apply_gate(projected)
    return gated.float()


def activation_gradients(experts: Any, expert: int, gradients_NH: Tensor) -> Tensor:
    """[N, I] float32: derivative of the loss by each activation, for a routing weight of 1.

    Args:
        experts: an experts module of Transformers.
        expert: which of its experts.
        gradients_NH: [N, H] derivative of the loss by the layer's output for the tokens that chose it.
    """
    gradients, weight = _same_dtype(gradients_NH, experts.down_proj[expert])
    return (gradients @ (weight.t() if experts.is_transposed else weight)).float()


def bias_products(experts: Any, expert: int, gradients_NH: Tensor) -> Tensor | None:
    """[N] float32: first-order effect of the expert's output bias, for a routing weight of 1; None without biases."""
    return gradients_NH.float() @ experts.down_proj_bias[expert].float() if experts.has_bias else None


def down_norms(experts: Any) -> Tensor:
    """[E, I] float32: Euclidean norm of what each neuron writes into the output (its column of down)."""
    import torch

    axis = 1 if experts.is_transposed else 0
    return torch.stack([weight.float().norm(dim=axis) for weight in experts.down_proj.detach()])


def slots_by_expert(ids_TK: Tensor, num_experts: int) -> Iterator[tuple[int, Tensor]]:
    """Each expert in use with its slots: indices into the flattened [T * K], rising; the token is slot // K."""
    flat = ids_TK.reshape(-1).long()
    order = flat.argsort(stable=True)
    start = 0
    for expert, count in enumerate(flat.bincount(minlength=num_experts)[:num_experts].tolist()):
        if count:
            yield expert, order[start : start + count]
        start += count


def _same_dtype(rows: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the weight's dtype; in float32 on a CPU, which builds a bf16 kernel for every new number of rows."""
    if rows.device.type == "cpu":
        return rows.float(), weight.float()
    return rows.to(weight.dtype), weight
