"""The tables of refinement against counting from scratch, on random token sets and swap sequences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from coterie.placement.state import Hypergraph, Level, apply_swap, build_hypergraph, build_level, visit_changes


@dataclass
class Case:
    """Token sets as Python sets, and the same as a hypergraph; E experts on P parts."""

    sets: list[frozenset[int]]
    multiplicity: list[int]
    window: list[int]
    graph: Hypergraph
    experts: int
    parts: int

    def views(self) -> list[list[tuple[frozenset[int], int]]]:
        """The (set, tokens) of every view: all, then each window if there are several."""
        rows = list(zip(self.sets, self.multiplicity, self.window, strict=True))
        several = range(self.graph.num_windows) if self.graph.num_windows > 1 else ()
        return [[row[:2] for row in rows], *([row[:2] for row in rows if row[2] == w] for w in several)]


# name: experts, parts, sets, width, smallest set, largest multiplicity, windows
SHAPES = {
    "plain": (8, 4, 40, 3, 3, 1, 1),
    "padded": (8, 4, 40, 4, 1, 1, 1),
    "weighted": (9, 2, 30, 3, 2, 7, 1),
    "windows": (8, 4, 60, 4, 1, 5, 3),
    "wide": (12, 3, 30, 8, 5, 3, 2),
    "one expert a part": (5, 5, 20, 3, 1, 2, 2),
}


def make_case(name: str, seed: int) -> Case:
    experts, parts, count, width, least, most, num_windows = SHAPES[name]
    rng = np.random.default_rng(seed)
    rows = np.full((count, width), -1, dtype=np.int32)
    for row in rows:
        size = int(rng.integers(least, width + 1))
        row[:size] = np.sort(rng.permutation(experts)[:size])
    multiplicity = rng.integers(1, most + 1, count)
    window = np.sort(rng.integers(0, num_windows, count)).astype(np.int32)
    window[-1] = num_windows - 1
    graph = build_hypergraph(rows, multiplicity, window, experts)
    sets = [frozenset(row[row >= 0].tolist()) for row in rows]
    return Case(sets, multiplicity.tolist(), window.tolist(), graph, experts, parts)


def visits(rows: list[tuple[frozenset[int], int]], part_E: np.ndarray, part: int) -> int:
    """Tokens that visit a part."""
    return sum(tokens for found, tokens in rows if any(part_E[e] == part for e in found))


def assert_tables(level: Level, case: Case) -> None:
    """Every table says what its definition says."""
    part_E = level.part_E
    for u, found in enumerate(case.sets):
        assert level.count_UP[u].tolist() == [sum(part_E[e] == p for e in found) for p in range(case.parts)]
    assert len(level.visits_VP) == len(case.views())
    for v, rows in enumerate(case.views()):
        alone = np.zeros((case.experts, case.experts), dtype=int)
        leave, arrive = np.zeros(case.experts, dtype=int), np.zeros((case.parts, case.experts), dtype=int)
        for found, tokens in rows:
            here = [part_E[e] for e in found]
            for e in found:
                arrive[[p for p in range(case.parts) if p not in here], e] += tokens
                if here.count(part_E[e]) == 1:
                    leave[e] += tokens
                    alone[e, [f for f in found if f != e]] += tokens
        np.testing.assert_array_equal(level.leave_VE[v], leave)
        np.testing.assert_array_equal(level.arrive_VPE[v], arrive)
        np.testing.assert_array_equal(level.alone_VEE[v], alone)
        np.testing.assert_array_equal(level.alone_transposed_VEE[v], alone.T)
        assert level.visits_VP[v].tolist() == [visits(rows, part_E, p) for p in range(case.parts)]


def start(case: Case, seed: int) -> np.ndarray:
    even = np.arange(case.experts) % case.parts
    return np.random.default_rng(seed).permutation(even).astype(np.int32)


@pytest.mark.parametrize("name", SHAPES)
def test_tables_say_what_they_are_defined_to_say(name: str) -> None:
    case = make_case(name, 1)
    assert_tables(build_level(case.graph, start(case, 2), case.parts, True), case)


@pytest.mark.parametrize("name", SHAPES)
def test_tables_stay_right_through_swaps(name: str) -> None:
    case, rng = make_case(name, 3), np.random.default_rng(4)
    level = build_level(case.graph, start(case, 5), case.parts, True)
    expected = level.part_E.copy()
    for _ in range(60):
        a, b = (int(e) for e in rng.permutation(case.experts)[:2])
        if level.part_E[a] != level.part_E[b]:
            apply_swap(level, case.graph, a, b)
            expected[[a, b]] = expected[[b, a]]
    np.testing.assert_array_equal(level.part_E, expected)
    for now, anew in zip(level, build_level(case.graph, expected, case.parts, True), strict=True):
        np.testing.assert_array_equal(now, anew)
    assert_tables(level, case)


@pytest.mark.parametrize("name", SHAPES)
def test_the_change_of_visits_is_known_before_the_swap(name: str) -> None:
    case = make_case(name, 6)
    level = build_level(case.graph, start(case, 7), case.parts, True)
    for a in range(case.experts):
        for b in range(case.experts):
            if level.part_E[a] == level.part_E[b]:
                continue
            swapped = level.part_E.copy()
            swapped[[a, b]] = swapped[[b, a]]
            for v, rows in enumerate(case.views()):
                now, then = (
                    [visits(rows, part_E, p) for p in (level.part_E[a], level.part_E[b])]
                    for part_E in (level.part_E, swapped)
                )
                assert visit_changes(level, v, a, b) == (then[0] - now[0], then[1] - now[1])


def test_without_windows_there_is_one_view() -> None:
    case = make_case("windows", 8)
    assert len(build_level(case.graph, start(case, 9), case.parts, False).visits_VP) == 1


def test_the_index_lists_the_sets_of_every_expert() -> None:
    case = make_case("padded", 10)
    for e in range(case.experts):
        members = case.graph.member_of[case.graph.start_E[e] : case.graph.start_E[e + 1]].tolist()
        assert members == [u for u, found in enumerate(case.sets) if e in found]
