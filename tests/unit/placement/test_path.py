"""The path from cheapest to most balanced against trying every price and every combination."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest

from coterie.placement.path import build_path, lower_hull


def hull_by_prices(balance: list[int], cost: list[int]) -> list[tuple[int, int]]:
    """(cost, balance) of the points that are cheapest at some price of balance, from the cheapest on."""
    points = set(zip(cost, balance, strict=True))
    turns = {Fraction(c - d, b - a) for (c, a), (d, b) in itertools.permutations(points, 2) if a != b}
    turns = sorted({price for price in turns if price > 0})
    prices = [(a + b) / 2 for a, b in itertools.pairwise([Fraction(0), *turns, 2 * max(turns, default=Fraction(1))])]
    return sorted({min(points, key=lambda point: point[0] + price * point[1]) for price in prices})


@pytest.mark.parametrize("seed", range(60))
def test_the_hull_holds_what_is_cheapest_at_some_price(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count, largest = int(rng.integers(1, 12)), int(rng.choice([2, 5, 30]))
    balance, cost = rng.integers(0, largest, count), rng.integers(0, largest, count)  # many ties and repeats
    hull = lower_hull(balance.astype(float), cost.astype(float))
    assert [(int(cost[i]), int(balance[i])) for i in hull] == hull_by_prices(balance.tolist(), cost.tolist())


@pytest.mark.parametrize("seed", range(12))
def test_no_combination_of_candidates_is_cheaper_at_equal_balance(seed: int) -> None:
    rng = np.random.default_rng(seed)
    costs = [rng.integers(0, 40, rng.integers(1, 6)).astype(float) for _ in range(4)]
    balances = [rng.integers(0, 40, cost.size).astype(float) for cost in costs]
    path = build_path(costs, balances)
    mean_cost, mean_balance = path.means(costs), path.means(balances)
    every = [
        (
            np.mean([cost[i] for cost, i in zip(costs, choice, strict=True)]),
            np.mean([balance[i] for balance, i in zip(balances, choice, strict=True)]),
        )
        for choice in itertools.product(*(range(cost.size) for cost in costs))
    ]
    for cost, balance in zip(mean_cost, mean_balance, strict=True):
        assert cost <= min(other for other, at in every if at <= balance + 1e-9) + 1e-9
    assert mean_cost[0] == pytest.approx(min(cost for cost, _ in every))
    assert mean_balance[-1] == pytest.approx(min(balance for _, balance in every))


@pytest.mark.parametrize("seed", range(6))
def test_a_path_is_what_its_choices_are(seed: int) -> None:
    rng = np.random.default_rng(seed)
    costs, balances = ([rng.random(7) for _ in range(5)] for _ in range(2))
    other = [rng.random(7) for _ in range(5)]
    path = build_path(costs, balances)
    assert path.num_points > 3
    for point in range(path.num_points):
        choice = path.choice(point)
        for values in (costs, balances, other):
            expected = np.mean([value[i] for value, i in zip(values, choice, strict=True)])
            assert path.means(values)[point] == pytest.approx(expected)
    assert (np.diff(path.price_S) >= 0).all()
    assert (np.diff(path.means(costs)) > 0).all()
    assert (np.diff(path.means(balances)) < 0).all()
    gained, paid = -np.diff(path.means(balances)), np.diff(path.means(costs))
    np.testing.assert_allclose(path.price_S, paid / gained)


def test_at_a_price_every_step_that_costs_no_more_is_taken() -> None:
    costs, balances = (
        [np.array([0.0, 1.0, 3.0]), np.array([0.0, 4.0])],
        [np.array([3.0, 2.0, 1.0]), np.array([2.0, 0.0])],
    )
    path = build_path(costs, balances)
    assert path.price_S.tolist() == [1, 2, 2]
    assert [path.at_price(price) for price in (-np.inf, 0.5, 1, 1.9, 2, 9)] == [0, 0, 1, 1, 3, 3]
    assert path.choice(1).tolist() == [1, 0]
    assert path.choice(3).tolist() == [2, 1]


def test_one_candidate_a_layer_makes_one_point() -> None:
    path = build_path([np.array([2.0]), np.array([4.0])], [np.array([1.0]), np.array([1.5])])
    assert path.num_points == 1
    assert path.means([np.array([2.0]), np.array([4.0])]).tolist() == [3.0]
    assert path.at_price(np.inf) == 0
