"""How strong a rule must be to meet a target, and the thetas that do."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.errors import ConfigError, InfeasiblePlacement, TraceError
from coterie.pruning.destinations import Cap, Naive, Priced, PruningRule
from coterie.pruning.fitting import FLOORS, RULES, RuleChoice, fit_rule
from coterie.pruning.prices import LEVELS, fit_prices, price_layers, theta_at_levels
from coterie.pruning.routed import RoutedTrace, linear_devices, peaks, squared_loss
from coterie.pruning.traffic import kept_weight
from coterie.spec import MoESpec
from coterie.topology import Topology
from coterie.trace.routing_trace import RoutingTrace


def skewed(seed: int = 0, tokens: int = 400, layers: int = 2, ties: bool = False, topology: str = "4") -> RoutedTrace:
    """Sixteen experts, top-4, some far more popular than others; experts in order on the devices."""
    generator = np.random.default_rng(seed)
    scores = generator.gumbel(size=(layers, tokens, 16)) + np.linspace(2, 0, 16)
    ids = np.argsort(-scores, axis=2)[:, :, :4].astype(np.uint8)
    weights = generator.choice([0.1, 0.2, 0.4], ids.shape) if ties else generator.dirichlet(np.ones(4), ids.shape[:2])
    spec = MoESpec("toy", layers, 16, 4)
    trace = RoutingTrace(ids, spec, weights=weights, sequence_ids=(np.arange(tokens) // 25).astype(np.int32))
    devices = Topology.parse(topology)
    return RoutedTrace(trace, linear_devices(spec, devices), devices)


def loss(routed: RoutedTrace, rule: PruningRule) -> float:
    layers = [routed.layer(layer) for layer in range(routed.trace.num_layers)]
    return 1 - float(np.mean([kept_weight(one, rule.prune_layer(n, one)).mean() for n, one in enumerate(layers)]))


@settings(deadline=None, max_examples=25)
@given(
    st.integers(0, 1000), st.sampled_from(sorted(RULES)), st.sampled_from([0.3, 0.4, 0.5, 0.7, 0.95]),
    st.booleans(), st.sampled_from(["1", "4", "2x2,inter=3"]),
)  # fmt: skip
def test_the_fitted_part_meets_its_target(seed: int, name: str, target: float, ties: bool, topology: str) -> None:
    routed = skewed(seed, tokens=60, ties=ties, topology=topology)
    assert peaks(routed, fit_rule(RuleChoice(name, peak=target), routed), slice(None)).mean() <= target + 1e-9


@pytest.mark.parametrize("name", sorted(RULES))
def test_a_lower_target_never_keeps_more(name: str) -> None:
    routed = skewed()
    rules = [fit_rule(RuleChoice(name, peak=target), routed) for target in (0.9, 0.7, 0.6, 0.5, 0.4)]
    losses = [loss(routed, rule) for rule in rules]
    assert losses[0] == 0.0  # the unpruned peak is lower
    assert losses == sorted(losses)
    assert losses[-1] > 0.05
    if name == "priced":
        for weaker, stronger in pairwise(rules):
            assert isinstance(weaker, Priced)
            assert isinstance(stronger, Priced)
            assert (weaker.theta_LG <= stronger.theta_LG).all()


@pytest.mark.parametrize("rule", [Cap, Naive])
def test_p_is_the_least_that_meets_the_target(rule: type[Cap] | type[Naive]) -> None:
    routed = skewed()
    fitted = fit_rule(RuleChoice(rule.__name__.lower(), peak=0.5), routed)
    assert isinstance(fitted, rule)
    assert peaks(routed, fitted, slice(None)).mean() <= 0.5
    assert peaks(routed, rule(fitted.p - 1e-4), slice(None)).mean() > 0.5


def test_thetas_are_the_quantiles_of_the_weights_at_each_device() -> None:
    routed = skewed(layers=1)
    theta_NG = theta_at_levels(routed, slice(None))[:, 0]
    tokens = routed.layer(0)
    a_TG = np.zeros((400, 4))
    for t in range(400):
        np.add.at(a_TG[t], tokens.device_TK[t], tokens.weight_TK[t])
    visited_TG = np.array([[d in row for d in range(4)] for row in tokens.device_TK])
    for level in (0, 1, LEVELS // 4, LEVELS // 2, LEVELS):
        # three of four homes are elsewhere, so a visit counts three quarters
        visits_G = ((a_TG >= theta_NG[level]) & visited_TG).sum(axis=0) * 0.75
        assert (visits_G <= level / LEVELS * 400).all()
        more_G = np.minimum(visited_TG.sum(axis=0) * 0.75, level / LEVELS * 400 - 0.75)
        assert (visits_G >= more_G - 1e-9).all()
    assert (np.diff(theta_NG, axis=0) <= 0).all()
    assert (theta_NG[0] > 1).all()
    assert (theta_NG[-1] == 0).all()


def test_strengths_run_from_every_visit_to_none_a_level_of_one_layer_at_a_time() -> None:
    prices = fit_prices(skewed(layers=3), slice(None))
    assert prices.num_strengths == 3 * LEVELS + 1
    assert (prices.theta(0) == 0).all()
    assert (prices.theta(prices.num_strengths - 1) > 1).all()
    for weaker, stronger in pairwise(prices.theta(n) for n in range(0, prices.num_strengths, 50)):
        assert (weaker <= stronger).all()


def test_the_next_level_costs_the_same_weight_in_every_layer() -> None:
    """Layer 1's visits weigh a tenth of layer 0's, so it comes down first, as far as its price is below."""
    level_N = np.arange(LEVELS + 1)
    theta_NLG = np.stack([1 - level_N / LEVELS, 0.1 - 0.1 * level_N / LEVELS], axis=1)[:, :, None].repeat(3, axis=2)
    prices = price_layers(theta_NLG)
    for strength in (0, 7, LEVELS // 2, LEVELS, LEVELS + 500):
        first, second = prices.theta(strength)[:, 0]
        level_L = [round((1 - first) * LEVELS), round((0.1 - second) * 10 * LEVELS)]
        assert sum(level_L) == 2 * LEVELS - strength
        assert second >= min(first - 1 / LEVELS, 0.1 - 1e-12)


def test_layers_priced_together_lose_less_than_at_one_level() -> None:
    """Where one layer's tokens have nearly all their weight on one expert and the other's do not, for equal peaks."""
    routed = skewed(tokens=2000)
    weights = np.array(routed.trace.weights)
    weights[1] *= 0.05
    weights[1, :, 0] += 0.95
    steep = RoutingTrace(
        routed.trace.expert_ids, routed.trace.spec, weights=weights, sequence_ids=routed.trace.sequence_ids
    )
    routed = RoutedTrace(steep, routed.device_LE, routed.topology)
    theta_NLG = theta_at_levels(routed, slice(None))
    for level in (int(0.4 * LEVELS), LEVELS // 2):
        even = Priced(theta_NLG[level])
        priced = fit_rule(RuleChoice("priced", peak=float(peaks(routed, even, slice(None)).mean())), routed)
        assert loss(routed, priced) < 0.75 * loss(routed, even)


def test_where_sequences_lived_does_not_move_the_prices() -> None:
    routed = skewed()
    moved = RoutingTrace(
        routed.trace.expert_ids, routed.trace.spec, weights=routed.trace.weights,
        home_ids=np.zeros(routed.trace.num_tokens, dtype=np.int32),
    )  # fmt: skip
    elsewhere = RoutedTrace(moved, routed.device_LE, routed.topology)
    np.testing.assert_array_equal(theta_at_levels(routed, slice(None)), theta_at_levels(elsewhere, slice(None)))


def test_priced_with_p_meets_the_peak_of_cap_and_loses_less() -> None:
    routed = skewed(tokens=2000)
    priced, cap = fit_rule(RuleChoice("priced", p=0.3), routed), Cap(0.3)
    assert peaks(routed, priced, slice(None)).mean() <= peaks(routed, cap, slice(None)).mean() + 1e-9
    assert loss(routed, priced) < 0.8 * loss(routed, cap)


def test_a_floor_is_honoured_and_may_be_in_the_way() -> None:
    routed = skewed()
    rule = fit_rule(RuleChoice("priced", peak=0.5, floor=0.4), routed)
    for layer in range(2):
        tokens = routed.layer(layer)
        assert (kept_weight(tokens, rule.prune_layer(layer, tokens)) >= 0.4 - 1e-12).all()
    with pytest.raises(ConfigError, match=r"down to 0\.1: 0\.\d+ is left.*lower the floor"):
        fit_rule(RuleChoice("priced", peak=0.1, floor=0.9), routed)


def test_a_target_out_of_reach_says_what_is_left() -> None:
    with pytest.raises(ConfigError, match=r"rule cap cannot .* down to 0\.01: 0\.\d+ is left"):
        fit_rule(RuleChoice("cap", peak=0.01), skewed())


def test_only_the_selected_tokens_are_looked_at() -> None:
    routed = skewed()
    first = np.arange(0, 400, 2)  # not contiguous, as interleaved sequences are
    part = RoutingTrace(routed.trace.expert_ids[:, first], routed.trace.spec, weights=routed.trace.weights[:, first])
    alone = RoutedTrace(part, routed.device_LE, routed.topology)
    np.testing.assert_array_equal(theta_at_levels(routed, first), theta_at_levels(alone, slice(None)))


def test_choices_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'priced'"):
        RuleChoice("priced-", p=0.1)
    with pytest.raises(ConfigError, match="neither given"):
        RuleChoice("cap")
    with pytest.raises(ConfigError, match="both given"):
        RuleChoice("cap", p=0.1, peak=0.2)
    with pytest.raises(ConfigError, match=r"peak = 1\.5"):
        RuleChoice("cap", peak=1.5)
    with pytest.raises(ConfigError, match="p = 1 "):
        RuleChoice("priced", p=1.0)
    with pytest.raises(ConfigError, match="floor belongs to the rule priced"):
        RuleChoice("naive", p=0.1, floor=0.5)


def test_devices_that_do_not_fit_are_refused() -> None:
    routed = skewed()
    with pytest.raises(InfeasiblePlacement, match=r"\[2, 15\]"):
        RoutedTrace(routed.trace, routed.device_LE[:, :15], routed.topology)
    with pytest.raises(InfeasiblePlacement, match="device 3, topology 2 has 2"):
        RoutedTrace(routed.trace, routed.device_LE, Topology.parse("2"))
    bare = RoutingTrace(routed.trace.expert_ids, routed.trace.spec)
    with pytest.raises(TraceError, match="pruning needs routing weights"):
        RoutedTrace(bare, routed.device_LE, routed.topology)


def test_linear_devices_are_runs() -> None:
    devices = linear_devices(MoESpec("toy", 2, 5, 2), Topology.parse("2"))
    assert devices.tolist() == [[0, 0, 0, 1, 1]] * 2


def test_the_floor_is_chosen_where_large_losses_are_fewest() -> None:
    routed = skewed(layers=3)
    tokens = slice(None)
    peak = float(peaks(routed, Cap(0.3), tokens).mean())
    chosen = fit_rule(RuleChoice("priced", peak=peak, floor=None), routed)
    loss = {}
    for floor in FLOORS:
        try:
            rule = fit_rule(RuleChoice("priced", peak=peak, floor=floor), routed)
        except ConfigError:
            continue
        loss[floor] = squared_loss(routed, rule, tokens)
    assert squared_loss(routed, chosen, tokens) <= 1.01 * min(loss.values())
    assert all(loss[floor] > 1.01 * min(loss.values()) for floor in loss if floor > chosen.floor)
    assert float(peaks(routed, chosen, tokens).mean()) <= peak + 1e-9


def test_squared_loss_is_that_of_a_plain_loop() -> None:
    routed = skewed(layers=2)
    rule = Cap(0.3)
    lost = []
    for layer in range(2):
        piece = routed.layer(layer)
        kept = rule.prune_layer(layer, piece)
        for weights, before, stays in zip(piece.weight_TK, piece.before_TK, kept, strict=True):
            had = weights[before].sum()
            lost.append((1 - weights[stays].sum() / had) ** 2)
    assert squared_loss(routed, rule, slice(None)) == pytest.approx(np.mean(lost))
