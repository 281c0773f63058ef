"""What a swap of two experts changes, known in advance: the tables that make refinement fast.

For a partition of the experts into parts (devices, or nodes), a token visits a part if one of its experts
lives there. Per token set the number of its experts on each part is kept; from these follow, per expert,

    leave[e]       tokens that stop visiting e's part when e leaves: e is alone there
    arrive[p, e]   tokens that start visiting part p when e arrives: none of their experts is there yet
    alone[e, f]    tokens with both e and f in which e is alone on its part

so that swapping a (on part p) with b (on part q) changes the visits to p by
`arrive[p, b] - leave[a] + alone[a, b]`: tokens that hold both keep visiting p, since b takes a's place.
Applying a swap updates the tables only for tokens that hold a or b (algorithms §2; see Fiduccia and
Mattheyses 1982 for the same idea on single moves).

Tables have a leading axis V of views: view 0 counts all tokens, views 1 .. W count those of one window each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray


class Hypergraph(NamedTuple):
    """Token sets and, for each expert, the sets it is in (compressed rows).

    Attributes:
        sets_UK: [U, K] int16, or int32 for more experts than that holds, experts then -1; narrow, to stay in the cache.
        multiplicity_U: [U] int32, tokens.
        window_U: [U] int32, window of each set, 0 .. W-1.
        num_windows: W.
        start_E: [E + 1] int32, where each expert's run in `member_of` begins.
        member_of: [pins] int32, indices of sets.
    """

    sets_UK: NDArray[Any]
    multiplicity_U: NDArray[np.int32]
    window_U: NDArray[np.int32]
    num_windows: int
    start_E: NDArray[np.int32]
    member_of: NDArray[np.int32]


class Level(NamedTuple):
    """A partition of the experts and its tables; P parts, V views.

    Attributes:
        part_E: [E] int32, the part of each expert.
        count_UP: [U, P] uint8, experts of a set on a part.
        leave_VE: [V, E] int32, tokens.
        arrive_VPE: [V, P, E] int32, tokens.
        alone_VEE: [V, E, E] int32, tokens.
        alone_transposed_VEE: its transpose, so that a scan over all partners of one expert reads rows only.
        visits_VP: [V, P] int64, tokens that visit each part.
    """

    part_E: NDArray[np.int32]
    count_UP: NDArray[np.uint8]
    leave_VE: NDArray[np.int32]
    arrive_VPE: NDArray[np.int32]
    alone_VEE: NDArray[np.int32]
    alone_transposed_VEE: NDArray[np.int32]
    visits_VP: NDArray[np.int64]


def build_hypergraph(
    sets_UK: NDArray[np.int32], multiplicity_U: NDArray[np.int64], window_U: NDArray[np.int32], num_experts: int
) -> Hypergraph:
    """Index the sets of a LayerProblem by expert."""
    flat = sets_UK.ravel()
    pins = np.flatnonzero(flat >= 0)
    order = pins[np.argsort(flat[pins], kind="stable")]
    start = np.zeros(num_experts + 1, dtype=np.int32)
    np.cumsum(np.bincount(flat[pins], minlength=num_experts), out=start[1:])
    member_of = (order // sets_UK.shape[1]).astype(np.int32)
    num_windows = int(window_U.max()) + 1 if window_U.size else 1
    sets_UK = sets_UK.astype(np.int16 if num_experts < 2**15 else np.int32)
    assert sets_UK.shape[1] < 2**8, "counts of a set's experts are kept in a byte"
    return Hypergraph(sets_UK, multiplicity_U.astype(np.int32), window_U, num_windows, start, member_of)


@njit(cache=True, nogil=True)
def build_level(graph: Hypergraph, part_E: NDArray[np.int32], num_parts: int, windows: bool) -> Level:
    """The tables of a partition, from scratch; with `windows` also one view for each window (if several)."""
    num_sets, width = graph.sets_UK.shape
    num_experts = part_E.size
    views = 1 + graph.num_windows if windows and graph.num_windows > 1 else 1
    level = Level(
        np.zeros(num_experts, dtype=np.int32),
        np.zeros((num_sets, num_parts), dtype=np.uint8),
        np.zeros((views, num_experts), dtype=np.int32),
        np.zeros((views, num_parts, num_experts), dtype=np.int32),
        np.zeros((views, num_experts, num_experts), dtype=np.int32),
        np.zeros((views, num_experts, num_experts), dtype=np.int32),
        np.zeros((views, num_parts), dtype=np.int64),
    )
    level.part_E[:] = part_E
    for u in range(num_sets):
        members = graph.sets_UK[u]
        size = 0
        while size < width and members[size] >= 0:
            level.count_UP[u, part_E[members[size]]] += 1
            size += 1
        for p in range(num_parts):
            if level.count_UP[u, p] == 0:
                _add_arrivals(level, graph, u, p, 1)
            else:
                _add_visits(level, graph, u, p, 1)
        for e in members[:size]:
            if level.count_UP[u, part_E[e]] == 1:
                _add_alone(level, graph, u, e, 1)
    return level


@njit(cache=True, nogil=True)
def _add_visits(level: Level, graph: Hypergraph, u: int, part: int, sign: int) -> None:
    """A token set does (sign 1) or no longer does (-1) visit a part."""
    change = sign * graph.multiplicity_U[u]
    level.visits_VP[0, part] += change
    if len(level.visits_VP) > 1:
        level.visits_VP[1 + graph.window_U[u], part] += change


@njit(cache=True, nogil=True)
def _add_arrivals(level: Level, graph: Hypergraph, u: int, part: int, sign: int) -> None:
    """Any expert of a token set would (1) or would no longer (-1) be the first of it on a part."""
    change = sign * graph.multiplicity_U[u]
    view = 1 + graph.window_U[u]
    several = len(level.arrive_VPE) > 1
    for other in graph.sets_UK[u]:
        if other < 0:
            break
        level.arrive_VPE[0, part, other] += change
        if several:
            level.arrive_VPE[view, part, other] += change


@njit(cache=True, nogil=True)
def _add_alone(level: Level, graph: Hypergraph, u: int, e: int, sign: int) -> None:
    """Expert `e` is (1) or is no longer (-1) alone on its part for a token set."""
    change = sign * graph.multiplicity_U[u]
    view = 1 + graph.window_U[u]
    several = len(level.leave_VE) > 1
    level.leave_VE[0, e] += change
    if several:
        level.leave_VE[view, e] += change
    for other in graph.sets_UK[u]:
        if other < 0:
            break
        if other != e:
            level.alone_VEE[0, e, other] += change
            level.alone_transposed_VEE[0, other, e] += change
            if several:
                level.alone_VEE[view, e, other] += change
                level.alone_transposed_VEE[view, other, e] += change


@njit(cache=True, nogil=True)
def _find_on(level: Level, members: Any, part: int, except_e: int) -> int:
    """The first expert of a set on `part`, other than `except_e`."""
    for other in members:
        if other >= 0 and other != except_e and level.part_E[other] == part:
            return int(other)
    return -1


@njit(cache=True, nogil=True)
def _move_in_set(level: Level, graph: Hypergraph, u: int, e: int, source: int, target: int) -> None:
    """Update the tables for one set whose expert `e` moves from part `source` to part `target`."""
    members = graph.sets_UK[u]
    left = level.count_UP[u, source] - 1
    there = level.count_UP[u, target]
    level.count_UP[u, source] = left
    level.count_UP[u, target] = there + 1
    if left == 0:
        _add_visits(level, graph, u, source, -1)
        _add_arrivals(level, graph, u, source, 1)
    elif left == 1:
        _add_alone(level, graph, u, _find_on(level, members, source, e), 1)
    if there == 0:
        _add_visits(level, graph, u, target, 1)
        _add_arrivals(level, graph, u, target, -1)
    elif there == 1:
        _add_alone(level, graph, u, _find_on(level, members, target, e), -1)
    if left == 0 and there > 0:
        _add_alone(level, graph, u, e, -1)
    elif left > 0 and there == 0:
        _add_alone(level, graph, u, e, 1)


@njit(cache=True, nogil=True)
def _swap_in_set(level: Level, graph: Hypergraph, u: int, a: int, b: int) -> None:
    """Update the tables for one set that holds both: counts stay, but who is alone may change."""
    alone_a = level.count_UP[u, level.part_E[a]] == 1
    alone_b = level.count_UP[u, level.part_E[b]] == 1
    if alone_a and not alone_b:
        _add_alone(level, graph, u, a, -1)
        _add_alone(level, graph, u, b, 1)
    elif alone_b and not alone_a:
        _add_alone(level, graph, u, b, -1)
        _add_alone(level, graph, u, a, 1)


@njit(cache=True, nogil=True)
def apply_swap(level: Level, graph: Hypergraph, a: int, b: int) -> None:
    """Swap experts `a` and `b` (on different parts) and bring every table up to date."""
    part_a = level.part_E[a]
    part_b = level.part_E[b]
    for first, second, source, target in ((a, b, part_a, part_b), (b, a, part_b, part_a)):
        for i in range(graph.start_E[first], graph.start_E[first + 1]):
            u = graph.member_of[i]
            both = False
            for other in graph.sets_UK[u]:
                both = both or other == second
            if not both:
                _move_in_set(level, graph, u, first, source, target)
            elif first == a:
                _swap_in_set(level, graph, u, a, b)
    level.part_E[a] = part_b
    level.part_E[b] = part_a


@njit(cache=True, nogil=True)
def visit_changes(level: Level, view: int, a: int, b: int) -> tuple[int, int]:
    """Change of visits to the part of `a` and to the part of `b` if the two swapped, in one view."""
    part_a = level.part_E[a]
    part_b = level.part_E[b]
    change_a = level.arrive_VPE[view, part_a, b] - level.leave_VE[view, a] + level.alone_VEE[view, a, b]
    change_b = level.arrive_VPE[view, part_b, a] - level.leave_VE[view, b] + level.alone_transposed_VEE[view, a, b]
    return change_a, change_b
