"""A trace whose experts have devices, read a layer and a bounded piece at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.errors import InfeasiblePlacement
from coterie.pruning.destinations import LayerTokens, PruningRule
from coterie.pruning.traffic import kept_weight, remote_peak_traffic, remote_visits
from coterie.spec import MoESpec
from coterie.topology import Topology
from coterie.trace.check import pieces
from coterie.trace.routing_trace import ALL_TOKENS, RoutingTrace, TokenSelector


@dataclass(frozen=True)
class RoutedTrace:
    """A trace whose experts have devices.

    Attributes:
        trace: with routing weights.
        device_LE: [L, E] int64, the device that hosts each expert.
        topology: devices and link costs.
    """

    trace: RoutingTrace
    device_LE: NDArray[np.int64]
    topology: Topology

    def __post_init__(self) -> None:
        self.trace.require_weights("pruning")
        shape, spec = self.device_LE.shape, self.trace.spec
        if shape != (spec.num_layers, spec.num_experts):
            raise InfeasiblePlacement(
                f"devices for {list(shape)} layers and experts, the trace has {spec.num_layers} and "
                f"{spec.num_experts}; use a placement made from this model's trace"
            )
        if self.device_LE.min() < 0 or self.device_LE.max() >= self.topology.num_devices:
            raise InfeasiblePlacement(
                f"an expert is on device {self.device_LE.max()}, topology {self.topology} has "
                f"{self.topology.num_devices}; use the topology of the placement"
            )

    def layer(self, index: int, tokens: TokenSelector = ALL_TOKENS) -> LayerTokens:
        """The selected tokens in MoE layer `index`, read into memory."""
        routing = self.trace.layer(index, tokens)
        assert routing.weights_TK is not None
        homes = self.trace.homes(self.topology.num_devices, tokens)
        return LayerTokens.of(
            routing.expert_ids_TK, routing.weights_TK, routing.kept_TK, self.device_LE[index], homes,
            self.topology.cost_matrix(),
        )  # fmt: skip

    def layer_pieces(self, index: int, tokens: TokenSelector) -> Iterator[LayerTokens]:
        """The selected tokens in MoE layer `index`, a bounded piece at a time."""
        chosen = np.arange(self.trace.num_tokens, dtype=np.int64)[tokens]
        for piece in pieces(chosen.size):
            part = chosen[piece]
            contiguous = part[-1] - part[0] + 1 == part.size
            yield self.layer(index, slice(int(part[0]), int(part[-1]) + 1) if contiguous else part)


def squared_loss(routed: RoutedTrace, rule: PruningRule, tokens: TokenSelector) -> float:
    """Mean over tokens and layers of the square of the share of its weight that a token loses.

    What a loss of weight costs in quality grows faster than the weight: many small losses are better than few large.
    """
    total, count = 0.0, 0
    for layer in range(routed.trace.num_layers):
        for piece in routed.layer_pieces(layer, tokens):
            total += float(((1 - kept_weight(piece, rule.prune_layer(layer, piece))) ** 2).sum())
            count += len(piece.home_T)
    return total / count


def linear_devices(spec: MoESpec, topology: Topology) -> NDArray[np.int64]:
    """Experts in order on the devices in order, [L, E]: what engines do by default.

    Raises:
        InfeasiblePlacement: when there are fewer experts than devices.
    """
    row_E = np.repeat(np.arange(topology.num_devices, dtype=np.int64), topology.slots(spec.num_experts))
    return np.broadcast_to(row_E, (spec.num_layers, spec.num_experts)).copy()


def peaks(routed: RoutedTrace, rule: PruningRule, tokens: TokenSelector) -> NDArray[np.float64]:
    """Remote peak traffic that `rule` leaves in each layer, [L]."""
    peak_L = np.empty(routed.trace.num_layers)
    for layer in range(routed.trace.num_layers):
        visits_G, count = np.zeros(routed.topology.num_devices, dtype=np.int64), 0
        for piece in routed.layer_pieces(layer, tokens):
            visits_G += remote_visits(piece, rule.prune_layer(layer, piece))
            count += len(piece.home_T)
        peak_L[layer] = remote_peak_traffic(visits_G, count)
    return peak_L
