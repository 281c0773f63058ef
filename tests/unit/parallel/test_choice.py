"""What is timed, and what is picked, with times made up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from coterie.parallel.choice import choose, shortlist

NAMES = ["linear", "eplb", "p0", "p1", "p2", "p3"]


def test_the_baselines_and_the_best_predicted_are_timed() -> None:
    assert shortlist(NAMES, [9, 9, 3, 1, 2, 4], best=2) == [0, 1, 3, 4]
    assert shortlist(NAMES, [1, 1, 1, 1, 1, 1], best=9) == [0, 1, 2, 3, 4, 5]


class Timer:
    """Gives each candidate its own time, times a factor for each round; notes who was asked for."""

    def __init__(self, seconds: Sequence[float], rounds: Sequence[float] = (1, 1, 1)) -> None:
        self.seconds, self.rounds = np.asarray(seconds, dtype=float), np.asarray(rounds, dtype=float)
        self.asked: list[int] = []

    def __call__(self, indices: Sequence[int]) -> Any:
        self.asked = list(indices)
        return self.rounds[:, None] * self.seconds[self.asked]


def test_the_fastest_measured_wins_not_the_fastest_predicted() -> None:
    timer = Timer([1.0, 0.95, 9, 0.8, 0.7, 9])
    found = choose(NAMES, [5, 5, 4, 1, 2, 4], timer, best=2)
    assert timer.asked == [0, 1, 3, 4]
    assert (found.pick, found.beats_linear) == (4, True)
    assert found.rows[4].ratio == pytest.approx(0.7)
    assert found.rows[2].measured_s is None
    assert found.rows[3].to_json()["predicted_s"] == 1.0


def test_slow_rounds_change_nothing() -> None:
    found = choose(NAMES, [5, 5, 4, 1, 2, 4], Timer([1.0, 0.95, 9, 0.8, 0.7, 9], rounds=(1, 7, 1.2)), best=2)
    assert (found.pick, found.rows[4].ratio) == (4, pytest.approx(0.7))


def test_nothing_beats_linear() -> None:
    found = choose(NAMES, [1, 2, 1, 1, 1, 1], Timer([1.0, 1.1, 1.2, 1.1, 1.3, 1.2]))
    assert (found.pick, found.beats_linear) == (0, False)


def test_faster_by_chance_is_not_faster() -> None:
    def timer(indices: Sequence[int]) -> Any:
        rounds = np.ones((5, len(indices)))
        rounds[:, indices.index(3)] = [0.99, 0.99, 0.99, 1.05, 1.05]
        return rounds

    found = choose(NAMES, [1, 2, 5, 1, 5, 5], timer, best=1)
    assert (found.pick, found.beats_linear) == (0, False)


def test_eplb_may_win() -> None:
    assert choose(NAMES, [1, 2, 1, 1, 1, 1], Timer([1.0, 0.5, 1.2, 1.1, 1.3, 1.2])).pick == 1
