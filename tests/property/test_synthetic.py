"""Any recipe gives a possible trace, and the same one twice."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.profile.load import trace_load
from coterie.trace.check import check_decisions
from coterie.trace.synthetic import MODELS, Recipe


@st.composite
def recipes(draw):
    num_experts = draw(st.integers(1, 20))
    return Recipe(
        num_layers=draw(st.integers(1, 3)),
        num_experts=num_experts,
        top_k=draw(st.integers(1, num_experts)),
        num_tokens=draw(st.integers(1, 40)),
        seed=draw(st.integers(0, 2**40)),
        like=draw(st.sampled_from(sorted(MODELS))),
        sequence_tokens=draw(st.integers(1, 30)),
    )


@given(recipes())
@settings(deadline=None, max_examples=50)
def test_possible_and_deterministic(recipe):
    trace, again = recipe.draw(), recipe.draw()
    check_decisions(trace)  # ids distinct and below E, weights finite and >= 0
    assert np.array_equal(trace.expert_ids, again.expert_ids)
    assert np.array_equal(trace.weights, again.weights)
    assert np.array_equal(trace.sequence_ids, again.sequence_ids)
    load_LE = trace_load(trace)
    assert (load_LE.sum(axis=1) == recipe.num_tokens * recipe.top_k).all()
    assert load_LE.max() <= recipe.num_tokens


@given(recipes())
@settings(deadline=None, max_examples=20)
def test_fewer_tokens_are_a_prefix(recipe):
    """What a token chooses does not depend on how many follow it."""
    longer = Recipe(**{**vars(recipe), "num_tokens": recipe.num_tokens + 7}).draw()
    assert np.array_equal(longer.expert_ids[:, : recipe.num_tokens], recipe.draw().expert_ids)
