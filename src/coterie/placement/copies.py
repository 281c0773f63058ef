"""Experts with several copies: which copy a token uses, and what that makes of its experts.

A layer's placement with copies is a table `hosts_EG`: which devices hold a copy of each expert, never two on one. Its
copies are numbered by expert, then by device. Once every token has chosen, copies are the vertices that a placement
puts on devices, just as experts are without copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from coterie.errors import unknown_name
from coterie.topology import Topology

FEWEST_DEVICES = "fewest-devices"
RULES = (FEWEST_DEVICES, "nearest", "random")
_SEED = 0


def check_rule(rule: str) -> None:
    """Raise for what is no dispatch rule.

    Raises:
        ConfigError: naming those that there are.
    """
    if rule not in RULES:
        raise unknown_name("dispatch rule", rule, RULES)


def rule_of(method: Mapping[str, Any]) -> str:
    """The rule that a placement's copies were placed for, by its method; fewest-devices where it does not say."""
    return str(method.get("dispatch", FEWEST_DEVICES))


@dataclass(frozen=True)
class Copies:
    """The copies of one layer's experts, P of them.

    Attributes:
        start_E: [E + 1] int64, where each expert's run of copies begins.
        expert_P: [P] int64, the expert of each copy.
        device_P: [P] int64, the device of each copy.
    """

    start_E: NDArray[np.int64]
    expert_P: NDArray[np.int64]
    device_P: NDArray[np.int64]

    @classmethod
    def of(cls, hosts_EG: NDArray[np.bool_]) -> Copies:
        """From the devices that hold each expert."""
        expert_P, device_P = np.nonzero(hosts_EG)
        start_E = np.concatenate([[0], np.cumsum(hosts_EG.sum(axis=1))]).astype(np.int64)
        return cls(start_E, expert_P.astype(np.int64), device_P.astype(np.int64))


class Dispatch:
    """Chooses a copy for every expert of every token, by one rule; keeps count of loads from call to call.

    Tokens may come in one call or in many: what is chosen is the same.

    The rules, which `RULES` names:

    - fewest-devices: experts with one copy first; then, in the router's order, each of the others goes where the token
      goes anyway, else to a node where it goes anyway, and where several copies are as good to the device with the
      least to do so far (its token-expert pairs over its speed). Loads are those of all tokens measured so far.
    - nearest: the copy whose link from the token's home costs least; among equally near ones always the same for one
      home and expert, different homes taking turns. SGLang's `static`.
    - random: any copy, equally likely; drawn for one kept expert after another. SGLang's `dynamic`; nearly
      TensorRT-LLM's, where the copies of an expert take turns (NVIDIA/TensorRT-LLM, moeLoadBalanceKernels.cu,
      moeComputeRouteKernel).

    Args:
        copies: the layer's.
        topology: devices, links, speeds.
        rule: one of `RULES`.
        seed: of the rule random.

    Raises:
        ConfigError: for another rule.
    """

    def __init__(self, copies: Copies, topology: Topology, rule: str = FEWEST_DEVICES, seed: int = _SEED) -> None:
        check_rule(rule)
        self._copies, self._rule = copies, RULES.index(rule)
        self._cost_GG, self._slowness_G = topology.cost_matrix(), 1 / topology.speeds()
        self._node_G = topology.node_of_device()
        self._load_G = np.zeros(topology.num_devices)
        self._random = np.random.default_rng(seed)

    def choose(self, ids_TK: NDArray[Any], kept_TK: NDArray[np.bool_], home_T: NDArray[np.int64]) -> NDArray[np.int32]:
        """The copy that each token uses for each expert, [T, K]; what stands where nothing is kept means nothing."""
        copy_TK = np.zeros(ids_TK.shape, dtype=np.int32)
        copies, once = self._copies, np.ones(len(ids_TK), dtype=np.int64)
        if self._rule == 0:
            choose_fewest(
                ids_TK, kept_TK, once, copies.start_E, copies.device_P, self._node_G, self._slowness_G, self._load_G,
                copy_TK,
            )  # fmt: skip
        else:
            by_chance, chance_TK = self._rule == 2, np.zeros(ids_TK.shape)
            if by_chance:
                chance_TK[kept_TK] = self._random.random(np.count_nonzero(kept_TK))
            _choose_alone(
                ids_TK, kept_TK, copies.start_E, copies.device_P, self._cost_GG, home_T, by_chance, chance_TK, copy_TK
            )
        return copy_TK


