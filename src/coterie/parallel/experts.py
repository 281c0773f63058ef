"""The experts of one device on the visits it received: computed expert by expert, summed visit by visit.

Shapes: R visits, K top-k, S slots whose expert is here, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.ops.gated_ffn import ExpertWeights, SlotGroups
from coterie.parallel.comms import Comms
from coterie.parallel.dispatch import DispatchHandle, Received, combine, dispatch
from coterie.parallel.layer_placement import LayerPlacement
from coterie.parallel.two_hop import TwoHopHandle, combine_two_hop, dispatch_two_hop


def run_experts(weights: ExpertWeights, received: Received) -> Tensor:
    """The weighted sum of every visit's experts here, in the order of its slots; the stage-1 sum of CAP §II-C.

    Args:
        weights: this device's experts; local expert i is its i-th.
        received: the visits.

    Returns:
        [R, H], float32, or float64 for float64 hidden states: not rounded before it travels.
    """
    ids_RK = received.ids_RK
    row_S, column_S = (ids_RK >= 0).nonzero(as_tuple=True)
    outputs_SH = slot_outputs(weights, received.hidden_RH[row_S], ids_RK[row_S, column_S])
    exact = torch.float64 if outputs_SH.dtype == torch.float64 else torch.float32
    weighted_SH = outputs_SH.to(exact) * received.weights_RK[row_S, column_S].to(exact)[:, None]
    total_RH = weighted_SH.new_zeros(received.hidden_RH.shape)
    for column in range(ids_RK.shape[1]):
        these_S = column_S == column
        total_RH.index_add_(0, row_S[these_S], weighted_SH[these_S])
    return total_RH


def slot_outputs(weights: ExpertWeights, hidden_SH: Tensor, ids_S: Tensor) -> Tensor:
    """The output of one expert for each row, not yet weighted; rows of one expert are computed together.

    Args:
        weights: the experts.
        hidden_SH: [S, H].
        ids_S: [S] int64, the expert of each row.

    Returns:
        [S, H].
    """
    widths_S = torch.full_like(ids_S, weights.width)
    slots = SlotGroups.of(hidden_SH, ids_S[:, None], widths_S[:, None], (weights.num_experts, weights.width))
    outputs_SH = torch.empty_like(hidden_SH)
    for index, start in enumerate(slots.starts[:-1]):
        outputs_SH[slots.slot_S[start : slots.starts[index + 1]]] = slots.outputs(index, weights.run)
    return outputs_SH


def route(
    hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, layer: LayerPlacement, weights: ExpertWeights, comms: Comms,
    *, two_hop: bool = False, active: bool = True,
) -> tuple[Tensor, DispatchHandle | TwoHopHandle]:  # fmt: skip
    """Dispatch, compute, combine: the routed experts of one layer on this rank's tokens.

    Args:
        hidden_TH: as for `dispatch`, like the arguments not named here.
        ids_TK: as there.
        weights_TK: as there.
        layer: as there.
        weights: this device's experts; local expert i is its i-th.
        comms: as there.
        two_hop: by relays (`two_hop.dispatch_two_hop`).
        active: as there.

    Returns:
        [T, H], and the handle, which says what was sent.
    """
    if two_hop:
        received, relayed = dispatch_two_hop(hidden_TH, ids_TK, weights_TK, layer, comms, active=active)
        return combine_two_hop(run_experts(weights, received), relayed), relayed
    received, handle = dispatch(hidden_TH, ids_TK, weights_TK, layer, comms, active=active)
    return combine(run_experts(weights, received), handle), handle
