"""Which copy a token uses, on the rank where it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError
from coterie.placement.copies import RULES
from coterie.placement.placement import Placement
from coterie.spec import MoESpec
from coterie.topology import Topology

torch = pytest.importorskip("torch")
from coterie.parallel.copy_choice import copy_choices  # noqa: E402 - needs torch

pytestmark = pytest.mark.needs("torch")

EVERYWHERE = Placement(np.tile(np.arange(2), (1, 4)), Topology(1, 4), MoESpec("toy", 1, 2, 1))


def test_without_copies_the_very_tensor_comes_back() -> None:
    placed = Placement(np.arange(4)[None], Topology(1, 2), MoESpec("toy", 1, 4, 2))
    ids_TK = torch.tensor([[3, -1]])
    assert all(copy_choices(placed, [0], 0, rule)[0](ids_TK) is ids_TK for rule in RULES)


@pytest.mark.parametrize("rule", ["fewest-devices", "random"])
def test_loads_are_balanced_between_copies_over_many_calls(rule: str) -> None:
    """All tokens of a rank want one expert, which every device has: each gets its share, in many calls or one."""
    choose = copy_choices(EVERYWHERE, [0], 1, rule)[0]
    found = torch.cat([choose(torch.zeros((1, 1), dtype=torch.int64)) for _ in range(100)])
    counts = np.bincount(found.ravel(), minlength=4)
    assert counts.tolist() == [25] * 4 if rule == "fewest-devices" else counts.min() >= 14
    again = copy_choices(EVERYWHERE, [0], 1, rule)[0]
    assert torch.equal(again(torch.zeros((100, 1), dtype=torch.int64)), found)


def test_nearest_stays_at_home() -> None:
    for rank in range(4):
        found = copy_choices(EVERYWHERE, [0], rank, "nearest")[0](torch.tensor([[0], [1]]))
        assert found.tolist() == [[rank], [4 + rank]]


def test_ranks_draw_by_chance_on_their_own() -> None:
    ids = torch.zeros((50, 1), dtype=torch.int64)
    first, second = (copy_choices(EVERYWHERE, [0], rank, "random")[0](ids) for rank in (0, 1))
    assert not torch.equal(first, second)


def test_dropped_slots_stay_dropped_and_count_for_nothing() -> None:
    full, holed = (copy_choices(EVERYWHERE, [0], 0)[0] for _ in range(2))
    ids: Any = torch.tensor([[0], [-1], [0], [-1], [0]])
    kept = ids[:, 0] >= 0
    found = holed(ids)
    assert found[~kept].tolist() == [[-1], [-1]]
    assert torch.equal(found[kept], full(ids[kept]))


def test_the_rule_is_the_placements_own_or_the_one_that_is_asked_for() -> None:
    named = Placement(EVERYWHERE.physical_to_logical_map, EVERYWHERE.topology, EVERYWHERE.spec, {"dispatch": "nearest"})
    ids = torch.zeros((8, 1), dtype=torch.int64)
    assert set(copy_choices(named, [0], 2)[0](ids).ravel().tolist()) == {2}
    assert set(copy_choices(named, [0], 2, "fewest-devices")[0](ids).ravel().tolist()) == {0, 1, 2, 3}
    with pytest.raises(ConfigError, match="did you mean 'nearest'"):
        copy_choices(named, [0], 2, "nearst")
