"""Memory given back little by little, as reads need its room."""

from __future__ import annotations

from typing import Any

from coterie.offloading.evictions import Evictions


class Told:
    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int]] = []

    def evict(self, layer: int, expert: int, blocks: int) -> None:
        self.calls.append((layer, expert, blocks))


def test_every_read_makes_its_own_room_from_the_tails() -> None:
    memory: Any = Told()
    held = {(0, 3): 4, (1, 5): 2}
    evictions = Evictions(memory, [(0, 3, 1), (1, 5, 0)], held)
    first, second, third = (evictions.room(2) for _ in range(3))
    assert memory.calls == []
    second()  # whichever thread comes first
    first()
    assert memory.calls == [(0, 3, 1), (1, 5, 1), (0, 3, 2)]
    third()
    assert memory.calls[3:] == [(1, 5, 0)]
    assert held == {(0, 3): 1, (1, 5): 0}
    assert evictions.experts == {(0, 3), (1, 5)}


def test_what_no_read_takes_is_given_back_in_the_end() -> None:
    memory: Any = Told()
    evictions = Evictions(memory, [(0, 0, 0)], {(0, 0): 3})
    evictions.room(1)()
    evictions.finish()
    assert memory.calls == [(0, 0, 2), (0, 0, 0)]


def test_an_expert_whose_memory_is_not_known_goes_at_once() -> None:
    memory: Any = Told()
    Evictions(memory, [(0, 7, 2)], {}).room(1)()
    assert memory.calls == [(0, 7, 2)]
