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


def pack(load_E: NDArray[Any], capacity_G: NDArray[np.int64]) -> NDArray[np.int64]:
    """Heaviest item first into the lightest pack that has room.

    Source: `balanced_packing` of deepseek-ai/EPLB as described in its README. Any number of items and any
    capacities; ties go to the lower index, so equal (or all-zero) loads give one definite answer.

    Args:
        load_E: [E] finite loads >= 0.
        capacity_G: [G] items each pack must hold; they sum to E.

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
        lightest = int(np.argmin(np.where(room_G > 0, weight_G, np.inf)))
        pack_E[item] = lightest
        room_G[lightest] -= 1
        weight_G[lightest] += load_E[item]
    return pack_E


def eplb(problem: LayerProblem) -> NDArray[np.int64]:
    """DeepSeek's EPLB with one slot for each expert; device of each expert, [E].

    Source: deepseek-ai/EPLB. Hierarchical where the router's groups divide evenly among the nodes (groups
    onto nodes, then experts onto the node's devices), else one packing over all devices.
    """
    topology, groups = problem.topology, problem.routing_groups
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
