"""Combinations: which pairs a token uses, and the shares CRISP tells them by."""

import numpy as np
import pytest

from coterie.errors import ConfigError, TraceError
from coterie.profile.combinations import (
    anchor_pair_counts,
    combination_counts,
    natural_pairs,
    shares_needed,
    top_share,
)
from coterie.spec import MoESpec
from coterie.trace.routing_trace import RoutingTrace

IDS = np.array([[[0, 1, 2], [1, 2, 3]]], dtype=np.uint8)
WEIGHTS = np.array([[[0.1, 0.2, 0.7], [0.5, 0.3, 0.2]]], dtype=np.float16)


def table(pairs, num_experts):
    counts = np.zeros((num_experts, num_experts), dtype=int)
    for i, j in pairs:
        counts[i, j] += 1
        counts[j, i] += 1
    return counts


def trace(ids=IDS, num_experts=5, **arrays):
    return RoutingTrace(ids, MoESpec("m", ids.shape[0], num_experts, ids.shape[2]), **arrays)


def test_the_anchor_is_the_highest_weight():
    counts = combination_counts(trace(weights=WEIGHTS), 0)
    assert np.array_equal(counts, table([(2, 0), (2, 1), (1, 2), (1, 3)], 5))


def test_the_anchor_is_the_first_where_slots_are_ordered_by_weight():
    counts = combination_counts(trace(weight_ordered=True), 0)
    assert np.array_equal(counts, table([(0, 1), (0, 2), (1, 2), (1, 3)], 5))


def test_a_pruned_anchor_hands_over_to_the_next():
    kept = np.array([[[True, True, False], [True, False, False]]])
    assert np.array_equal(combination_counts(trace(weights=WEIGHTS, kept=kept), 0), table([(1, 0)], 5))


def test_top_two_needs_no_weights():
    counts = combination_counts(trace(ids=IDS[:, :, :2]), 0)
    assert np.array_equal(counts, table([(0, 1), (1, 2)], 5))


def test_top_one_has_no_combinations():
    counts = combination_counts(trace(ids=IDS[:, :, :1]), 0)
    assert counts.sum() == 0
    assert top_share(counts) == 0.0
    assert shares_needed(counts) == (0.0, 0.0)


def test_without_weights_or_order_the_anchor_is_refused_and_all_pairs_offered():
    unordered = trace()
    assert natural_pairs(unordered) == "pairs"
    assert natural_pairs(trace(weights=WEIGHTS)) == natural_pairs(trace(ids=IDS[:, :, :2])) == "anchor pairs"
    with pytest.raises(TraceError, match="topk_weights"):
        combination_counts(unordered, 0)
    every = [(0, 1), (0, 2), (1, 2), (1, 2), (1, 3), (2, 3)]
    assert np.array_equal(combination_counts(unordered, 0, pairs="pairs"), table(every, 5))


def test_unknown_kind_is_named():
    with pytest.raises(ConfigError, match="did you mean 'anchor pairs'"):
        combination_counts(trace(), 0, pairs="anchor pair")


def test_shares_are_of_all_possible_pairs():
    counts = table([(0, 1)] * 6 + [(0, 2)] * 3 + [(3, 4)], 5)  # 3 of 10 possible pairs, uses 6, 3, 1
    assert top_share(counts, 0.1) == pytest.approx(0.6)
    assert top_share(counts) == pytest.approx(1.0)  # a quarter of ten, rounded up, is three
    assert shares_needed(counts) == pytest.approx((0.1, 0.2))
    assert shares_needed(counts, (0.61, 1.0)) == pytest.approx((0.2, 0.3))


def test_even_use_has_no_skew():
    counts = 7 * (1 - np.eye(16, dtype=np.int64))
    assert top_share(counts) == pytest.approx(0.25)
    assert shares_needed(counts, (0.5,)) == pytest.approx((0.5,))


def test_anchor_pairs_against_a_plain_loop():
    rng = np.random.default_rng(3)
    ids = np.stack([rng.permutation(12)[:4] for _ in range(60)]).astype(np.uint8)
    weights, kept = rng.random((60, 4)), rng.random((60, 4)) < 0.7
    pairs = []
    for t in range(60):
        chosen = sorted((k for k in range(4) if kept[t, k]), key=lambda k: -weights[t, k])
        pairs += [(ids[t, chosen[0]], ids[t, k]) for k in chosen[1:]]
    assert np.array_equal(anchor_pair_counts(ids, weights, kept, 12), table(pairs, 12))
