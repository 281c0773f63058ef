"""Group-limited routing: a renumbered checkpoint must keep each router group's experts together.

The router of such a model first chooses groups of consecutive experts. Renumbering is lossless only if every
group stays a run of consecutive slots, so a placement may change (a) which group comes where, and (b) the
order of experts within a group. Where devices (or nodes) hold whole groups, (a) is a placement problem with
groups as vertices; where a group spans several devices, (b) is one placement problem for each group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.placement.balance import linear
from coterie.placement.problem import NO_EXPERT, LayerProblem
from coterie.topology import Topology

Place = Callable[[LayerProblem], NDArray[np.int64]]


@dataclass(frozen=True)
class Coarse:
    """The problem of placing whole groups.

    Attributes:
        problem: groups as vertices; its devices are devices, or nodes when only nodes hold whole groups.
        device_blocks: whether its devices are devices.
        slots_G: slots of the real devices.
        group_size: experts in a group.
    """

    problem: LayerProblem
    device_blocks: bool
    slots_G: NDArray[np.int64]
    group_size: int

    def expand(self, part_of_group: NDArray[np.int64]) -> NDArray[np.int64]:
        """Device of every expert, [E], when each group is put whole on its part, in rising order within it."""
        order = np.argsort(part_of_group, kind="stable")  # the group in each block of slots
        block_of_group = np.empty_like(order)
        block_of_group[order] = np.arange(order.size)
        slot_E = (block_of_group[:, None] * self.group_size + np.arange(self.group_size)).ravel()
        device_E: NDArray[np.int64] = linear(self.slots_G)[slot_E]
        return device_E


def coarsen(problem: LayerProblem) -> Coarse | None:
    """The problem of placing whole groups on devices, else on nodes; None where neither holds whole groups."""
    size = problem.num_experts // problem.num_groups
    topology = problem.topology
    slots_N = problem.slots_G.reshape(topology.num_nodes, -1).sum(axis=1)
    for slots, device_blocks in ((problem.slots_G, True), (slots_N, False)):
        if (slots % size == 0).all() and slots.size > 1:
            parts = topology if device_blocks else nodes_as_devices(topology)
            return Coarse(_contract(problem, size, parts, slots // size), device_blocks, problem.slots_G, size)
    return None


def place_in_groups(problem: LayerProblem, place_whole: Place, place_within: Place) -> NDArray[np.int64]:
    """Device of every expert, [E]: groups placed by `place_whole`, then experts of each by `place_within`."""
    coarse = coarsen(problem)
    device_E = coarse.expand(place_whole(coarse.problem)) if coarse is not None else linear(problem.slots_G)
    size = problem.num_experts // problem.num_groups
    for first in range(0, problem.num_experts, size):
        devices, counts = np.unique(device_E[first : first + size], return_counts=True)
        if devices.size > 1:
            part = _restrict(problem, first, size, devices, counts)
            device_E[first : first + size] = devices[place_within(part)]
    return device_E


def has_freedom(num_experts: int, num_groups: int, topology: Topology) -> bool:
    """Whether keeping groups whole leaves a placement anything to decide that changes traffic."""
    slots_G, size = topology.slots(num_experts), num_experts // num_groups
    slots_N = slots_G.reshape(topology.num_nodes, -1).sum(axis=1)
    return _can_differ(slots_G, size) or _can_differ(slots_N, size)


def _can_differ(slots: NDArray[np.int64], size: int) -> bool:
    """Whether what shares a part can be chosen: whole groups where parts hold them, else experts of a split group."""
    unit = size if (slots % size == 0).all() else 1
    return slots.size > 1 and bool((slots > unit).any())


def _contract(problem: LayerProblem, size: int, topology: Topology, slots: NDArray[np.int64]) -> LayerProblem:
    """The problem with each group of `size` experts as one vertex."""
    num_groups = problem.num_experts // size
    groups_UK = np.where(problem.sets_UK == NO_EXPERT, num_groups, problem.sets_UK // size)
    kept_UK = groups_UK != num_groups
    kept_UK[:, 1:] &= groups_UK[:, 1:] != groups_UK[:, :-1]  # experts stand in rising order, so groups do too
    return on_other_vertices(problem, np.where(kept_UK, groups_UK, 0), kept_UK, num_groups, topology, slots,
                    problem.load_E.reshape(num_groups, size).sum(axis=1))  # fmt: skip


def nodes_as_devices(topology: Topology) -> Topology:
    """Every node as one device, as fast as all of its devices together."""
    speeds = topology.speeds().reshape(topology.num_nodes, -1).sum(axis=1) / topology.devices_per_node
    unequal = topology.speed_per_device is not None
    return Topology(1, topology.num_nodes, speed_per_device=tuple(speeds.tolist()) if unequal else None)


def _restrict(
    problem: LayerProblem, first: int, size: int, devices: NDArray[np.int64], slots: NDArray[np.int64]
) -> LayerProblem:
    """The problem of one group's experts on the devices it spans; these become one node each or one node."""
    kept_UK = (problem.sets_UK >= first) & (problem.sets_UK < first + size)
    nodes = np.unique(problem.topology.node_of_device()[devices], return_counts=True)[1]
    even = nodes.size > 1 and (nodes == nodes[0]).all()
    topology = problem.topology.part(devices, nodes.size if even else 1)
    load = problem.load_E[first : first + size]
    return on_other_vertices(
        problem, np.where(kept_UK, problem.sets_UK - first, 0), kept_UK, size, topology, slots, load
    )


def on_other_vertices(
    problem: LayerProblem, ids_UK: NDArray[np.int32], kept_UK: NDArray[np.bool_], num_vertices: int,
    topology: Topology, slots: NDArray[np.int64], load: NDArray[np.int64],
) -> LayerProblem:  # fmt: skip
    """A problem on other vertices, with the same tokens."""
    sets, multiplicity, window = _merge_weighted(problem, ids_UK, kept_UK, num_vertices)
    present = np.zeros((len(sets), num_vertices), dtype=np.float64)
    rows, columns = np.nonzero(sets != NO_EXPERT)
    present[rows, sets[rows, columns]] = 1.0
    coactivation = (present.T @ (present * multiplicity[:, None])).astype(np.int64)
    return LayerProblem(sets, multiplicity, window, problem.num_tokens, load, coactivation, topology, slots)


def _merge_weighted(
    problem: LayerProblem, ids_UK: NDArray[np.int32], kept_UK: NDArray[np.bool_], num_vertices: int
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int32]]:
    """Merge equal sets of a window and add up their multiplicities; empty sets are left out."""
    some = kept_UK.any(axis=1)
    ids = np.sort(np.where(kept_UK[some], ids_UK[some], num_vertices), axis=1)
    rows = np.concatenate([problem.window_U[some, None], ids], axis=1)
    merged, inverse = np.unique(rows, axis=0, return_inverse=True)
    sets = np.where(merged[:, 1:] == num_vertices, NO_EXPERT, merged[:, 1:]).astype(np.int32)
    total = np.bincount(inverse.ravel(), weights=problem.multiplicity_U[some], minlength=len(sets)).astype(np.int64)
    return np.ascontiguousarray(sets), total, merged[:, 0].astype(np.int32)
