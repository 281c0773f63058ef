"""What a placement costs on a trace: visits, traffic and balance (algorithms §2; CAP §IV, §V)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from coterie.placement.balance import imbalance
from coterie.placement.copies import FEWEST_DEVICES, RULES, Copies, Dispatch, DispatchByHome
from coterie.profile.coactivation import coactivation_counts, jaccard
from coterie.topology import Topology
from coterie.trace.check import pieces
from coterie.trace.routing_trace import RoutingTrace, TokenSelector

ACTIVATION_BYTES = 2  # bf16, both on dispatch and on combine


@dataclass(frozen=True)
class LayerMetrics:
    """One layer's costs; counts are per token of the measured part.

    Attributes:
        dpt: devices per token that host a kept expert of the token.
        remote_dpt: the same without the token's home.
        npt: nodes per token.
        remote_npt: the same without the home's node.
        balance: B, the largest device load over the mean; load counts kept token-expert pairs. On devices of unequal
            speed: the longest time that a device computes over what it would be if all were busy equally long.
        peak_traffic: share of the tokens that visit the busiest device.
        remote_peak_traffic: the same counting visits from other homes only.
        traffic_GG: [G, G] copies per token from home (row) to device (column), the home's own on the diagonal.
        load_G: [G] kept token-expert pairs per token on each device.
    """

    dpt: float
    remote_dpt: float
    npt: float
    remote_npt: float
    balance: float
    peak_traffic: float
    remote_peak_traffic: float
    traffic_GG: NDArray[np.float64]
    load_G: NDArray[np.float64]


SCALARS = tuple(field.name for field in fields(LayerMetrics) if field.name not in ("traffic_GG", "load_G"))


@njit(cache=True, nogil=True)
def _count(
    ids_TK: Any, kept_TK: Any, device_E: Any, node_G: Any, home_T: Any,
    load_G: Any, traffic_GG: Any, nodes_NN: Any,
) -> None:  # fmt: skip
    """Add tokens to the load of devices, the copies from home to device, and from home node to node."""
    seen_G = np.full(load_G.size, -1, dtype=np.int64)
    seen_N = np.full(len(nodes_NN), -1, dtype=np.int64)
    for t in range(len(ids_TK)):
        home = home_T[t]
        for k in range(ids_TK.shape[1]):
            if not kept_TK[t, k]:
                continue
            g = device_E[ids_TK[t, k]]
            load_G[g] += 1
            if seen_G[g] != t:
                seen_G[g] = t
                traffic_GG[home, g] += 1
                if seen_N[node_G[g]] != t:
                    seen_N[node_G[g]] = t
                    nodes_NN[node_G[home], node_G[g]] += 1


def measure_layer(
    trace: RoutingTrace, layer: int, device_E: NDArray[Any], topology: Topology, tokens: TokenSelector,
    rule: str = FEWEST_DEVICES, by_home: bool = False,
) -> LayerMetrics:  # fmt: skip
    """The metrics of one layer on the selected tokens, read a bounded piece at a time.

    Args:
        trace: the routing.
        layer: MoE layer.
        device_E: [E] device of each expert; or [E, G] bool, the devices that hold a copy of each.
        topology: devices and nodes.
        tokens: which tokens to measure.
        rule: with copies, the dispatch rule (`copies.RULES`).
        by_home: with copies, whether each home counts loads for itself, as ranks do (`copies.DispatchByHome`).
    """
    num_devices = topology.num_devices
    load_G = np.zeros(num_devices, dtype=np.int64)
    traffic_GG = np.zeros((num_devices, num_devices), dtype=np.int64)
    nodes_NN = np.zeros((topology.num_nodes, topology.num_nodes), dtype=np.int64)
    homes_T = trace.homes(num_devices, tokens)
    routing = trace.layer(layer, tokens)
    kept_TK, devices, node_G = routing.kept(), np.asarray(device_E), topology.node_of_device()
    copies = Copies.of(devices) if devices.ndim == 2 else None
    chooser = DispatchByHome if by_home else Dispatch
    dispatch = None if copies is None else chooser(copies, topology, rule)
    devices = devices.astype(np.int64) if copies is None else copies.device_P
    for piece in pieces(len(homes_T)):
        ids_TK = routing.expert_ids_TK[piece]
        if dispatch is not None:
            ids_TK = dispatch.choose(ids_TK, kept_TK[piece], homes_T[piece])
        _count(ids_TK, kept_TK[piece], devices, node_G, homes_T[piece], load_G, traffic_GG, nodes_NN)
    return _metrics(load_G, traffic_GG, nodes_NN, len(homes_T), topology.speeds())


def _metrics(
    load_G: NDArray[np.int64],
    traffic_GG: NDArray[np.int64],
    nodes_NN: NDArray[np.int64],
    num_tokens: int,
    speed_G: NDArray[np.float64],
) -> LayerMetrics:
    remote_GG = traffic_GG - np.diag(np.diag(traffic_GG))
    return LayerMetrics(
        dpt=float(traffic_GG.sum() / num_tokens),
        remote_dpt=float(remote_GG.sum() / num_tokens),
        npt=float(nodes_NN.sum() / num_tokens),
        remote_npt=float((nodes_NN.sum() - np.trace(nodes_NN)) / num_tokens),
        balance=imbalance(load_G, speed_G),
        peak_traffic=float(traffic_GG.sum(axis=0).max() / num_tokens),
        remote_peak_traffic=float(remote_GG.sum(axis=0).max() / num_tokens),
        traffic_GG=traffic_GG / num_tokens,
        load_G=load_G / num_tokens,
    )


def measure(
    trace: RoutingTrace, device_LE: NDArray[Any], topology: Topology, tokens: TokenSelector,
    rule: str = FEWEST_DEVICES, by_home: bool = False,
) -> list[LayerMetrics]:  # fmt: skip
    """The metrics of every layer, for a placement given as the device of each expert, [L, E]; or [L, E, G] hosts."""
    layers = range(trace.num_layers)
    return [measure_layer(trace, layer, device_LE[layer], topology, tokens, rule, by_home) for layer in layers]


def communication_costs(
    trace: RoutingTrace, device_LE: NDArray[Any], topology: Topology, tokens: TokenSelector
) -> list[float]:
    """C(pi) of every layer (CAP eq. 2) with the co-activation of these tokens, divided by the sum of p_ij."""
    costs = []
    for layer, device_E in enumerate(device_LE):
        routing = trace.layer(layer, tokens)
        counts_EE = coactivation_counts(routing.expert_ids_TK, routing.kept_TK, trace.spec.num_experts)
        costs.append(communication_cost(jaccard(counts_EE), topology.cost_matrix(), device_E))
    return costs


def communication_cost(p_EE: NDArray[np.float64], cost_GG: NDArray[np.float64], device_E: NDArray[Any]) -> float:
    """C(pi) = sum over i < j of p_ij d(pi(i), pi(j)), CAP eq. 2, divided by the sum of p_ij; 0 without company.

    With copies, `device_E` being [E, G], the distance is that of the two nearest copies.
    """
    total = p_EE.sum()
    if device_E.ndim == 2:
        return float((p_EE * _nearest(device_E, cost_GG)).sum() / total) if total > 0 else 0.0
    return float((p_EE * cost_GG[np.ix_(device_E, device_E)]).sum() / total) if total > 0 else 0.0


def _nearest(hosts_EG: NDArray[np.bool_], cost_GG: NDArray[np.float64]) -> NDArray[np.float64]:
    """Cost between the nearest copies of every two experts, [E, E]."""
    to_EG = np.stack([cost_GG[hosts].min(axis=0) for hosts in hosts_EG])
    return np.stack([to_EG[:, hosts].min(axis=1) for hosts in hosts_EG], axis=1)


def full_metrics(
    trace: RoutingTrace, device_LE: NDArray[Any], topology: Topology, tokens: TokenSelector,
    rule: str = FEWEST_DEVICES,
) -> dict[str, Any]:  # fmt: skip
    """Every metric of a placement on the selected tokens, as files and `--json` hold them.

    `summarise` of its layers, and "communication": the mean over layers of CAP's C(pi) (`communication_costs`). Where
    the topology gives `link_costs`, also "link_cost": a token's copies times the cost of their links from its home.
    With copies the figures are those of "dispatch", the given rule; "by_rule" has the means under the others.
    """
    layers = measure(trace, device_LE, topology, tokens, rule)
    summary = summarise(layers, trace.spec.hidden_size)
    if topology.link_costs is not None:
        summary["link_cost"] = float(np.mean([(layer.traffic_GG * topology.cost_matrix()).sum() for layer in layers]))
    if device_LE.ndim == 3:
        summary["dispatch"] = rule
        summary["by_rule"] = {
            other: average(measure(trace, device_LE, topology, tokens, other)) for other in RULES if other != rule
        }
    costs = communication_costs(trace, device_LE, topology, tokens)
    summary["communication"] = float(np.mean(costs))
    summary["layers"]["communication"] = [round(cost, 6) for cost in costs]
    return summary


def average(layers: Sequence[LayerMetrics]) -> dict[str, float]:
    """The mean over layers of every scalar metric."""
    return {name: float(np.mean([getattr(layer, name) for layer in layers])) for name in SCALARS}


def summarise(layers: Sequence[LayerMetrics], hidden_size: int = 0) -> dict[str, Any]:
    """Means over layers, per-layer arrays under "layers", and bytes per token and layer when `hidden_size` is known.

    Bytes count a copy of the hidden state to every remote device and the partial sum back, in bf16. "traffic" is the
    mean over layers of `traffic_GG`: copies per token from home (row) to device (column).
    """
    result: dict[str, Any] = average(layers)
    if hidden_size:
        result["bytes_per_token"] = result["remote_dpt"] * hidden_size * ACTIVATION_BYTES * 2
    result["traffic"] = np.mean([layer.traffic_GG for layer in layers], axis=0).round(5).tolist()
    result["layers"] = {name: [round(getattr(layer, name), 6) for layer in layers] for name in SCALARS}
    return result
