"""The compiled rules against plain Python, and what each rule promises, on random small layers with many ties."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.pruning import reference
from coterie.pruning.destinations import NO_HOME, Cap, LayerTokens, Naive, Priced
from coterie.pruning.traffic import kept_weight, remote_visits
from coterie.topology import Topology

TOPOLOGIES = ("1", "2", "4", "2x2,inter=2", "2x3,inter=5", "3x2,inter=1")
# few distinct values, so that ties in weight, in a/c and in sums are common; some exact in binary, some not
WEIGHTS = (0.0, 0.1, 0.2, 0.3, 0.25, 0.5, 1.0, 3e-7)
THRESHOLDS = (0.1, 0.2, 0.25, 0.3, 0.5, 0.75, 0.9)
compiled = settings(deadline=None)  # the first call may compile
thresholds = st.sampled_from(THRESHOLDS) | st.floats(1e-5, 0.99)


@st.composite
def layers(draw: st.DrawFn) -> LayerTokens:
    """Up to six tokens of a layer with up to eight experts a token, some of them already dropped."""
    topology = Topology.parse(draw(st.sampled_from(TOPOLOGIES)))
    experts = draw(st.integers(1, 10))
    top_k, tokens = draw(st.integers(1, min(8, experts))), draw(st.integers(1, 6))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ids_TK = np.stack([generator.permutation(experts)[:top_k] for _ in range(tokens)]).astype(np.uint8)
    if draw(st.booleans()):
        weights_TK = generator.choice(WEIGHTS, size=ids_TK.shape)
    else:
        weights_TK = generator.random(ids_TK.shape) ** 3
    kept_TK = generator.random(ids_TK.shape) < 0.8 if draw(st.booleans()) else None
    if kept_TK is not None:
        weights_TK = np.where(kept_TK, weights_TK, np.nan)  # what was dropped must never be read
    device_E = generator.integers(0, topology.num_devices, experts)
    low = NO_HOME if topology.num_nodes == 1 else 0
    home_T = generator.integers(low, topology.num_devices, tokens)
    return LayerTokens.of(ids_TK, weights_TK, kept_TK, device_E, home_T, topology.cost_matrix())


def token_of(tokens: LayerTokens, t: int) -> tuple[list[int], list[tuple[int, float]], int, dict[int, float]]:
    """The kept slots of a token, its (device, weight) pairs, its home, and the cost from there."""
    slots = [int(k) for k in np.flatnonzero(tokens.before_TK[t])]
    pairs = [(int(tokens.device_TK[t, k]), float(tokens.weight_TK[t, k])) for k in slots]
    home = int(tokens.home_T[t])
    costs = {d: float(tokens.cost_GG[home, d]) if home >= 0 else 1.0 for d in range(len(tokens.cost_GG))}
    return slots, pairs, home, costs


def on_devices(tokens: LayerTokens, devices: list[set[int]]) -> np.ndarray:
    """The slots, [T, K], that are on the devices each token keeps."""
    chosen = [[int(d) in devices[t] for d in row] for t, row in enumerate(tokens.device_TK)]
    return tokens.before_TK & np.array(chosen, dtype=np.bool_).reshape(tokens.before_TK.shape)


def cost_of(tokens: LayerTokens, kept_TK: np.ndarray, t: int) -> float:
    """Cost of the devices that a token visits."""
    *_, costs = token_of(tokens, t)
    return sum(costs[d] for d in {int(d) for d in tokens.device_TK[t, kept_TK[t]]})


@compiled
@given(layers(), thresholds)
def test_cap_equals_its_reference(tokens: LayerTokens, p: float) -> None:
    expected = []
    for t in range(len(tokens.home_T)):
        _, pairs, home, costs = token_of(tokens, t)
        expected.append(reference.cap(pairs, home, costs, p))
    np.testing.assert_array_equal(Cap(p).prune_layer(0, tokens), on_devices(tokens, expected))


@compiled
@given(layers(), st.lists(st.sampled_from((0.0, 0.1, 0.25, 0.3, 0.6, 2.0)), min_size=6, max_size=6), thresholds)
def test_priced_equals_its_reference(tokens: LayerTokens, thetas: list[float], floor: float) -> None:
    theta_G = np.array(thetas[: len(tokens.cost_GG)])
    for least in (0.0, floor):
        expected = []
        for t in range(len(tokens.home_T)):
            _, pairs, home, costs = token_of(tokens, t)
            expected.append(reference.priced(pairs, home, costs, dict(enumerate(thetas)), least))
        actual = Priced(theta_G[None], least).prune_layer(0, tokens)
        np.testing.assert_array_equal(actual, on_devices(tokens, expected))


@compiled
@given(layers(), thresholds)
def test_naive_equals_its_reference(tokens: LayerTokens, p: float) -> None:
    expected = np.zeros_like(tokens.before_TK)
    for t in range(len(tokens.home_T)):
        slots, pairs, *_ = token_of(tokens, t)
        expected[t, [slots[n] for n in reference.naive(pairs, p)]] = True
    np.testing.assert_array_equal(Naive(p).prune_layer(0, tokens), expected)


@compiled
@given(layers(), thresholds)
def test_every_rule_only_drops_and_the_device_rules_keep_home_and_whole_devices(tokens: LayerTokens, p: float) -> None:
    priced = Priced(np.full((1, len(tokens.cost_GG)), p))
    at_home_TK = tokens.before_TK & (tokens.device_TK == tokens.home_T[:, None])
    for rule in (Cap(p), priced, Naive(p)):
        kept_TK = rule.prune_layer(0, tokens)
        assert not (kept_TK & ~tokens.before_TK).any()
        if rule.name == "naive":
            continue
        assert (kept_TK | ~at_home_TK).all()
        for t in range(len(kept_TK)):
            for device in set(tokens.device_TK[t]):
                here_K = tokens.before_TK[t] & (tokens.device_TK[t] == device)
                assert kept_TK[t, here_K].all() or not kept_TK[t, here_K].any()


@compiled
@given(layers(), thresholds)
def test_cap_and_naive_drop_at_most_p_of_the_weight(tokens: LayerTokens, p: float) -> None:
    for rule in (Cap(p), Naive(p)):
        kept_T = kept_weight(tokens, rule.prune_layer(0, tokens))
        assert (kept_T >= 1 - p - 1e-6 - 1e-12).all()


@compiled
@given(layers(), thresholds)
def test_a_floor_is_kept(tokens: LayerTokens, floor: float) -> None:
    rule = Priced(np.full((1, len(tokens.cost_GG)), 2.0), floor)
    assert (kept_weight(tokens, rule.prune_layer(0, tokens)) >= floor - 1e-12).all()


@compiled
@given(layers(), thresholds)
def test_cap_never_beats_the_exact_solver_which_is_feasible(tokens: LayerTokens, p: float) -> None:
    best = []
    for t in range(len(tokens.home_T)):
        _, pairs, home, costs = token_of(tokens, t)
        best.append(reference.exact(pairs, home, costs, p))
    best_TK, cap_TK = on_devices(tokens, best), Cap(p).prune_layer(0, tokens)
    assert (kept_weight(tokens, best_TK) >= 1 - p - 1e-6 - 1e-12).all()
    for t in range(len(tokens.home_T)):
        assert cost_of(tokens, best_TK, t) <= cost_of(tokens, cap_TK, t) + 1e-9


@compiled
@given(layers())
def test_p_zero_and_price_zero_change_nothing(tokens: LayerTokens) -> None:
    for rule in (Cap(0.0), Naive(0.0), Priced(np.zeros((1, len(tokens.cost_GG))))):
        np.testing.assert_array_equal(rule.prune_layer(0, tokens), tokens.before_TK)


@compiled
@given(layers())
def test_remote_visits_counts_devices_not_experts(tokens: LayerTokens) -> None:
    expected = np.zeros(len(tokens.cost_GG), dtype=int)
    for t, home in enumerate(tokens.home_T):
        for device in set(tokens.device_TK[t, tokens.before_TK[t]]) - {home}:
            expected[device] += 1
    np.testing.assert_array_equal(remote_visits(tokens, tokens.before_TK), expected)


@pytest.mark.parametrize("p", [0.0, 0.2])
def test_a_token_that_kept_nothing_keeps_nothing(p: float) -> None:
    nothing = np.zeros((1, 2), dtype=np.bool_)
    tokens = LayerTokens.of(
        np.array([[0, 1]], dtype=np.uint8), np.full((1, 2), np.nan), nothing, np.array([0, 1]), [0], np.eye(2)
    )
    for rule in (Cap(p), Naive(p), Priced(np.full((1, 2), p), floor=0.9)):
        kept_TK = rule.prune_layer(0, tokens)
        assert not kept_TK.any()
        assert kept_weight(tokens, kept_TK).tolist() == [1.0]
