"""The look-up of widths inside a forward pass: what it must not do. Its values: tests/property/test_widths.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError
from coterie.pruning.width_planning import plan_widths
from coterie.pruning.width_tables import POLICIES
from coterie.pruning.widths import widths

pytestmark = pytest.mark.needs("torch")


def plan_of(make_profile: Any, policy: str, top_k: int) -> Any:
    options: dict[str, Any] = {"prices": (1, 1.5, 2)} if policy == "priced" else {}
    return plan_widths(make_profile(2, 8, top_k), "value" if policy == "priced" else policy, bytes=0.9, **options)


@pytest.mark.parametrize("top_k", [2, 3])
@pytest.mark.parametrize("policy", [*POLICIES, "priced"])
def test_shapes_are_known_without_data(make_profile: Any, policy: str, top_k: int) -> None:
    """A meta tensor holds nothing: whatever read a value, or took a shape from one, would raise."""
    import torch

    from coterie.ops.widths import WidthTables

    tables = WidthTables.of(plan_of(make_profile, policy, top_k), "meta")
    for tokens in (0, 1, 5):
        ids_TK = torch.zeros((tokens, top_k), dtype=torch.int64, device="meta")
        width_TK = tables.widths(1, ids_TK, torch.zeros((tokens, top_k), device="meta"))
        assert (width_TK.shape, width_TK.dtype) == ((tokens, top_k), torch.int64)


@pytest.mark.parametrize("policy", [*POLICIES, "priced"])
def test_a_graph_of_it_gives_the_same(make_profile: Any, policy: str) -> None:
    """Traced on one batch of tokens, run on another: nothing of the first was kept."""
    import torch

    from coterie.ops.widths import WidthTables

    plan, profile = plan_of(make_profile, policy, 3), make_profile(2, 8, 3)
    tables = WidthTables.of(plan)
    first, second = (
        (torch.tensor(profile.sample_ids_LSK[1, part]), torch.tensor(profile.sample_weights_LSK[1, part]))
        for part in (slice(0, 50), slice(50, 100))
    )
    traced = torch.fx.experimental.proxy_tensor.make_fx(lambda ids, weights: tables.widths(1, ids, weights))(*first)
    expected_TK = widths(plan, 1, *(each.numpy() for each in second))
    assert np.array_equal(traced(*second).numpy(), expected_TK)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_any_integers_are_ids(make_profile: Any, dtype: str) -> None:
    import torch

    from coterie.ops.widths import WidthTables

    plan = plan_of(make_profile, "crisp", 2)
    ids_TK = torch.tensor([[3, 1], [0, 7]], dtype=getattr(torch, dtype))
    weights_TK = torch.tensor([[0.6, 0.4], [0.3, 0.7]])
    got = WidthTables.of(plan).widths(0, ids_TK, weights_TK)
    assert got.tolist() == widths(plan, 0, ids_TK.numpy(), weights_TK.numpy()).tolist()


def test_tables_that_cannot_be_are_refused(make_profile: Any) -> None:
    from coterie.ops.widths import WidthTables

    plan = plan_of(make_profile, "crisp", 2)
    with pytest.raises(ConfigError, match="unknown width policy"):
        WidthTables.of(replace(plan, policy="narrow"))
    with pytest.raises(ConfigError, match="holds the tables"):
        WidthTables.of(replace(plan, tables={}))
