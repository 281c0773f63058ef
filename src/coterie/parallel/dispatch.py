"""Dispatch and combine: every token travels once to each device it visits, and one sum of its experts comes back.

Shapes: T tokens of this rank, K top-k, G ranks, H hidden size; V visits that this rank's tokens make, R visits that its
experts receive. Visits are ordered by their other end: the other ranks, rising, then this rank itself, whose rows never
leave it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.errors import RankError
from coterie.parallel.comms import Comms, others, swap_rows
from coterie.parallel.layer_placement import LayerPlacement
from coterie.parallel.wire import RowFormat

_HEADER_BYTES = 3 * 8


@dataclass(frozen=True)
class Received:
    """What a device computes on.

    Attributes:
        hidden_RH: [R, H], one row for every visit.
        ids_RK: [R, K] int64, which of this device's experts to run; -1 in slots whose expert is elsewhere. Slots keep
            their places, so that sums over them keep their order.
        weights_RK: [R, K] float32 (float64 with float64 hidden states), the router's; those of slots that are -1 say
            nothing.
    """

    hidden_RH: Tensor
    ids_RK: Tensor
    weights_RK: Tensor


@dataclass(frozen=True)
class DispatchHandle:
    """What `combine` needs to know of a `dispatch`.

    Attributes:
        comms: the group it went through.
        tag: what was dispatched, the same on all ranks.
        format: of the rows.
        num_tokens: T.
        token_V: [V] int64, the token of each visit.
        sent: [G] visits to each rank, this one included.
        received: [G] visits from each rank, this one included.
        nodes: [G] node of each rank: sums are taken within nodes first.
        any_active: whether any rank that said so here is still active.
    """

    comms: Comms
    tag: int
    format: RowFormat
    num_tokens: int
    token_V: Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]
    nodes: tuple[int, ...]
    any_active: bool

    def dispatch_bytes(self) -> list[int]:
        """[G] bytes of hidden states sent to each other rank; 0 to itself."""
        return self._sent_away(self.sent, self.format.payload_bytes)

    def combine_bytes(self) -> list[int]:
        """[G] bytes of sums returned to each other rank; 0 to itself."""
        return self._sent_away(self.received, self.format.payload_bytes)

    def metadata_bytes(self) -> list[int]:
        """[G] bytes of ids, weights and counts sent to each other rank; 0 to itself."""
        rows = self._sent_away(self.sent, self.format.metadata_bytes)
        return [count + _HEADER_BYTES * (rank != self.comms.rank) for rank, count in enumerate(rows)]

    def _sent_away(self, visits: Sequence[int], row_bytes: int) -> list[int]:
        return [0 if rank == self.comms.rank else count * row_bytes for rank, count in enumerate(visits)]


def dispatch(
    hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, layer: LayerPlacement, comms: Comms, *, active: bool = True
) -> tuple[Received, DispatchHandle]:
    """Send every token once to each device that hosts one of its experts.

    All ranks call this for the same layer, those without tokens too.

    Source: CAP §II-C (zero-redundancy token transfer), §V.

    Args:
        hidden_TH: [T, H] this rank's tokens; T may be 0.
        ids_TK: [T, K] integers, the chosen experts, or copies where there are any (`copy_choice`); -1 for a slot that
            is dropped.
        weights_TK: [T, K] float.
        layer: where this layer's experts are.
        comms: the group; its ranks are the placement's devices.
        active: whether this rank has tokens to come; told to every rank (`DispatchHandle.any_active`).

    Returns:
        The visits to this device, and what `combine` takes.

    Raises:
        RankError: when a rank ended, did not answer in time, or dispatches another layer.
    """
    dropped_TK = ids_TK < 0
    device_TK = layer.device_P[ids_TK.clamp(min=0)].masked_fill(dropped_TK, -1)
    nodes = tuple(layer.topology.node_of_device().tolist())
    received, handle = send_visits(hidden_TH, ids_TK, weights_TK, device_TK, nodes, comms, layer.layer, active)
    return with_local_ids(received, layer), handle


def combine(outputs_RH: Tensor, handle: DispatchHandle) -> Tensor:
    """Return every visit's sum to its home, and add them up there: devices in rising order within a node, then nodes.

    Source: CAP §II-C (stage-2 sum). The order is fixed, so that results do not depend on what arrives when.

    Args:
        outputs_RH: [R, H] the weighted sum of each visit's experts here (`experts.run_experts`).
        handle: from this `dispatch`.

    Returns:
        [T, H], dtype of the dispatched hidden states; zero for a token that visits no device.

    Raises:
        RankError: when a rank ended or did not answer in time.
    """
    returned_VH = return_visits(outputs_RH, handle)
    exact = torch.float64 if handle.format.dtype == torch.float64 else torch.float32
    total_TH = torch.zeros((handle.num_tokens, handle.format.hidden_size), dtype=exact, device=returned_VH.device)
    places = _places(handle.sent, handle.comms.rank)
    for node in sorted({node for node, count in zip(handle.nodes, handle.sent, strict=True) if count}):
        node_TH = torch.zeros_like(total_TH)
        for rank in (rank for rank in range(handle.comms.size) if handle.nodes[rank] == node):
            node_TH.index_add_(0, handle.token_V[places[rank]], returned_VH[places[rank]].to(exact))
        total_TH += node_TH
    return total_TH.to(handle.format.dtype)


def send_visits(
    hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, rank_TK: Tensor, nodes: tuple[int, ...], comms: Comms,
    tag: int, active: bool,
) -> tuple[Received, DispatchHandle]:  # fmt: skip
    """One row from each token to each rank that one of its slots goes to; ids arrive as they are.

    Args:
        hidden_TH: as for `dispatch`, like the arguments not named here.
        ids_TK: as there.
        weights_TK: as there.
        rank_TK: [T, K] int64, the rank of each slot; -1: nowhere.
        nodes: as in `DispatchHandle`.
        comms: as there.
        tag: the same on all ranks, or they are out of step.
        active: as there.
    """
    order = [*others(comms), comms.rank]
    exact = torch.float64 if hidden_TH.dtype == torch.float64 else torch.float32
    row_format = RowFormat(ids_TK.shape[1], hidden_TH.shape[1], exact, hidden_TH.dtype)
    ranks_G = torch.tensor(order, device=rank_TK.device)
    visits_GT = (rank_TK[None] == ranks_G[:, None, None]).any(-1)
    which_V, token_V = visits_GT.nonzero(as_tuple=True)
    count_G = visits_GT.sum(1)
    sent_G = torch.empty_like(count_G)
    sent_G[ranks_G] = count_G
    received, any_active = _announce(sent_G, comms, tag, active)
    sent = [int(count) for count in sent_G.tolist()]
    here_VK = rank_TK[token_V] == ranks_G[which_V][:, None]
    rows_VB = row_format.pack(
        hidden_TH[token_V], ids_TK[token_V].masked_fill(~here_VK, -1), weights_TK[token_V].to(exact)
    )
    rows_RB = torch.empty((sum(received), row_format.row_bytes), dtype=torch.uint8, device=rows_VB.device)
    _exchange_with_own(comms, rows_VB, sent, rows_RB, received)
    handle = DispatchHandle(
        comms, tag, row_format, len(hidden_TH), token_V, tuple(sent), tuple(received), nodes, any_active
    )
    return Received(*row_format.unpack(rows_RB)), handle


def return_visits(outputs_RH: Tensor, handle: DispatchHandle) -> Tensor:
    """The rows that visits brought back, [V, H]: the way of `send_visits` backwards."""
    assert len(outputs_RH) == sum(handle.received), "a row for every visit received"
    outputs_RH = outputs_RH.to(handle.format.dtype).contiguous()
    returned_VH = outputs_RH.new_empty((len(handle.token_V), handle.format.hidden_size))
    _exchange_with_own(handle.comms, outputs_RH, handle.received, returned_VH, handle.sent)
    return returned_VH


def with_local_ids(received: Received, layer: LayerPlacement) -> Received:
    """The same with this device's own numbers of its experts."""
    ids_RK = layer.local_P[received.ids_RK.clamp(min=0)].masked_fill(received.ids_RK < 0, -1)
    return Received(received.hidden_RH, ids_RK, received.weights_RK)