class DispatchByHome:
    """A `Dispatch` for each home, as in a group of ranks: each counts the loads of its own tokens, and sees no others.

    Args:
        copies: the layer's.
        topology: devices, links, speeds.
        rule: one of `RULES`.

    Raises:
        ConfigError: for another rule.
    """

    def __init__(self, copies: Copies, topology: Topology, rule: str = FEWEST_DEVICES) -> None:
        self._homes = [Dispatch(copies, topology, rule, seed=home) for home in range(topology.num_devices)]

    def choose(self, ids_TK: NDArray[Any], kept_TK: NDArray[np.bool_], home_T: NDArray[np.int64]) -> NDArray[np.int32]:
        """As `Dispatch.choose`; tokens of one home in the order in which they are given."""
        copy_TK = np.zeros(ids_TK.shape, dtype=np.int32)
        for home in np.unique(home_T):
            own_T = home_T == home
            copy_TK[own_T] = self._homes[home].choose(ids_TK[own_T], kept_TK[own_T], home_T[own_T])
        return copy_TK


@njit(cache=True, nogil=True)
def choose_fewest(
    ids_TK: Any, kept_TK: Any, multiplicity_T: Any, start_E: Any, device_P: Any, node_G: Any, slowness_G: Any,
    load_G: Any, copy_TK: Any,
) -> None:  # fmt: skip
    """The rule fewest-devices, for tokens that each stand for several; adds to `load_G`, fills `copy_TK`."""
    seen_G = np.full(load_G.size, -1, dtype=np.int64)
    seen_N = np.full(node_G.max() + 1, -1, dtype=np.int64)
    for t in range(len(ids_TK)):
        for only in (True, False):
            for k in range(ids_TK.shape[1]):
                if not kept_TK[t, k]:
                    continue
                first, end = start_E[ids_TK[t, k]], start_E[ids_TK[t, k] + 1]
                if (end - first == 1) != only:
                    continue
                best = first
                for p in range(first + 1, end):
                    g, h = device_P[p], device_P[best]
                    here = 2 * (seen_G[g] == t) + (seen_N[node_G[g]] == t)
                    known = 2 * (seen_G[h] == t) + (seen_N[node_G[h]] == t)
                    less = load_G[g] * slowness_G[g] < load_G[h] * slowness_G[h]
                    if here > known or (here == known and less):
                        best = p
                copy_TK[t, k] = best
                seen_G[device_P[best]] = t
                seen_N[node_G[device_P[best]]] = t
                load_G[device_P[best]] += multiplicity_T[t]


@njit(cache=True, nogil=True)
def _choose_alone(
    ids_TK: Any, kept_TK: Any, start_E: Any, device_P: Any, cost_GG: Any, home_T: Any, by_chance: bool, chance_TK: Any,
    copy_TK: Any,
) -> None:  # fmt: skip
    """The rules nearest and random, which look at one expert at a time; `chance_TK`: from 0 to below 1."""
    for t in range(len(ids_TK)):
        for k in range(ids_TK.shape[1]):
            if not kept_TK[t, k]:
                continue
            e = ids_TK[t, k]
            first, count = start_E[e], start_E[e + 1] - start_E[e]
            turn = int(chance_TK[t, k] * count) if by_chance else (home_T[t] + e) % count
            best = first + turn
            if not by_chance:
                for step in range(1, count):
                    p = first + (turn + step) % count
                    if cost_GG[home_T[t], device_P[p]] < cost_GG[home_T[t], device_P[best]]:
                        best = p
            copy_TK[t, k] = best


def own_slots(slots_G: NDArray[np.int64], num_experts: int) -> NDArray[np.int64]:
    """Slots of every device for the first copy of every expert, [G]: what is over is taken where there is most.

    Args:
        slots_G: [G] slots, at least `num_experts` together.
        num_experts: E.
    """
    own_G = slots_G.copy()
    for _ in range(int(slots_G.sum()) - num_experts):
        own_G[own_G.size - 1 - int(np.argmax(own_G[::-1]))] -= 1
    return own_G
