"""CAP's Algorithm 1: grow one group of co-activated experts for each device, then put groups on nodes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie.placement.problem import LayerProblem


def grow_groups(
    affinity_EE: NDArray[np.float64], capacity_G: NDArray[np.int64], rng: np.random.Generator
) -> NDArray[np.int64]:
    """Grow one group for each part, round-robin, by the largest summed affinity to its members.

    Source: CAP §IV, Algorithm 1. Seeds are the G vertices of largest weighted degree; a part takes the
    unassigned vertex with the largest summed affinity to its members, or one at random where that is zero.
    Differs in that parts may have different capacities: a full part is passed over.

    Args:
        affinity_EE: [E, E] symmetric, zero diagonal; p_ij of CAP.
        capacity_G: [G] vertices each part must hold; they sum to E.
        rng: breaks the ties at zero.

    Returns:
        part_E: [E] int64.
    """
    num_experts, num_parts = len(affinity_EE), capacity_G.size
    part_E = np.full(num_experts, -1, dtype=np.int64)
    room_G = capacity_G.copy()
    score_EG = np.zeros((num_experts, num_parts))

    def assign(vertex: int, part: int) -> None:
        part_E[vertex] = part
        room_G[part] -= 1
        score_EG[:, part] += affinity_EE[vertex]

    for seed_part, seed in enumerate(np.argsort(-affinity_EE.sum(axis=1), kind="stable")[:num_parts]):
        assign(int(seed), seed_part)
    while room_G.any():
        for part in np.flatnonzero(room_G):
            free = np.flatnonzero(part_E < 0)
            score = score_EG[free, part]
            best = int(np.argmax(score))
            assign(int(free[best] if score[best] > 0 else rng.choice(free)), int(part))
    return part_E


def groups_to_nodes(problem: LayerProblem, group_E: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """Assign groups of experts to the devices of nodes so that co-activated groups share a node.

    Source: CAP §IV, second stage: the grouping rule again, on group-to-group co-activation. Only groups of
    equal size may change places, so that every device keeps its number of slots.

    Args:
        problem: the layer; its topology says which devices share a node.
        group_E: [E] the group (device) of each expert from the first stage.
        rng: breaks ties.

    Returns:
        device_E: [E] int64.
    """
    topology, num_groups = problem.topology, problem.num_devices
    if topology.num_nodes == 1 or topology.devices_per_node == 1 or np.unique(problem.slots_G).size > 1:
        return group_E
    member_GE = np.eye(num_groups)[:, group_E]
    affinity_GG = member_GE @ problem.jaccard_EE @ member_GE.T
    np.fill_diagonal(affinity_GG, 0.0)
    per_node = np.full(topology.num_nodes, topology.devices_per_node, dtype=np.int64)
    node_of_group = grow_groups(affinity_GG, per_node, rng)
    device_of_group = np.empty(num_groups, dtype=np.int64)
    device_of_group[np.argsort(node_of_group, kind="stable")] = np.arange(num_groups)
    return device_of_group[group_E]


def algorithm_1(problem: LayerProblem, seed: int) -> NDArray[np.int64]:
    """CAP's communication-oriented placement, both stages; device of each expert, [E] int64."""
    rng = np.random.default_rng(seed)
    return groups_to_nodes(problem, grow_groups(problem.jaccard_EE, problem.slots_G, rng), rng)
