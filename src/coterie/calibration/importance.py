"""How much each neuron matters, from the tokens that reach its expert.

Source: CRISP section 3.2.2 (mean |act(gate x) * up x|); its variants are beyond the paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from coterie.calibration.activations import (
    activation_gradients,
    activations,
    bias_products,
    num_neurons,
    slots_by_expert,
)

if TYPE_CHECKING:
    from torch import Tensor

VARIANTS = (
    "mean_abs", "rms", "weighted_mean_abs", "mean_abs_down", "rms_down", "weighted_mean_abs_down", "first_order",
    "first_order_rms_down",
)  # fmt: skip


@dataclass(frozen=True)
class LayerWindow:
    """One MoE layer in one forward call.

    Attributes:
        experts: its experts module.
        hidden_TH: what the module was given.
        ids_TK: chosen experts.
        weights_TK: their routing weights, as the model uses them.
        gradients_TH: derivative of the summed loss by the module's output; None: not wanted.
    """

    experts: Any
    hidden_TH: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    gradients_TH: Tensor | None

    def normalised(self) -> Tensor:
        """[T, K] float32: the weights divided by their sum over K, which is not 1 in every family."""
        weights = self.weights_TK.float()
        return weights / weights.sum(dim=1, keepdim=True).clamp_min(1e-20)


def neuron_sums(window: LayerWindow, num_experts: int) -> tuple[dict[str, NDArray[np.float32]], NDArray[np.float32]]:
    """What one layer adds to the sums in one window.

    Args:
        window: the layer's inputs and, where wanted, gradients.
        num_experts: E.

    Returns:
        ([E, I] sums over each expert's tokens, by the names in `Sums.neurons`; [T, K] first-order change of the loss
        from masking each choice, s = -w dL/dw, zero without gradients).
    """
    import torch

    experts, top_k, gradients = window.experts, window.ids_TK.shape[1], window.gradients_TH
    weights, shares = window.weights_TK.float().reshape(-1), window.normalised().reshape(-1)
    names = ("abs", "weighted_abs", "square", "gradient_square")[: 3 if gradients is None else 4]
    sums = torch.zeros(len(names), num_experts, num_neurons(experts), device=weights.device)
    changes = torch.zeros_like(weights)
    for expert, slots in slots_by_expert(window.ids_TK, num_experts):
        tokens = slots // top_k
        a_NI = activations(experts, expert, window.hidden_TH[tokens])
        rows = torch.stack([torch.ones_like(shares[slots]), shares[slots]])
        sums[:2, expert] = rows @ a_NI.abs()
        sums[2, expert] = a_NI.square().sum(dim=0)
        if gradients is not None:
            weight_N = weights[slots]
            change_NI = a_NI * activation_gradients(experts, expert, gradients[tokens]) * weight_N[:, None]
            sums[3, expert] = change_NI.square().sum(dim=0)
            bias_N = bias_products(experts, expert, gradients[tokens])
            changes[slots] = -change_NI.sum(dim=1) - (0 if bias_N is None else bias_N * weight_N)
    done = sums.cpu().numpy()
    return {name: done[index] for index, name in enumerate(names)}, changes.cpu().numpy().reshape(-1, top_k)


def variants(
    sums: Mapping[str, NDArray[np.float64]], load_LE: NDArray[np.int64], down_norms_LEI: NDArray[np.float32]
) -> dict[str, NDArray[np.float32]]:
    """Every importance that the sums give, by the names in `VARIANTS`.

    Args:
        sums: `Sums.neurons`.
        load_LE: [L, E] tokens of each expert.
        down_norms_LEI: [L, E, I] norm of each neuron's column of down.

    Returns:
        [L, E, I] float32 means over the expert's tokens; zero where it has none. `first_order` is the mean squared
        first-order loss change from masking the neuron, nats^2, where the sums hold it, and `first_order_rms_down` the
        geometric mean of its root with `rms_down`: of two rough estimates of one thing, less rough than either.
    """
    tokens_LE1 = np.maximum(load_LE, 1)[:, :, None].astype(np.float64)
    means = {
        "mean_abs": sums["abs"] / tokens_LE1,
        "rms": np.sqrt(sums["square"] / tokens_LE1),
        "weighted_mean_abs": sums["weighted_abs"] / tokens_LE1,
    }
    means |= {f"{name}_down": values * down_norms_LEI for name, values in means.items()}
    if "gradient_square" in sums:
        means["first_order"] = sums["gradient_square"] / tokens_LE1
        means["first_order_rms_down"] = np.sqrt(np.sqrt(means["first_order"]) * means["rms_down"])
    return {name: values.astype(np.float32) for name, values in means.items()}
