"""Budgets and the learning rate."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from training.schedule import WARM_UP, Budget, learning_rate
from training.settings import Position, Settings


@pytest.mark.parametrize(("minutes", "tokens"), [(None, None), (1.0, 5), (0.0, None), (None, -1)])
def test_a_budget_is_exactly_one_positive_amount(minutes, tokens):
    with pytest.raises(ValueError, match="exactly one"):
        Budget(minutes, tokens)


def test_progress_by_the_clock_and_by_tokens():
    assert Budget(minutes=2).progress(seconds=30, tokens=10**9) == 0.25
    assert Budget(tokens=400).progress(seconds=10**9, tokens=100) == 0.25
    assert Budget(minutes=2).progress(seconds=500, tokens=0) == 1.0


def test_the_learning_rate_starts_and_ends_at_zero_and_peaks_after_the_warm_up():
    assert learning_rate(2.0, 0.0) == 0.0
    assert learning_rate(2.0, WARM_UP) == 2.0
    assert learning_rate(2.0, WARM_UP / 2) == pytest.approx(1.0)
    assert learning_rate(2.0, (1 + WARM_UP) / 2) == pytest.approx(1.0)
    assert learning_rate(2.0, 1.0) == 0.0


@given(st.floats(WARM_UP, 1.0), st.floats(WARM_UP, 1.0))
def test_after_the_warm_up_it_only_falls(one, other):
    earlier, later = sorted((one, other))
    assert learning_rate(1.0, later) <= learning_rate(1.0, earlier) <= 1.0


def test_the_weight_of_the_balance_loss_is_remembered_when_it_changes():
    position = Position()
    position.note_balance(0.02)
    position.step = 7
    position.note_balance(0.02)
    position.note_balance(0.05)
    assert position.balance_history == [(0, 0.02), (7, 0.05)]


def test_many_small_experts_are_balanced_more():
    assert Settings.of("tiny-qwen3-moe").balance > Settings.of("tiny-mixtral").balance
