"""Which tokens of SGLang's batches belong together, told from lengths, positions and the order within batches.

Recordings hold no request ids. A batch that extends says how many tokens of each request it takes; a batch that
decodes has one token of each running request, in the order in which they were extended.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coterie.trace.routing_trace import DECODE, PREFILL

EXTEND_BATCH, DECODE_BATCH, MIXED_BATCH = 1, 2, 3
"""SGLang's ForwardMode values that this understands."""


@dataclass
class _Request:
    sequence: int
    next_position: int


class SequenceTracker:
    """Follows the running requests of one rank from batch to batch."""

    def __init__(self, new_sequence: Callable[[], int]) -> None:
        self._new_sequence = new_sequence
        self._running: list[_Request] = []
        self._last_extended: _Request | None = None

    def label(self, mode: int, lengths: Sequence[int] | None, positions: Sequence[int]) -> tuple[list[int], list[int]]:
        """Sequence and phase of each token of the next batch.

        Args:
            mode: one of the three known forward modes.
            lengths: of an extending batch, the tokens of each request; they may leave padding at the end.
            positions: of each token in its request.
        """
        if mode == DECODE_BATCH or lengths is None:
            return self._decode(positions), [DECODE] * len(positions)
        sequences: list[int] = []
        phases: list[int] = []
        waiting = self._by_position() if mode == MIXED_BATCH else {}
        for index, length in enumerate(lengths):
            first = len(sequences)
            start = positions[first] if length else 0
            decoding = waiting[start].popleft() if length == 1 and waiting.get(start) else None
            request = decoding or self._extended(start, index == 0)
            request.next_position = start + length
            sequences += [request.sequence] * length
            phases += [PREFILL if decoding is None else DECODE] * length
        padding = len(positions) - len(sequences)
        if padding:
            sequences += [self._new_sequence()] * padding
            phases += [PREFILL] * padding
        return sequences, phases

    def _extended(self, start: int, first_in_batch: bool) -> _Request:
        """The request whose prompt is next in an extending batch: a chunk of the last one, or a new one."""
        last = self._last_extended
        if not (first_in_batch and last is not None and start > 0 and last.next_position == start):
            last = _Request(self._new_sequence(), start)
            self._running.append(last)
        self._last_extended = last
        return last

    def _decode(self, positions: Sequence[int]) -> list[int]:
        waiting = self._by_position()
        running = []
        for position in positions:
            known = waiting[position]
            request = known.popleft() if known else _Request(self._new_sequence(), position)
            request.next_position = position + 1
            running.append(request)
        chunked = self._last_extended  # its prompt may still be on its way, between batches that decode
        if chunked is not None and all(request is not chunked for request in running):
            running.append(chunked)
        self._running = running
        return [request.sequence for request in running[: len(positions)]]

    def _by_position(self) -> dict[int, deque[_Request]]:
        waiting: dict[int, deque[_Request]] = defaultdict(deque)
        for request in self._running:
            waiting[request.next_position].append(request)
        return waiting
