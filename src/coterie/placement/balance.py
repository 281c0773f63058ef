"""Placement by load alone: DeepSeek's EPLB without replicas, and the linear default of every engine."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError
from coterie.placement.problem import LayerProblem


def linear(slots_G: NDArray[np.int64]) -> NDArray[np.int64]:
    """Experts in rising order on consecutive devices, [E]: what engines do by default."""
    return np.repeat(np.arange(slots_G.size, dtype=np.int64), slots_G)


def imbalance(load_G: NDArray[Any], speed_G: NDArray[np.float64]) -> float:
    """B: how long the busiest device takes, over what all would take if each were busy equally long.

    On equal devices that is the largest load over the mean (CAP eq. 4). 1 when nothing was routed at all.

    Args:
        load_G: [G] load of each device.
        speed_G: [G] its speed.
    """
    total = load_G.sum()
    return float((load_G / speed_G).max() / (total / speed_G.sum())) if total else 1.0


def pack(
    load_E: NDArray[Any], capacity_G: NDArray[np.int64], speed_G: NDArray[np.float64] | None = None
) -> NDArray[np.int64]:
    """Heaviest item first into the lightest pack that has room.

    Source: `balanced_packing` of deepseek-ai/EPLB as described in its README. Any number of items and any
    capacities; ties go to the lower index, so equal (or all-zero) loads give one definite answer.

    Args:
        load_E: [E] finite loads >= 0.
        capacity_G: [G] items each pack must hold; they sum to E.
        speed_G: [G] speeds: the pack that would be done first with the item takes it; None: all the same.

    Returns:
        pack_E: [E] int64.

    Raises:
        ConfigError: when a load is negative, infinite or not a number.
    """
    if not (np.isfinite(load_E).all() and (load_E >= 0).all()):
        raise ConfigError("a load is negative, infinite or not a number; loads are finite counts >= 0")
    pack_E = np.empty(load_E.size, dtype=np.int64)
    room_G = capacity_G.copy()
    weight_G = np.zeros(capacity_G.size, dtype=np.float64)
    for item in np.argsort(-load_E, kind="stable"):
        done_G = weight_G if speed_G is None else (weight_G + load_E[item]) / speed_G
        lightest = int(np.argmin(np.where(room_G > 0, done_G, np.inf)))
        pack_E[item] = lightest
        room_G[lightest] -= 1
        weight_G[lightest] += load_E[item]
    return pack_E


def eplb(problem: LayerProblem) -> NDArray[np.int64]:
    """DeepSeek's EPLB with one slot for each expert; device of each expert, [E].

    Source: deepseek-ai/EPLB. Hierarchical where the router's groups divide evenly among the nodes (groups
    onto nodes, then experts onto the node's devices), else one packing over all devices. Where devices differ in
    speed, one packing by when each is done.
    """
    topology, groups = problem.topology, problem.routing_groups
    if topology.speed_per_device is not None:
        return pack(problem.load_E, problem.slots_G, problem.speed_G)
    even = np.unique(problem.slots_G).size == 1
    if topology.num_nodes == 1 or groups == 1 or groups % topology.num_nodes or not even:
        return pack(problem.load_E, problem.slots_G)
    group_size = problem.num_experts // groups
    per_node = np.full(topology.num_nodes, groups // topology.num_nodes, dtype=np.int64)
    node_of_group = pack(problem.load_E.reshape(groups, group_size).sum(axis=1), per_node)
    device_E = np.empty(problem.num_experts, dtype=np.int64)
    for node in range(topology.num_nodes):
        experts = np.flatnonzero(np.repeat(node_of_group == node, group_size))
        first = node * topology.devices_per_node
        slots = problem.slots_G[first : first + topology.devices_per_node]
        device_E[experts] = first + pack(problem.load_E[experts], slots)
    return device_E
