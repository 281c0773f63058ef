"""A trace replayed through a cache: what is asked, what is counted, what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from coterie.errors import BudgetError, ConfigError, TraceError
from coterie.simulate.offload import (
    SIMULATED,
    budget_in_blocks,
    build,
    decode_tokens,
    replay,
    simulate,
    uses_of,
)
from coterie.spec import MoESpec
from coterie.trace.routing_trace import DECODE, PREFILL, RoutingTrace


def trace_of(ids: Any, experts: int = 4, **fields: Any) -> RoutingTrace:
    """A trace from [L, T, K] lists."""
    ids_LTK = np.asarray(ids, np.uint8)
    return RoutingTrace(ids_LTK, MoESpec("toy", ids_LTK.shape[0], experts, ids_LTK.shape[2]), **fields)


def test_lru_by_hand() -> None:
    """One layer, room for two of four: 0 1 | 0 | 2 evicts 1 | 1 evicts 0."""
    uses = uses_of(trace_of([[[0], [1], [0], [2], [1]]]))
    found = replay(uses, build("lru", uses), budget_in_blocks(uses, 0.5))
    assert (found.miss_ratio, found.bytes_share, found.uses) == (4 / 5, 4 / 5, 5)
    warmed = replay(uses, build("lru", uses), 2, warm=2)
    assert (warmed.miss_ratio, warmed.uses) == (2 / 3, 3)


def test_widths_read_prefixes_and_widen_them() -> None:
    """Of 32 neurons in 16 blocks: 8 neurons are 4 blocks; then 17 are 9, of which 5 are missing; then 0 is no use."""
    widths = {0: 8, 1: 17, 2: 0}
    uses = uses_of(
        trace_of([[[0], [0], [0]]], weights=np.array([[[0.0], [1.0], [2.0]]], np.float32)),
        widths=lambda layer, ids, weights: np.vectorize(widths.get)(weights.astype(int)),
        full_width=32,
    )
    assert uses.blocks_TLK.ravel().tolist() == [4, 9, 0]
    found = replay(uses, build("lru", uses), budget_in_blocks(uses, 1.0))
    assert found.bytes_share == 9 / (3 * 16)
    assert (found.miss_ratio, found.uses) == (1.0, 2)


def test_what_is_not_kept_is_not_used() -> None:
    kept = np.array([[[True, False], [True, True]]])
    uses = uses_of(trace_of([[[0, 1], [0, 2]]], kept=kept))
    assert uses.blocks_TLK.tolist() == [[[1, 0]], [[1, 1]]]
    assert uses.chosen_T.tolist() == [1, 2]
    found = replay(uses, build("belady", uses), 4)
    assert (found.uses, found.miss_ratio, found.bytes_share) == (3, 2 / 3, 2 / 3)


def test_only_decoded_tokens_are_replayed_where_they_are_known() -> None:
    ids = [[[0], [1], [2]]]
    phase = np.array([PREFILL, DECODE, DECODE], np.uint8)
    assert uses_of(trace_of(ids, phase=phase), decode_tokens(trace_of(ids, phase=phase))).ids_TLK.ravel().tolist() == [
        1,
        2,
    ]
    assert decode_tokens(trace_of(ids)) == slice(None)
    assert decode_tokens(trace_of(ids, phase=np.zeros(3, np.uint8))) == slice(None)


def test_every_policy_at_every_budget(make_trace: Any) -> None:
    told = []
    uses = uses_of(make_trace(layers=2, tokens=80, experts=8, top_k=2))
    found = simulate(uses, [0.25, 0.5], progress=lambda what, done, total: told.append((done, total)))
    assert list(found) == [0.25, 0.5]
    assert all(tuple(rows) == SIMULATED for rows in found.values())
    assert all(found[0.5][name].miss_ratio <= found[0.25][name].miss_ratio for name in SIMULATED)
    assert told[-1] == (2 * len(SIMULATED),) * 2


def test_the_smallest_budget_that_works_is_named_and_works(make_trace: Any) -> None:
    uses = uses_of(make_trace(layers=3, tokens=40, experts=16, top_k=4))
    assert uses.smallest_budget == 4
    with pytest.raises(BudgetError, match=r"5\.00% of all experts .* the smallest that works here is 8\.34%"):
        budget_in_blocks(uses, 0.05)
    budget = budget_in_blocks(uses, uses.smallest_share)
    assert budget == 4
    assert 0 < replay(uses, build("company", uses), budget).miss_ratio <= 1


def test_what_cannot_be_replayed(make_trace: Any) -> None:
    trace = make_trace(layers=2, tokens=40, experts=8, top_k=2)
    uses = uses_of(trace)
    with pytest.raises(ConfigError, match="did you mean 'belady'"):
        simulate(uses, [0.5], ["lru", "beladi"])
    with pytest.raises(ConfigError, match="40 of 40 tokens warm the cache"):
        replay(uses, build("lru", uses), 4, warm=40)
    with pytest.raises(TraceError, match="no token is selected"):
        uses_of(trace, np.array([], np.int64))
    with pytest.raises(ConfigError, match="give the expert's number of neurons"):
        uses_of(trace, widths=lambda layer, ids, weights: ids)
    with pytest.raises(ConfigError, match="widths from 33 to 33; they lie within 0 and 32"):
        uses_of(trace, widths=lambda layer, ids, weights: np.full(ids.shape, 33), full_width=32)
