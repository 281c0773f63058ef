"""Impossible decisions are found and named, wherever they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from coterie.errors import TraceError
from coterie.spec import MoESpec
from coterie.trace import check
from coterie.trace.check import check_decisions, check_ids, pieces
from coterie.trace.routing_trace import RoutingTrace


def make(layers: int = 3, tokens: int = 50, **fields: Any) -> RoutingTrace:
    ids = np.argsort(np.random.default_rng(0).random((layers, tokens, 8)), axis=2)[:, :, :3].astype(np.uint8)
    return RoutingTrace(ids, MoESpec("toy", layers, 8, 3), **fields)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what is wrong lies beyond the first piece."""
    monkeypatch.setattr(check, "_TOKENS_AT_ONCE", 16)


def test_pieces_cover_the_tokens() -> None:
    assert [(piece.start, piece.stop) for piece in pieces(40)] == [(0, 16), (16, 32), (32, 40)]
    assert list(pieces(0)) == []


def test_a_sound_trace_passes() -> None:
    check_decisions(make(weights=np.ones((3, 50, 3), dtype=np.float16)))


def test_an_id_beyond_the_experts() -> None:
    trace = make()
    trace.expert_ids[2, 37, 1] = 8
    with pytest.raises(TraceError, match="expert id 8 in layer 2, token 37; ids run from 0 to 7"):
        check_decisions(trace)


def test_an_expert_twice() -> None:
    trace = make()
    trace.expert_ids[1, 40] = [5, 2, 5]
    with pytest.raises(TraceError, match=r"layer 1, token 40 names an expert twice: \[5, 2, 5\]"):
        check_decisions(trace)


@pytest.mark.parametrize("value", [np.nan, np.inf, -0.5])
def test_a_weight_that_is_none(value: float) -> None:
    weights = np.ones((3, 50, 3), dtype=np.float16)
    weights[0, 49, 2] = value
    with pytest.raises(TraceError, match=f"routing weight {value} in layer 0, token 49"):
        check_decisions(make(weights=weights))


def test_what_is_not_kept_may_repeat_and_weigh_anything() -> None:
    kept = np.ones((3, 50, 3), dtype=bool)
    kept[1, 40, 2] = False
    weights = np.where(kept, 1.0, np.nan)
    trace = make(kept=kept, weights=weights)
    trace.expert_ids[1, 40] = [5, 2, 5]
    check_decisions(trace)
    trace.expert_ids[1, 40] = [5, 2, 9]  # but it is an id all the same
    with pytest.raises(TraceError, match="expert id 9"):
        check_decisions(trace)


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64])
def test_negative_ids_of_importers(dtype: Any) -> None:
    ids_TK = np.array([[0, 1], [2, -1]], dtype=dtype)
    with pytest.raises(TraceError, match="expert id -1 in layer 4, token 101"):
        check_ids(ids_TK, None, 8, 4, 100)
    check_ids(ids_TK[:1], None, 8, 4, 100)


def test_all_ids_of_a_byte() -> None:
    check_ids(np.arange(256, dtype=np.uint8)[None], None, 256, 0, 0)
    with pytest.raises(TraceError, match="expert id 255"):
        check_ids(np.arange(256, dtype=np.uint8)[None], None, 255, 0, 0)
