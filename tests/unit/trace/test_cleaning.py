"""Idle rows against a plain statement of the rule, and the copy of what remains."""

from __future__ import annotations

import math

import numpy as np
import pytest

from coterie import data
from coterie.spec import MoESpec
from coterie.trace.cleaning import find_idle_rows, select_tokens
from coterie.trace.open import open_trace
from coterie.trace.routing_trace import RoutingTrace


def random_ids(layers: int, tokens: int, experts: int, top_k: int, seed: int = 0) -> np.ndarray:
    scores = np.random.default_rng(seed).random((layers, tokens, experts))
    return np.argsort(scores, axis=2)[:, :, :top_k].astype(np.uint8)


def plainly(ids: np.ndarray, kept: np.ndarray | None, experts: int) -> tuple[list[bool], int, int]:
    """Keep, warm-up and padding, by the rule as written."""
    layers, tokens, top_k = ids.shape
    rows = [(ids[:, t].tolist(), None if kept is None else kept[:, t].tolist()) for t in range(tokens)]
    blank = [(top_k > 1 and not ids[:, t].any()) or (kept is not None and not kept[:, t].any()) for t in range(tokens)]
    in_run = [False] * tokens
    begin = 0
    for t in range(1, tokens + 1):
        if t == tokens or rows[t] != rows[begin]:
            length = t - begin
            if length >= 4 and (length - 1) * layers * math.log2(math.comb(experts, top_k)) >= 256:
                in_run[begin:t] = [True] * length
            begin = t
    keep = [not (blank[t] or in_run[t]) for t in range(tokens)]
    first_real = keep.index(True) if True in keep else tokens
    warm_up = sum(in_run[t] and not blank[t] for t in range(first_real))
    return keep, warm_up, keep.count(False) - warm_up


@pytest.mark.parametrize("seed", range(12))
def test_equals_the_rule_as_written(seed):
    rng = np.random.default_rng(seed)
    ids = random_ids(6, 120, 16, 2, seed)
    kept = rng.random(ids.shape) < 0.9 if seed % 3 == 0 else None
    for _ in range(rng.integers(1, 6)):
        begin, length = rng.integers(0, 110), rng.integers(1, 14)
        ids[:, begin : begin + length] = 0 if rng.random() < 0.3 else ids[:, begin : begin + 1]
        if kept is not None:
            kept[:, begin : begin + length] = kept[:, begin : begin + 1] & (rng.random() < 0.8)
    if seed % 2:
        ids[:, :8] = ids[:, :1]
    keep, warm_up, padding = plainly(ids, kept, 16)
    found = find_idle_rows(ids, kept, 16)
    assert found.keep_T.tolist() == keep
    assert (found.warm_up, found.padding) == (warm_up, padding)


def test_a_run_across_a_piece_boundary_is_one_run():
    ids = random_ids(2, 70_000, 8, 2)
    ids[:, 65_520:65_550] = ids[:, 65_520:65_521]  # 30 rows: 29 * 2 * log2(28) = 279 bits, either part alone too short
    found = find_idle_rows(ids, None, 8)
    assert np.flatnonzero(~found.keep_T).tolist() == list(range(65_520, 65_550))
    assert (found.warm_up, found.padding) == (0, 30)


def test_a_run_that_chance_explains_stays():
    ids = random_ids(1, 50, 8, 2)
    ids[:, 10:40] = ids[:, 10:11]  # 29 * log2(28) = 139 bits
    assert find_idle_rows(ids, None, 8).keep_T.all()


def test_three_rows_are_no_run_however_many_layers():
    ids = random_ids(100, 20, 64, 8)
    ids[:, 5:8] = ids[:, 5:6]
    assert find_idle_rows(ids, None, 64).keep_T.all()
    ids[:, 5:9] = ids[:, 5:6]
    assert find_idle_rows(ids, None, 64).padding == 4


def test_one_expert_or_all_experts_leave_nothing_to_tell():
    assert find_idle_rows(np.zeros((3, 50, 1), dtype=np.uint8), None, 1).keep_T.all()
    assert find_idle_rows(np.tile(np.arange(4, dtype=np.uint8), (3, 50, 1)), None, 4).keep_T.all()


@pytest.mark.parametrize("name", data.NAMES)
def test_real_routing_loses_nothing(name):
    assert open_trace(name).provenance["dropped"] == {"warm_up": 0, "padding": 0}


def test_select_tokens_copies_every_array(tmp_path):
    rng = np.random.default_rng(1)
    ids = random_ids(3, 70_000, 8, 2)
    trace = RoutingTrace(
        ids.astype(np.uint16), MoESpec("m", 3, 8, 2),
        weights=rng.random(ids.shape).astype(np.float16), kept=rng.random(ids.shape) < 0.5,
        sequence_ids=np.arange(70_000) // 100, step=rng.integers(0, 9, 70_000),
    )  # fmt: skip
    keep = rng.random(70_000) < 0.6
    chosen = select_tokens(trace, keep, np.uint8, tmp_path / "t")
    assert chosen.expert_ids.dtype == np.uint8
    for name in ("expert_ids", "weights", "kept"):
        assert np.array_equal(getattr(chosen, name), getattr(trace, name)[:, keep]), name
    for name in ("sequence_ids", "step"):
        assert np.array_equal(getattr(chosen, name), getattr(trace, name)[keep]), name
    assert chosen.positions is None
