"""Hand-worked tokens: what each rule keeps and why."""

from __future__ import annotations

import json

import numpy as np
import pytest

from coterie.errors import ConfigError
from coterie.pruning import reference
from coterie.pruning.destinations import NO_HOME, Cap, LayerTokens, Naive, Priced, PruningRule
from coterie.topology import Topology


def kept_slots(
    rule: PruningRule,
    devices: list[int],
    weights: list[float],
    home: int,
    topology: str,
    kept: list[bool] | None = None,
) -> list[int]:
    """The slots one token keeps when its expert k lives on devices[k]."""
    ids_TK = np.arange(len(devices), dtype=np.uint8)[None]
    kept_TK = None if kept is None else np.array([kept])
    cost_GG = Topology.parse(topology).cost_matrix()
    tokens = LayerTokens.of(ids_TK, np.array([weights]), kept_TK, np.array(devices), [home], cost_GG)
    return [int(k) for k in np.flatnonzero(rule.prune_layer(0, tokens)[0])]


def test_cap_keeps_the_heaviest_devices_and_all_experts_on_them() -> None:
    # device 1 has 0.3 + 0.2, device 2 has 0.4, device 3 has 0.1; 0.9 is enough
    assert kept_slots(Cap(0.1), [1, 2, 3, 1], [0.3, 0.4, 0.1, 0.2], home=0, topology="4") == [0, 1, 3]


def test_cap_keeps_the_home_however_light() -> None:
    assert kept_slots(Cap(0.5), [0, 1, 2], [0.01, 0.6, 0.39], home=0, topology="4") == [0, 1]


def test_cap_would_rather_lose_a_dear_device_than_a_cheap_one() -> None:
    # home 0; device 1 is in its node at cost 1, device 2 across at cost 5: 0.3/1 goes before 0.6/5
    assert kept_slots(Cap(0.4), [1, 2], [0.3, 0.7], home=0, topology="2x2,inter=5") == [1]
    assert kept_slots(Cap(0.7), [1, 2], [0.3, 0.7], home=0, topology="2x2,inter=5") == [0]


def test_cap_drops_what_turned_out_unnecessary() -> None:
    # by a/c: 0.15/1 of device 1 first, then 0.7/5 of device 2, which suffices alone; the drop pass removes device 1
    assert kept_slots(Cap(0.3), [1, 2, 3], [0.15, 0.7, 0.15], home=0, topology="2x2,inter=5") == [1]


def test_equal_devices_go_by_number() -> None:
    assert kept_slots(Cap(0.5), [3, 2, 1, 0], [1, 1, 1, 1], home=NO_HOME, topology="4") == [2, 3]


def test_all_zero_weights_count_equally() -> None:
    assert kept_slots(Cap(0.5), [1, 1, 2, 3], [0, 0, 0, 0], home=0, topology="4") == [0, 1]
    assert kept_slots(Naive(0.5), [1, 1, 2, 3], [0, 0, 0, 0], home=0, topology="4") == [0, 1]


def test_what_was_dropped_before_stays_dropped_and_weighs_nothing() -> None:
    kept = [True, True, False]
    assert kept_slots(Cap(0.25), [1, 2, 3], [0.2, 0.8, 9.0], home=0, topology="4", kept=kept) == [1]
    assert kept_slots(Naive(0.25), [1, 2, 3], [0.2, 0.8, 9.0], home=0, topology="4", kept=kept) == [1]
    assert kept_slots(Priced(np.full((1, 4), 0.25)), [1, 2, 3], [0.2, 0.8, 9.0], 0, "4", kept) == [1]


def test_naive_drops_light_experts_wherever_they_live() -> None:
    # rounding must not decide: 0.1 + 0.2 is within 0.3
    assert kept_slots(Naive(0.3), [0, 1, 2], [0.1, 0.2, 0.7], home=0, topology="4") == [2]
    assert kept_slots(Naive(0.29), [0, 1, 2], [0.1, 0.2, 0.7], home=0, topology="4") == [1, 2]


def test_naive_drops_the_later_of_equals() -> None:
    assert kept_slots(Naive(0.3), [0, 1, 2, 3], [1, 1, 1, 1], home=0, topology="4") == [0, 1, 2]


def test_priced_asks_more_of_a_device_in_another_node() -> None:
    rule = Priced(np.full((1, 4), 0.1))
    assert kept_slots(rule, [0, 1, 2, 3], [0.05, 0.1, 0.4, 0.45], home=0, topology="2x2,inter=5") == [0, 1]
    assert kept_slots(rule, [0, 1, 2, 3], [0.05, 0.1, 0.3, 0.55], home=0, topology="2x2,inter=5") == [0, 1, 3]


def test_a_floor_brings_back_the_best_devices_and_no_more() -> None:
    never = np.full((1, 4), 2.0)
    assert kept_slots(Priced(never), [1, 2, 3], [0.2, 0.5, 0.3], home=0, topology="4") == []
    assert kept_slots(Priced(never, 0.6), [1, 2, 3], [0.2, 0.5, 0.3], home=0, topology="4") == [1, 2]


def test_exact_finds_what_the_greedy_order_misses() -> None:
    # half is needed: by a/c (0.096, 0.096, 0.04) the rule takes both devices across; one of them and the light
    # neighbour hold 0.52 for 6 instead of 10
    token, costs = [(1, 0.04), (2, 0.48), (3, 0.48)], {0: 0.0, 1: 1.0, 2: 5.0, 3: 5.0}
    assert reference.cap(token, 0, costs, 0.5) == {2, 3}
    assert reference.exact(token, 0, costs, 0.5) == {1, 2}


def test_exact_refuses_what_it_cannot_enumerate() -> None:
    token = [(device, 1.0) for device in range(1, 19)]
    with pytest.raises(ConfigError, match="18 remote devices"):
        reference.exact(token, 0, dict.fromkeys(range(19), 1.0), 0.2)


@pytest.mark.parametrize("p", [-0.1, 1.0, float("nan")])
def test_a_threshold_outside_its_range_is_refused(p: float) -> None:
    for rule in (Cap, Naive):
        with pytest.raises(ConfigError, match="not within 0 and 1"):
            rule(p)


def test_a_floor_outside_its_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="not within 0 and 1"):
        Priced(np.zeros((1, 1)), 1.5)


def test_descriptions_are_json() -> None:
    for rule in (Cap(0.2), Naive(0.2), Priced(np.full((2, 3), 0.125), 0.5)):
        description = json.loads(json.dumps(rule.describe()))
        assert description["rule"] == rule.name
    assert description["theta"] == [[0.125] * 3] * 2