def _announce(sent_G: Tensor, comms: Comms, tag: int, active: bool) -> tuple[list[int], bool]:
    """Tell every rank how many visits come, and learn how many it sends."""
    said_G3 = torch.stack([torch.full_like(sent_G, tag), torch.full_like(sent_G, int(active)), sent_G], dim=1)
    heard = swap_rows(comms, said_G3).tolist()
    for rank, (their_tag, _, _) in enumerate(heard):
        if their_tag != tag:
            raise RankError(
                f"rank {rank} is at MoE layer {their_tag}, rank {comms.rank} at {tag}: every rank must run the model "
                "equally often; let ranks without prompts take part (ExpertParallel.drain)"
            )
    return [int(count) for _, _, count in heard], any(bool(state) for _, state, _ in heard)


def _exchange_with_own(
    comms: Comms, send_NB: Tensor, send_counts: Sequence[int], receive_NB: Tensor, receive_counts: Sequence[int]
) -> None:
    """Exchange rows; those of this rank itself are the last on both sides, and are copied."""
    away, back = list(send_counts), list(receive_counts)
    own = away[comms.rank]
    assert own == back[comms.rank], "what stays here arrives here"
    away[comms.rank] = back[comms.rank] = 0
    receive_NB[sum(back) :] = send_NB[sum(away) :]
    comms.exchange(send_NB[: sum(away)], away, receive_NB[: sum(back)], back)


def _places(counts: Sequence[int], own: int) -> list[slice]:
    """Where the visits of each rank are, the others' in rising order and this rank's last."""
    places, start = [slice(0, 0)] * len(counts), 0
    for rank in [*(rank for rank in range(len(counts)) if rank != own), own]:
        places[rank] = slice(start, start + counts[rank])
        start += counts[rank]
    return places
