"""Which copy a token uses: every rule restated token by token, and metrics that follow from it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError
from coterie.placement.copies import RULES, Copies, Dispatch, own_slots
from coterie.placement.metrics import communication_cost, measure_layer
from coterie.topology import Topology
from coterie.trace.routing_trace import ALL_TOKENS


def random_hosts(experts: int, devices: int, copies: int, seed: int) -> np.ndarray:
    """[E, G]: every expert somewhere, and further copies on other devices."""
    rng = np.random.default_rng(seed)
    hosts_EG = np.eye(devices, dtype=bool)[rng.integers(0, devices, experts)]
    free = np.argwhere(~hosts_EG)
    for e, g in free[rng.permutation(len(free))[:copies]]:
        hosts_EG[e, g] = True
    return hosts_EG


def restated(
    ids_TK: np.ndarray, kept_TK: np.ndarray, hosts_EG: np.ndarray, speed_G: np.ndarray, per_node: int = 4
) -> list[list[int]]:
    """The device each token uses for each expert under fewest-devices, -1 where it keeps none."""
    load_G = np.zeros(hosts_EG.shape[1])
    chosen = []
    for ids, kept in zip(ids_TK, kept_TK, strict=True):
        row = [-1] * len(ids)
        order = [k for k in range(len(ids)) if kept[k]]
        order.sort(key=lambda k: hosts_EG[ids[k]].sum() > 1)  # stable: one copy first
        for k in order:
            devices = np.flatnonzero(hosts_EG[ids[k]])
            nodes = {g // per_node for g in row if g >= 0}
            row[k] = int(
                min(devices, key=lambda g: (g not in row, g // per_node not in nodes, load_G[g] / speed_G[g], g))
            )
            load_G[row[k]] += 1
        chosen.append(row)
    return chosen


@pytest.mark.parametrize("speeds", [(1.0, 1.0, 1.0, 1.0), (0.5, 1.0, 2.0, 1.0)])
@pytest.mark.parametrize("kept", [None, 0.7])
@pytest.mark.parametrize("per_node", [2, 4])
def test_fewest_devices_is_its_rule_restated(make_trace: Any, speeds: Any, kept: Any, per_node: int) -> None:
    trace = make_trace(layers=1, tokens=400, kept=kept)
    topology = Topology(4 // per_node, per_node, speed_per_device=speeds)
    hosts_EG = random_hosts(16, 4, 12, seed=1)
    copies, routing = Copies.of(hosts_EG), trace.layer(0, ALL_TOKENS)
    dispatch, kept_TK, homes_T = Dispatch(copies, topology), routing.kept(), trace.homes(4)
    found = [
        dispatch.choose(routing.expert_ids_TK[piece], kept_TK[piece], homes_T[piece])
        for piece in (slice(0, 150), slice(150, None))  # loads carry on from piece to piece
    ]
    device_TK = np.where(kept_TK, copies.device_P[np.concatenate(found)], -1)
    assert device_TK.tolist() == restated(routing.expert_ids_TK, kept_TK, hosts_EG, np.array(speeds), per_node)


def test_nearest_stays_at_home_then_on_the_node_and_else_takes_turns() -> None:
    hosts_EG = np.zeros((3, 4), dtype=bool)
    hosts_EG[0, [0, 3]] = hosts_EG[1, [1, 2]] = hosts_EG[2, [2, 3]] = True
    copies, topology = Copies.of(hosts_EG), Topology(2, 2)
    ids_TK, home_T = np.tile([0, 1, 2], (4, 1)), np.arange(4)
    found = copies.device_P[Dispatch(copies, topology, "nearest").choose(ids_TK, np.ones((4, 3), bool), home_T)]
    assert found[:, 0].tolist() == [0, 0, 3, 3]
    assert found[:, 1].tolist() == [1, 1, 2, 2]
    assert found[2:, 2].tolist() == [2, 3]
    assert sorted(found[:2, 2].tolist()) == [2, 3]  # both are as far: the two homes share them


def test_random_uses_all_copies_about_equally() -> None:
    hosts_EG = np.ones((1, 4), dtype=bool)
    dispatch = Dispatch(Copies.of(hosts_EG), Topology(1, 4), "random")
    found = [dispatch.choose(np.zeros((500, 1), int), np.ones((500, 1), bool), np.zeros(500, int)) for _ in range(2)]
    assert not np.array_equal(*found)
    assert np.bincount(np.concatenate(found).ravel()).min() > 180


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'nearest'"):
        Dispatch(Copies.of(np.ones((1, 1), bool)), Topology(1, 1), "nearst")


@pytest.mark.parametrize("rule", RULES)
def test_without_copies_every_rule_is_the_placement(make_trace: Any, rule: str) -> None:
    trace, topology = make_trace(layers=1), Topology(2, 2)
    device_E = np.random.default_rng(0).integers(0, 4, 16)
    plain = measure_layer(trace, 0, device_E, topology, ALL_TOKENS)
    found = measure_layer(trace, 0, np.eye(4, dtype=bool)[device_E], topology, ALL_TOKENS, rule)
    np.testing.assert_array_equal(found.traffic_GG, plain.traffic_GG)
    assert (found.balance, found.npt, found.dpt) == (plain.balance, plain.npt, plain.dpt)


def test_metrics_count_the_devices_that_were_chosen(make_trace: Any) -> None:
    trace, topology = make_trace(layers=1, tokens=300), Topology(1, 4)
    hosts_EG = random_hosts(16, 4, 10, seed=2)
    routing = trace.layer(0, ALL_TOKENS)
    rows = restated(routing.expert_ids_TK, routing.kept(), hosts_EG, np.ones(4))
    found = measure_layer(trace, 0, hosts_EG, topology, ALL_TOKENS)
    visits_G = np.bincount([g for row in rows for g in set(row)], minlength=4)
    load_G = np.bincount(np.ravel(rows), minlength=4)
    assert found.dpt == pytest.approx(np.mean([len(set(row)) for row in rows]))
    assert found.peak_traffic == pytest.approx(visits_G.max() / 300)
    assert found.balance == pytest.approx(load_G.max() / load_G.mean())


def test_company_is_as_far_as_its_nearest_copies() -> None:
    p_EE = np.array([[0, 1, 2], [1, 0, 0], [2, 0, 0]], dtype=float)
    hosts_EG = np.array([[1, 0, 0, 1], [0, 1, 0, 0], [0, 0, 0, 1]], dtype=bool)
    cost = communication_cost(p_EE, Topology(2, 2, inter_cost=5).cost_matrix(), hosts_EG)
    assert cost == pytest.approx((1 * 1 + 2 * 0) / 3)


def test_own_slots_are_taken_where_there_is_most() -> None:
    assert own_slots(np.array([9, 9, 9]), 24).tolist() == [8, 8, 8]
    assert own_slots(np.array([9, 9, 9]), 25).tolist() == [9, 8, 8]
    assert own_slots(np.array([1, 6, 2]), 5).tolist() == [1, 2, 2]
