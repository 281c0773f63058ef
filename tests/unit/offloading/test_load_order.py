"""Orders by rates: what is resident first, then as Johnson's rule says for the times that the rates give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.needs("torch")


def _visit(asked: list[list[int]]) -> Any:
    from coterie.offloading.visit import Visit

    return Visit(0, np.zeros(8, np.int32), asked, 0)


def test_rates_move_towards_what_is_measured() -> None:
    from coterie.offloading.load_order import Rates

    rates = Rates(loading=100.0, computing=10.0)
    rates.loaded(200, 1.0)
    rates.computed(60, 2.0)
    assert (rates.loading, rates.computing) == pytest.approx((120.0, 14.0))
    rates.loaded(5, 0.0)
    assert rates.loading == pytest.approx(120.0), "no time, no rate"
    for _ in range(100):
        rates.computed(60, 2.0)
    assert rates.computing == pytest.approx(30.0)


def test_the_order_is_the_schedules_for_these_rates() -> None:
    from coterie.offloading.load_order import LoadOrder, Rates

    reserved_E = np.array([0, 0, 0, 4, 0, 0, 0, 0], np.int32)
    asked = [[0, 4, 1], [1, 1, 1], [2, 2, 9], [3, 4, 1]]  # expert, blocks, rows
    slow, fast = Rates(loading=1.0, computing=10.0), Rates(loading=10.0, computing=1.0)
    visit = _visit(asked)
    # a load takes ten times one row's computation: all hide less than they load, by falling computation 1.8, 0.4, 0.1
    assert LoadOrder("johnson", 1, slow).of(visit, reserved_E) == [3, 2, 0, 1]
    assert visit.missing == 3
    # now every load is shorter than its computation: by rising load, 1, 2 and 4 blocks
    assert LoadOrder("johnson", 1, fast).of(_visit(asked), reserved_E) == [3, 1, 2, 0]
    assert LoadOrder("widest-first", 1, slow).of(_visit(asked), reserved_E) == [3, 0, 2, 1]
    resident = _visit(asked)
    assert LoadOrder("johnson", 1, slow).of(resident, np.full(8, 4, np.int32)) == [0, 1, 2, 3]
    assert resident.missing == 0
