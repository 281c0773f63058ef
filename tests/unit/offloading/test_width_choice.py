"""Widths that give way to what is resident: by hand, on 4 experts of 40 neurons in blocks of 16."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError

pytestmark = pytest.mark.needs("torch")

RESIDENT = np.array([3, 1, 0, 2], np.int32)


def choice(widths: Any, most: Any = None, skip: float | None = None) -> Any:
    import torch

    from coterie.offloading.width_choice import WidthChoice

    def fixed(values: Any) -> Any:
        return None if values is None else lambda *_: torch.tensor(values)

    return WidthChoice(40, 16, fixed(widths), fixed(most), skip)


def slots(of: Any, ids: Any, weights: Any) -> Any:
    import torch

    return of.plan(0, torch.tensor(ids), torch.tensor(weights))


def test_without_a_plan_experts_run_whole() -> None:
    assert slots(choice(None), [[2, 0]], [[0.5, 0.5]]).widths_TK.tolist() == [[40, 40]]


def test_what_is_resident_runs_too_and_stays() -> None:
    of = choice([[8, 20], [0, 40]], [[40, 40], [40, 40]])
    found, pinned = slots(of, [[0, 1], [3, 2]], [[0.6, 0.4], [0.5, 0.5]]), np.array([1, 2, 3, 0], np.int32)
    of.widen(found, RESIDENT, pinned)
    assert found.widths_TK.tolist() == [[40, 20], [32, 40]]  # 48 resident neurons are 40; 16 of 20 are read for
    assert pinned.tolist() == [3, 2, 3, 2]
    assert of.uses_cached


def test_a_second_plan_bounds_what_runs() -> None:
    of = choice([[8, 20]], [[24, 10]])
    found, pinned = slots(of, [[0, 3]], [[0.6, 0.4]]), np.array([1, 0, 0, 2], np.int32)
    of.widen(found, RESIDENT, pinned)
    assert found.widths_TK.tolist() == [[24, 20]]  # a narrower second plan takes nothing away
    assert pinned.tolist() == [2, 0, 0, 2]


@pytest.mark.parametrize(
    ("factor", "expected"), [(None, [40, 17]), (0, [40, 17]), (0.5, [40, 17]), (0.7, [40, 0]), (2, [40, 0])]
)
def test_light_misses_are_skipped(factor: float | None, expected: list[int]) -> None:
    of = choice([[40, 17]], skip=factor)
    found = slots(of, [[0, 1]], [[1.4, 0.6]])  # normalised 0.7 and 0.3; F / K of 0.35
    assert of.skip(found, RESIDENT) == expected.count(0)
    assert found.widths_TK.tolist() == [expected]


def test_what_another_token_reads_is_not_skipped() -> None:
    of = choice([[10, 40], [20, 40], [40, 40]], skip=0.9)
    found = slots(of, [[0, 2], [2, 0], [2, 1]], [[0.8, 0.2], [0.6, 0.4], [0.3, 0.7]])
    assert of.skip(found, RESIDENT) == 2  # tokens 0 and 2 want 40 of expert 2, of which 20 are read
    assert found.widths_TK.tolist() == [[10, 0], [20, 40], [0, 40]]


def test_skipping_is_the_width_policy_skip_where_nothing_is_resident() -> None:
    import torch

    from coterie.ops.widths import normalised

    weights = torch.from_numpy(np.random.default_rng(0).random((200, 2), np.float32))
    runs = normalised(weights) * 2.0 >= 0.8
    for index in range(len(weights)):
        of = choice([[40, 40]], skip=0.8)
        found = slots(of, [[0, 1]], weights[index : index + 1].tolist())
        of.skip(found, np.zeros(4, np.int32))
        assert torch.equal(found.widths_TK > 0, runs[index : index + 1])


@pytest.mark.parametrize("factor", [-0.1, float("nan"), float("inf")])
def test_a_factor_that_cannot_be(factor: float) -> None:
    with pytest.raises(ConfigError, match="F of weight < F/K"):
        choice([[40]], skip=factor)


def test_the_plan_itself_is_not_changed() -> None:
    import torch

    from coterie.offloading.width_choice import WidthChoice

    kept = torch.tensor([[8, 20]])
    of = WidthChoice(40, 16, lambda *_: kept, lambda *_: kept + 20, 2)
    found = slots(of, [[2, 1]], [[0.5, 0.5]])
    of.skip(found, RESIDENT)
    of.widen(found, RESIDENT, np.zeros(4, np.int32))
    assert kept.tolist() == [[8, 20]]
    assert found.widths_TK.tolist() == [[0, 16]]
