"""Bounds, by hand on tiny examples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from coterie.bench.offload.bounds import beyond_budget, certain_blocks, least_seconds, reads_of, segments
from coterie.policies.belady import Belady
from coterie.policies.eviction import CacheShape
from coterie.policies.registry import make_policy
from coterie.simulate.offload import Uses, budget_in_blocks, build, replay, uses_of


def uses(ids: list[list[list[int]]], blocks: list[list[list[int]]], parts: int) -> Uses:
    ids_TLK, blocks_TLK = np.array(ids), np.array(blocks)
    shape = CacheShape(ids_TLK.shape[1], 4, parts)
    return Uses(shape, ids_TLK, blocks_TLK, np.full(len(ids), ids_TLK.shape[1] * ids_TLK.shape[2]))


def test_a_token_reads_at_least_what_it_runs_beyond_the_budget() -> None:
    # two layers; token 0 runs 4 + 2 and 3 + 0 blocks, token 1 runs 1 + 1 and 1 + 1
    wanted = uses([[[0, 1], [2, 3]], [[0, 1], [2, 3]]], [[[4, 2], [3, 0]], [[1, 1], [1, 1]]], 4)
    assert beyond_budget(wanted, 6).tolist() == [3, 0]
    assert beyond_budget(wanted, 9).tolist() == [0, 0]


def test_what_may_be_skipped_need_not_be_read() -> None:
    wanted = uses([[[0, 1], [2, 3]]], [[[4, 4], [4, 4]]], 4)
    weights_TLK = np.array([[[0.7, 0.3], [1.0, 1.0]]], np.float32)
    assert certain_blocks(wanted, weights_TLK, 0.8).tolist() == [[[4, 0], [4, 4]]]
    assert certain_blocks(wanted, weights_TLK, 0).tolist() == wanted.blocks_TLK.tolist()


def test_seconds_are_the_longer_of_reading_and_computing() -> None:
    assert least_seconds(0.25, 100, 1000) == 0.25
    assert least_seconds(0.25, 500, 1000) == 0.5


def test_belady_keeps_what_comes_back_first() -> None:
    # one layer, one expert a token, room for two: 0 1 2 0 1 2; Belady reads 0 1 2, keeps 0, reads 1 or 2 once more
    wanted = uses([[[0]], [[1]], [[2]], [[0]], [[1]], [[2]]], [[[1]]] * 6, 1)
    read_T = reads_of(wanted, Belady(wanted.shape, wanted.ids_TLK, wanted.blocks_TLK), 2)
    assert read_T.sum() == 4
    assert reads_of(wanted, make_policy("lru", wanted.shape), 2).sum() == 6


def test_reads_of_tokens_add_up_to_what_a_replay_counts(make_trace: Any) -> None:
    wanted = uses_of(make_trace(layers=3, tokens=150, experts=8, top_k=2))
    budget = budget_in_blocks(wanted, 0.4)
    for name in ("lru", "company", "belady"):
        read_T = reads_of(wanted, build(name, wanted), budget)
        assert read_T.sum() / (150 * 6) == pytest.approx(replay(wanted, build(name, wanted), budget).bytes_share)


@pytest.mark.parametrize("name", ["lru", "lru-layer"])
def test_whole_experts_leave_as_from_slots_of_one_expert(name: str, make_trace: Any) -> None:
    """A cache of blocks that evicts whole experts reads what a cache of whole experts reads."""
    trace = make_trace(layers=4, tokens=200, experts=8, top_k=2)
    experts, blocks = uses_of(trace), uses_of(trace, blocks=16)
    for slots in (3, 7, 12):
        expected = reads_of(experts, make_policy(name, experts.shape), slots) * 16
        for budget in (slots * 16, slots * 16 + 9):  # a part of an expert is no slot
            found = reads_of(blocks, make_policy(f"{name}-whole", blocks.shape), budget)
            if name == "lru" or budget == slots * 16:
                assert np.array_equal(found, expected)
            else:
                assert found.sum() % 16 == 0


def test_rounds_are_spread_over_what_was_recorded() -> None:
    found = segments(100, 3, 11, 40)
    assert [(each[0], each[-1]) for each in found] == [(40, 50), (64, 74), (89, 99)]
    assert [each.tolist() for each in segments(100, 1, 2, 40)] == [[40, 41]]
