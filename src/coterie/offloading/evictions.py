"""Memory given back little by little: every read first makes just the room that it takes, in the thread that reads.

Giving back the pages of large experts takes milliseconds. All of them at once, before anything is read, would keep the
link idle; like this, one read's room is made while another read is under way, and the ceiling holds at every moment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping

from coterie.offloading.memory import Memory

Key = tuple[int, int]
"""(layer, expert)."""


class Evictions:
    """What one decision evicts, to be shared out among its reads, block by block.

    Args:
        memory: where the blocks are.
        evicted: (layer, expert, blocks of it that stay).
        held: blocks of each expert that have memory; brought up to date. Of one that is not there everything beyond
            what stays is given back at once.
    """

    def __init__(self, memory: Memory, evicted: Iterable[tuple[int, int, int]], held: dict[Key, int]) -> None:
        self._memory = memory
        self._blocks: deque[tuple[int, int, int]] = deque()
        self.experts: set[Key] = set()
        for layer, expert, stay in evicted:
            before = held.get((layer, expert), stay + 1)
            self._blocks.extend((layer, expert, each) for each in range(before - 1, stay - 1, -1))
            self.experts.add((layer, expert))
            held[layer, expert] = stay

    def room(self, blocks: int) -> Callable[[], None]:
        """What makes room for so many blocks, or for as many as are left."""
        lowest: dict[Key, int] = {}
        for _ in range(min(blocks, len(self._blocks))):
            layer, expert, stay = self._blocks.popleft()
            lowest[layer, expert] = stay  # from the tail: the last one is the lowest
        return lambda: self._give_back(lowest)

    def finish(self) -> None:
        """Give back what no read took."""
        self.room(len(self._blocks))()

    def _give_back(self, lowest: Mapping[Key, int]) -> None:
        for (layer, expert), stay in lowest.items():
            self._memory.evict(layer, expert, stay)
