"""Merging tokens into weighted sets, cutting them into windows, and what a problem holds."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError, InfeasiblePlacement
from coterie.placement.problem import MAX_TOP_K, NO_EXPERT, build_problem, merge_sets, windows
from coterie.placement.state import build_hypergraph, build_level
from coterie.spec import MoESpec
from coterie.topology import Topology
from coterie.trace.routing_trace import RoutingTrace


def counted(ids_TK: Any, kept_TK: Any = None) -> Counter[frozenset[int]]:
    """How many tokens have each set of kept experts, the empty set left out."""
    kept_TK = np.ones(ids_TK.shape, dtype=bool) if kept_TK is None else kept_TK
    sets = (frozenset(row[kept].tolist()) for row, kept in zip(ids_TK, kept_TK, strict=True))
    return Counter(found for found in sets if found)


def as_counter(sets_UK: Any, multiplicity_U: Any) -> Counter[frozenset[int]]:
    """The merged sets in the same form; each row must be rising experts, then NO_EXPERT, and no row twice."""
    result: Counter[frozenset[int]] = Counter()
    for row, count in zip(sets_UK.tolist(), multiplicity_U.tolist(), strict=True):
        experts = [e for e in row if e != NO_EXPERT]
        assert row == sorted(experts) + [NO_EXPERT] * (len(row) - len(experts))
        assert frozenset(experts) not in result
        result[frozenset(experts)] = count
    return result


@pytest.mark.parametrize("share", [None, 0.5, 0.0])
@pytest.mark.parametrize(("experts", "dtype"), [(6, np.uint8), (255, np.uint8), (256, np.uint8), (300, np.uint16)])
def test_merged_sets_are_a_counter_of_sets(experts: int, dtype: Any, share: float | None) -> None:
    rng = np.random.default_rng(experts)
    ids_TK = np.argsort(rng.random((400, experts)), axis=1)[:, :3]
    ids_TK[:5] = [experts - 1, 0, 1]  # the largest id, often: it must not be taken for the end of a set
    ids_TK = ids_TK.astype(dtype)
    kept_TK = None if share is None else rng.random(ids_TK.shape) < share
    before = ids_TK.copy()
    sets_UK, multiplicity_U = merge_sets(ids_TK, kept_TK, experts)
    assert as_counter(sets_UK, multiplicity_U) == counted(ids_TK, kept_TK)
    assert (sets_UK.dtype, multiplicity_U.dtype) == (np.int32, np.int64)
    np.testing.assert_array_equal(ids_TK, before)


def test_an_expert_that_is_not_kept_may_repeat_another() -> None:
    ids_TK, kept_TK = np.array([[3, 3], [3, 1]], dtype=np.uint8), np.array([[True, False], [True, False]])
    sets_UK, multiplicity_U = merge_sets(ids_TK, kept_TK, 4)
    assert sets_UK.tolist() == [[3, NO_EXPERT]]
    assert multiplicity_U.tolist() == [2]


@pytest.mark.parametrize(
    ("tokens", "count"), [(1, 1), (2047, 1), (2048, 2), (3071, 2), (3072, 3), (4095, 3), (4096, 4), (9999, 4)]
)
def test_windows_cover_the_tokens_evenly(tokens: int, count: int) -> None:
    cuts = windows(tokens)
    sizes = [cut.stop - cut.start for cut in cuts]
    assert len(cuts) == count
    assert [t for cut in cuts for t in range(cut.start, cut.stop)] == list(range(tokens))
    assert max(sizes) - min(sizes) <= 1


def test_a_problem_counts_what_the_trace_holds(make_trace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie.placement.problem.WINDOW_TOKENS", 256)
    trace = make_trace(layers=2, tokens=700, kept=0.6)
    chosen = slice(50, 650)
    found = build_problem(trace, 1, Topology.parse("2x2"), chosen)
    ids_TK, kept_TK = trace.expert_ids[1, chosen], trace.kept[1, chosen]
    load = Counter(int(e) for row, kept in zip(ids_TK, kept_TK, strict=True) for e in row[kept])
    assert found.load_E.tolist() == [load[e] for e in range(16)]
    for i, j in [(0, 1), (3, 3), (15, 2)]:
        both = sum({i, j} <= set(row[kept].tolist()) for row, kept in zip(ids_TK, kept_TK, strict=True))
        assert found.coactivation_EE[i, j] == both
    assert found.num_tokens == 600
    assert (found.num_experts, found.num_devices, found.num_groups) == (16, 4, 1)
    assert found.slots_G.tolist() == [4, 4, 4, 4]
    for window, part in enumerate((slice(0, 300), slice(300, 600))):
        here = found.window_U == window
        merged = as_counter(found.sets_UK[here], found.multiplicity_U[here])
        assert merged == counted(ids_TK[part], kept_TK[part])


def test_many_tokens_are_sampled_for_the_sets_alone(make_trace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie.placement.problem.WINDOW_TOKENS", 256)
    trace = make_trace(layers=1, tokens=600)
    found = build_problem(trace, 0, Topology.parse("4"), sample=250)
    sampled = np.concatenate([trace.expert_ids[0, :300:3], trace.expert_ids[0, 300::3]])
    merged = Counter[frozenset[int]]()
    for window in range(2):
        here = found.window_U == window
        merged += as_counter(found.sets_UK[here], found.multiplicity_U[here])
    assert merged == counted(sampled)
    assert found.num_tokens == len(sampled)
    assert found.load_E.sum() == 600 * 4


def test_co_activation_is_tokens_with_both_over_tokens_with_either(make_problem: Any) -> None:
    found = make_problem(experts=6, top_k=2, tokens=60)
    ids = [set(row[row >= 0].tolist()) for row in np.repeat(found.sets_UK, found.multiplicity_U, axis=0)]
    for i in range(6):
        for j in range(6):
            both = sum(i in row and j in row for row in ids)
            either = sum(i in row or j in row for row in ids)
            assert found.jaccard_EE[i, j] == (both / either if i != j and either else 0)


def test_groups_constrain_only_when_kept(make_problem: Any) -> None:
    free, kept = make_problem(groups=4), make_problem(groups=4, keep_groups=True)
    assert (free.num_groups, free.routing_groups) == (1, 4)
    assert (kept.num_groups, kept.routing_groups) == (4, 4)


def test_fewer_experts_than_devices_are_refused(make_problem: Any) -> None:
    with pytest.raises(InfeasiblePlacement, match="16 experts on 17 devices"):
        make_problem("17")


def test_more_experts_a_token_than_a_byte_counts_are_refused() -> None:
    """All of a token's experts on one device still count right at the limit, and beyond it nothing is placed."""
    for top_k in (MAX_TOP_K, MAX_TOP_K + 1):
        ids = np.arange(top_k, dtype=np.uint16)[None, None]
        trace = RoutingTrace(ids, MoESpec("wide", 1, 2 * MAX_TOP_K, top_k))
        if top_k > MAX_TOP_K:
            with pytest.raises(ConfigError, match="top-256 routing; placement supports up to top-255"):
                build_problem(trace, 0, Topology.parse("2"))
            continue
        problem = build_problem(trace, 0, Topology.parse("2"))
        graph = build_hypergraph(problem.sets_UK, problem.multiplicity_U, problem.window_U, problem.num_experts)
        level = build_level(graph, np.repeat(np.arange(2, dtype=np.int32), MAX_TOP_K), 2, True)
        assert level.count_UP.tolist() == [[MAX_TOP_K, 0]]
        assert not level.leave_VE.any()


def test_with_domains_each_is_a_window(make_trace: Any) -> None:
    trace = make_trace(layers=1, tokens=90)
    domain_T = np.arange(90, dtype=np.int64) % 3
    problem = build_problem(trace, 0, Topology.parse("4"), slice(0, 60), domain_T=domain_T)
    ids = np.asarray(trace.expert_ids[0])
    for window in range(3):
        chosen = problem.window_U == window
        assert problem.multiplicity_U[chosen].sum() == 20
        expected = {tuple(sorted(row)) for row in ids[window:60:3].tolist()}
        assert {tuple(row) for row in problem.sets_UK[chosen].tolist()} == expected
    assert np.concatenate(windows(9, domain_T[:9])).tolist() == [0, 3, 6, 1, 4, 7, 2, 5, 8]
