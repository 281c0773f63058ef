"""Placements with copies by load alone: DeepSeek's EPLB, and what engines and CAP would do with spare slots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.placement.copies import own_slots
from coterie.placement.greedy import algorithm_1
from coterie.placement.objective import Objective
from coterie.placement.problem import LayerProblem


def linear_copies(problem: LayerProblem, objective: Objective, seed: int) -> NDArray[np.bool_]:
    """Experts in order, beginning again where they end, [1, E, G]: what SGLang does unless told otherwise."""
    device_P = np.repeat(np.arange(problem.num_devices), problem.slots_G)
    return hosts_of(np.arange(device_P.size) % problem.num_experts, device_P, problem)[None]


def eplb_copies(problem: LayerProblem, objective: Objective, seed: int) -> NDArray[np.bool_]:
    """DeepSeek's EPLB with copies, [1, E, G].

    Source: deepseek-ai/EPLB, its global policy: a copy for the expert with the largest load a copy, again and again;
    then the heaviest copy first onto the lightest device with room. Differs in that no device gets two copies of one
    expert. Devices' speeds are not looked at.
    """
    count_E = copy_counts(problem.load_E, int(problem.slots_G.sum()), problem.num_devices)
    expert_P = np.repeat(np.arange(problem.num_experts), count_E)
    weight_P = (problem.load_E / count_E)[expert_P]
    order = np.argsort(-weight_P, kind="stable")
    return pack_copies(np.zeros((problem.num_experts, problem.num_devices), dtype=bool), expert_P[order],
                       weight_P[order], problem)[None]  # fmt: skip


def cap_copies(problem: LayerProblem, objective: Objective, seed: int) -> NDArray[np.bool_]:
    """CAP's Algorithm 1, which has no copies; EPLB's rule fills the slots that are left, [1, E, G]."""
    own_G = own_slots(problem.slots_G, problem.num_experts)
    device_E = algorithm_1(replace(problem.without_speeds(), slots_G=own_G), seed)
    count_E = copy_counts(problem.load_E, int(problem.slots_G.sum()), problem.num_devices)
    more_P = np.repeat(np.arange(problem.num_experts), count_E - 1)
    weight_E = problem.load_E / count_E
    order = np.argsort(-weight_E[more_P], kind="stable")
    first_EG = np.eye(problem.num_devices, dtype=bool)[device_E]
    return pack_copies(first_EG, more_P[order], weight_E[more_P[order]], problem, weight_E)[None]


def copy_counts(load_E: NDArray[Any], num_slots: int, num_devices: int) -> NDArray[np.int64]:
    """How many copies each expert gets by EPLB's rule, [E]; at most one a device."""
    count_E = np.ones(load_E.size, dtype=np.int64)
    for _ in range(num_slots - load_E.size):
        count_E[int(np.argmax(np.where(count_E < num_devices, load_E / count_E, -1.0)))] += 1
    return count_E


def pack_copies(
    hosts_EG: NDArray[np.bool_], expert_P: NDArray[np.int64], weight_P: NDArray[np.float64], problem: LayerProblem,
    weight_E: NDArray[np.float64] | None = None,
) -> NDArray[np.bool_]:  # fmt: skip
    """Put copies, one after another, onto the lightest device that has room and no copy of the expert, [E, G].

    Where only devices that hold the expert have room, one of them takes another device's expert first.

    Args:
        hosts_EG: [E, G] what is placed already.
        expert_P: the expert of each copy that is to be placed.
        weight_P: its load.
        problem: the layer.
        weight_E: [E] load of a copy that is placed already; None: nothing is.
    """
    hosts_EG = hosts_EG.copy()
    weight_G = np.zeros(problem.num_devices) if weight_E is None else weight_E @ hosts_EG
    for expert, weight in zip(expert_P.tolist(), weight_P.tolist(), strict=True):
        room_G = hosts_EG.sum(axis=0) < problem.slots_G
        free_G = room_G & ~hosts_EG[expert]
        if not free_G.any():
            _make_room(hosts_EG, expert, int(np.argmax(room_G)))
            free_G = (hosts_EG.sum(axis=0) < problem.slots_G) & ~hosts_EG[expert]
        device = int(np.argmin(np.where(free_G, weight_G, np.inf)))
        hosts_EG[expert, device] = True
        weight_G[device] += weight
    return hosts_EG


def _make_room(hosts_EG: NDArray[np.bool_], expert: int, full: int) -> None:
    """Move an expert to device `full`, which has room, from one that does not hold `expert`."""
    for device in np.flatnonzero(~hosts_EG[expert]):
        movable = np.flatnonzero(hosts_EG[:, device] & ~hosts_EG[:, full])
        if movable.size:
            hosts_EG[movable[0], device], hosts_EG[movable[0], full] = False, True
            return
    raise AssertionError("more copies of an expert than devices")


def hosts_of(expert_P: NDArray[np.int64], device_P: NDArray[Any], problem: LayerProblem) -> NDArray[np.bool_]:
    """The table of who hosts whom, [E, G]."""
    hosts_EG = np.zeros((problem.num_experts, problem.num_devices), dtype=bool)
    hosts_EG[expert_P, device_P] = True
    return hosts_EG
