"""Orders of one layer's loads."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.errors import ConfigError
from coterie.policies.schedule import SCHEDULES, get_schedule, makespan

LOAD, COMPUTE, WIDTH = np.array([4.0, 0, 1, 3]), np.array([1.0, 2, 3, 2]), np.array([8, 4, 2, 8])


def test_each_order_by_hand() -> None:
    orders = {name: schedule(LOAD, COMPUTE, WIDTH).tolist() for name, schedule in SCHEDULES.items()}
    assert orders == {"fifo": [1, 0, 2, 3], "widest-first": [1, 0, 3, 2], "johnson": [1, 2, 3, 0]}


def test_makespans_by_hand() -> None:
    assert makespan(LOAD, COMPUTE, [1, 0, 2, 3]) == 10  # loads end at 0, 4, 5, 8; computed at 2, 5, 8, 10
    assert makespan(LOAD, COMPUTE, [1, 2, 3, 0]) == 9
    assert makespan(LOAD, COMPUTE, []) == 0


def test_where_loading_dominates_johnson_is_widest_first() -> None:
    width = np.array([4, 16, 8])
    load, compute = 10.0 * width, 1.0 * width
    assert get_schedule("johnson")(load, compute, width).tolist() == [1, 2, 0]
    assert get_schedule("widest-first")(load, compute, width).tolist() == [1, 2, 0]


def test_names_are_helped() -> None:
    with pytest.raises(ConfigError, match="did you mean 'johnson'"):
        get_schedule("jonson")
