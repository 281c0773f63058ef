"""Counts equal plain references whatever the routing."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.profile.coactivation import coactivation_counts, jaccard
from coterie.profile.combinations import anchor_pair_counts, shares_needed, top_share
from coterie.profile.load import expert_load, imbalance


@st.composite
def routings(draw):
    num_experts = draw(st.integers(1, 9))
    top_k = draw(st.integers(1, num_experts))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    num_tokens = draw(st.integers(0, 20))
    ids = np.array([rng.permutation(num_experts)[:top_k] for _ in range(num_tokens)], dtype=np.uint8)
    ids = ids.reshape(num_tokens, top_k)
    kept = rng.random(ids.shape) < draw(st.sampled_from((0.0, 0.5, 0.9, 1.0)))
    return ids, kept, rng.integers(0, 4, ids.shape) / 4, num_experts


def chosen_sets(ids, kept):
    return [{int(e) for e, keep in zip(row, use, strict=True) if keep} for row, use in zip(ids, kept, strict=True)]


@given(routings())
@settings(deadline=None)
def test_counts_equal_counting_sets(routing):
    ids, kept, _, num_experts = routing
    sets = chosen_sets(ids, kept)
    load = expert_load(ids, kept, num_experts)
    counts = coactivation_counts(ids, kept, num_experts)
    p = jaccard(counts)
    for i in range(num_experts):
        assert load[i] == counts[i, i] == sum(i in chosen for chosen in sets)
        for j in range(num_experts):
            both = sum(i in chosen and j in chosen for chosen in sets)
            either = sum(i in chosen or j in chosen for chosen in sets)
            assert counts[i, j] == both
            assert p[i, j] == (both / either if either and i != j else 0)
    assert load.sum() == kept.sum()
    assert imbalance(load) >= 1
    assert ((p >= 0) & (p <= 1)).all()


@given(routings())
@settings(deadline=None)
def test_every_kept_expert_but_the_anchor_is_one_use(routing):
    ids, kept, weights, num_experts = routing
    counts = anchor_pair_counts(ids, weights, kept, num_experts)
    assert np.array_equal(counts, counts.T)
    assert np.triu(counts, 1).sum() == np.maximum(kept.sum(axis=1) - 1, 0).sum()
    assert (counts <= coactivation_counts(ids, kept, num_experts)).all()
    if counts.any():
        needed = shares_needed(counts, (0.3, 0.8))
        assert 0 < needed[0] <= needed[1] <= 1
        assert top_share(counts, needed[1]) >= 0.8 - 1e-6
        assert 0.25 - 1e-9 <= top_share(counts) <= 1
