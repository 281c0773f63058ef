"""What the next layer will probably need, to be read while the link has nothing else to do."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from coterie.offloading.visit import Visit
from coterie.policies.cache import ExpertCache
from coterie.policies.prefetch import NextLayer

_SWEEP_ROWS, _SWEEP = 8, 0.75  # slots per expert, more than which are a prompt's; and share of experts that they use
_LIKELY = 0.5  # 0.3 gains the same, and reads more (event simulation on three models' earlier halves)
_REMEMBERED = 0.8  # of how long the link is idle, from one layer to the next


def sweeps(visit: Visit, num_experts: int) -> bool:
    """Whether a visit uses so many of its layer's experts that the next one will use most, as prompts do."""
    return sum(visit.rows) > _SWEEP_ROWS * num_experts and len(visit.need) >= _SWEEP * num_experts


def next_of_sweep(visit: Visit, cache: ExpertCache, layer: int) -> tuple[int, int] | None:
    """The next layer's expert to be read: the one worth most to the policy, as wide as all of this one's, or the room.

    Args:
        visit: this layer's.
        cache: knows what is there.
        layer: the next one.

    Returns:
        The expert and how many of its first blocks; None when all are there.
    """
    room = cache.budget_blocks - int(cache.pinned_LE.sum())
    blocks = min(*visit.need.values(), room)
    short_N = np.flatnonzero(cache.reserved_LE[layer] < blocks)
    if not len(short_N):
        return None
    worth_N = cache.policy.score_LEB[layer, short_N, 0]
    return int(short_N[worth_N.argmax()]), blocks


class Ahead:
    """Learns online which experts follow, and names the likeliest that is not resident.

    Only as much is read of it as the link manages before the layer is known: a wrong guess then delays the right reads
    little, and evicts little. Without that limit reading ahead costs more than it hides.

    Source: beyond the paper.
    """

    def __init__(self, cache: ExpertCache) -> None:
        shape = cache.shape
        self._cache = cache
        self._guess = NextLayer(shape.num_layers, shape.num_experts)
        self._chance_E: NDArray[np.float64] = np.zeros(shape.num_experts)
        self._blocks_LE = np.zeros((shape.num_layers, shape.num_experts), np.int64)  # as wide as never run: not wanted
        self._idle_since, self._idle_seconds = math.inf, 0.0

    def observe(self, layer: int, need_E: NDArray[np.int32]) -> None:
        """A layer runs so many blocks of each expert; layers come in order."""
        experts_N = np.flatnonzero(need_E)
        self._chance_E = self._guess.observe(layer, experts_N)
        self._blocks_LE[layer, experts_N] = need_E[experts_N]

    def idle_from(self, when: float) -> None:
        """A layer's own reads have ended, at `when` of `time.perf_counter`."""
        self._idle_since = min(self._idle_since, when)

    def idle_until(self, when: float) -> None:
        """The next layer asks for its own."""
        if when > self._idle_since:
            now = when - self._idle_since
            self._idle_seconds = _REMEMBERED * self._idle_seconds + (1 - _REMEMBERED) * now
        self._idle_since = math.inf

    def worth_reading(self, bytes_per_second: float, block_bytes: int) -> int:
        """Blocks that the link reads while it is usually idle, at least one: what a wrong guess may cost."""
        return max(1, math.ceil(self._idle_seconds * bytes_per_second / block_bytes))

    def wanted(self, layer: int, most: int) -> tuple[int, int] | None:
        """The likeliest expert of the next layer that is not resident as wide as when it last ran, and how wide to be.

        At most `most` blocks are missing of that width.
        """
        resident_E = self._cache.reserved_LE[layer]
        chance_E = np.where(resident_E < self._blocks_LE[layer], self._chance_E, 0.0)
        expert = int(chance_E.argmax())
        if chance_E[expert] < _LIKELY:
            return None
        return expert, min(int(self._blocks_LE[layer, expert]), int(resident_E[expert]) + most)
