"""Experts whose neurons are masked by what they are worth, so that a loss has a gradient by that worth."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from coterie.calibration.activations import activations, slots_by_expert
from coterie.models.layers import MoELayer, find_moe_layers
from coterie.models.widths import experts_forward
from coterie.pruning.value_share import LEAST_WEIGHT

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Masks:
    """Which neurons run: i of expert e iff log w + log v_i >= threshold, with w normalised over the token's K.

    Attributes:
        log_value_LEI: [L, E, I] float32, the logarithm of what each neuron is worth, in the order the model has them.
        threshold: a logarithm.
        softness: how far from the threshold a neuron still gives a gradient, in logarithms.
        hard: neurons run or do not, and the gradient is that of the soft mask (straight through). False: they run by
            as much as sigmoid((log w + log v_i - threshold) / softness) says, and the gradient is exact.
    """

    log_value_LEI: Tensor
    threshold: float
    softness: float
    hard: bool = True

    def of(self, log_value_I: Tensor, log_weight_N: Tensor) -> Tensor:
        """The masks of one expert's tokens, [N, I]."""
        import torch

        excess_NI = log_weight_N[:, None] + log_value_I - self.threshold
        soft_NI = torch.sigmoid(excess_NI / self.softness)
        if not self.hard:
            return soft_NI
        return soft_NI + ((excess_NI >= 0).to(soft_NI.dtype) - soft_NI).detach()

    def slopes(self, log_value_I: Tensor, log_weight_N: Tensor) -> Tensor:
        """[I] the derivative of the number of neurons that run, by each of the logarithms."""
        soft_NI = Masks(self.log_value_LEI, self.threshold, self.softness, hard=False).of(log_value_I, log_weight_N)
        return (soft_NI * (1 - soft_NI)).sum(0) / self.softness


def log_weights(weights_TK: Tensor) -> Tensor:
    """[T * K] logarithms of routing weights normalised over K; no gradient."""
    weights = weights_TK.detach().float()
    shares = weights / weights.sum(dim=1, keepdim=True).clamp_min(LEAST_WEIGHT)
    return shares.clamp_min(LEAST_WEIGHT).log().reshape(-1)


@contextmanager
def masking(model: Any, masks: Masks) -> Iterator[None]:
    """The model's experts run masked inside the block; afterwards the model is as it was.

    Whole experts are computed. What a layer computes in between is computed again in the backward pass instead of
    being kept, so memory grows by one layer's neurons and by every layer's input.

    Args:
        model: a Transformers model, its experts gated and fused (`check_experts`).
        masks: may be changed between two forward calls, not between a forward and its backward.

    Raises:
        CheckpointError: when the model's MoE layers are not recognised.
        ConfigError: where widths are applied to the model already.
    """
    with ExitStack() as stack:
        for layer in find_moe_layers(model):
            stack.enter_context(experts_forward(layer, _runner(layer, masks)))
        yield


def _runner(layer: MoELayer, masks: Masks) -> Any:
    def run(index: int, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        output: Tensor = checkpoint(
            masked_ffn, layer.experts, hidden_TH, ids_TK, weights_TK, masks.log_value_LEI[index].to(hidden_TH.device),
            masks, use_reentrant=False, preserve_rng_state=False,
        )  # fmt: skip
        return output

    return run


def masked_ffn(
    experts: Any, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, log_value_EI: Tensor, masks: Masks
) -> Tensor:
    """A layer's experts with their neurons masked, weighted and summed, [T, H].

    Args:
        experts: an experts module of Transformers.
        hidden_TH: [T, H] its input.
        ids_TK: [T, K] chosen experts.
        weights_TK: [T, K] their routing weights, as the model uses them.
        log_value_EI: [E, I] this layer's.
        masks: threshold and softness.
    """
    import torch

    (tokens, top_k), log_weight_S = ids_TK.shape, log_weights(weights_TK)
    outputs, slots_of = [], []
    for expert, slots in slots_by_expert(ids_TK, len(experts.down_proj)):
        mask_NI = masks.of(log_value_EI[expert], log_weight_S[slots])
        neurons_NI = activations(experts, expert, hidden_TH[slots // top_k]) * mask_NI
        outputs.append(_down(experts, expert, neurons_NI, mask_NI))
        slots_of.append(slots)
    output_SH = torch.cat(outputs)[torch.cat(slots_of).argsort()]
    weighted_TKH = output_SH.view(tokens, top_k, -1) * weights_TK[:, :, None].float()
    return weighted_TKH.sum(1).to(hidden_TH.dtype)


def _down(experts: Any, expert: int, neurons_NI: Tensor, mask_NI: Tensor) -> Tensor:
    """[N, H] float32; an expert of which nothing runs is skipped, its bias included."""
    weight = experts.down_proj[expert].to(neurons_NI.dtype)
    output_NH: Tensor = neurons_NI @ (weight if experts.is_transposed else weight.t())
    if experts.has_bias:
        output_NH = output_NH + experts.down_proj_bias[expert].float() * mask_NI.amax(dim=1, keepdim=True).detach()
    return output_NH
