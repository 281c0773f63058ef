"""Dispatch in two hops: once to each visited node over the slow link, then to the visited devices within it.

On another node, the device at the sender's own place is its relay; on the sender's node it is the sender itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from coterie.parallel.comms import Comms
from coterie.parallel.dispatch import DispatchHandle, Received, combine, send_visits, with_local_ids
from coterie.parallel.layer_placement import LayerPlacement


@dataclass(frozen=True)
class TwoHopHandle:
    """What `combine_two_hop` needs to know of a `dispatch_two_hop`.

    Attributes:
        outer: from home to relays.
        inner: from relays to devices.
    """

    outer: DispatchHandle
    inner: DispatchHandle

    @property
    def any_active(self) -> bool:
        """As `DispatchHandle.any_active`."""
        return self.outer.any_active

    def dispatch_bytes(self) -> list[int]:
        """[G] bytes of hidden states sent to each other rank, in both hops."""
        return _added(self.outer.dispatch_bytes(), self.inner.dispatch_bytes())

    def combine_bytes(self) -> list[int]:
        """[G] bytes of sums returned to each other rank, in both hops."""
        return _added(self.outer.combine_bytes(), self.inner.combine_bytes())

    def metadata_bytes(self) -> list[int]:
        """[G] bytes of ids, weights and counts sent to each other rank, in both hops."""
        return _added(self.outer.metadata_bytes(), self.inner.metadata_bytes())


def dispatch_two_hop(
    hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, layer: LayerPlacement, comms: Comms, *, active: bool = True
) -> tuple[Received, TwoHopHandle]:
    """As `dispatch.dispatch`, but a token crosses to each other node it visits only once.

    Source: CAP §II-C, in two levels.
    """
    topology = layer.topology
    device_TK = layer.device_P[ids_TK.clamp(min=0)]
    relay_TK = (
        device_TK // topology.devices_per_node * topology.devices_per_node + comms.rank % topology.devices_per_node
    )
    relay_TK = relay_TK.masked_fill(ids_TK < 0, -1)
    nodes = tuple(topology.node_of_device().tolist())
    relayed, outer = send_visits(hidden_TH, ids_TK, weights_TK, relay_TK, nodes, comms, layer.layer, active)
    device_RK = layer.device_P[relayed.ids_RK.clamp(min=0)].masked_fill(relayed.ids_RK < 0, -1)
    received, inner = send_visits(
        relayed.hidden_RH, relayed.ids_RK, relayed.weights_RK, device_RK, nodes, comms, layer.layer, outer.any_active
    )
    return with_local_ids(received, layer), TwoHopHandle(outer, inner)


def combine_two_hop(outputs_RH: Tensor, handle: TwoHopHandle) -> Tensor:
    """As `dispatch.combine`: relays add up their node's devices, the home adds up nodes. The order is the same, so in
    float32 and float64 the sums are; narrower types are rounded once more, at the relay.
    """
    return combine(combine(outputs_RH, handle.inner), handle.outer)


def _added(first_G: list[int], second_G: list[int]) -> list[int]:
    return [first + second for first, second in zip(first_G, second_G, strict=True)]
