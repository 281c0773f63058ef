"""When every load and computation began and ended, as a Chrome trace that Perfetto opens."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coterie.files import write_text

LINK, COMPUTE, WAIT, LAYER = "link", "compute", "wait", "layer"
_TRACKS = {LAYER: 4, COMPUTE: 1, WAIT: 2, LINK: 3}
_NAME = re.compile(r"layer (\d+)(?: expert (\d+))?")


@dataclass(frozen=True)
class Span:
    """One interval.

    Attributes:
        track: "link" for a read, "compute" for an expert, "wait" for waiting for one, "layer" for a layer's experts in
            all.
        layer: MoE layer.
        expert: the expert; None for a layer.
        start: seconds, from whatever the list that it is in begins with.
        end: seconds.
        about: what else is known, as bytes and rows.
    """

    track: str
    layer: int
    expert: int | None
    start: float
    end: float
    about: Mapping[str, Any]


class Timeline:
    """Collects intervals; every thread may add some."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: list[tuple[str, str, float, float, Mapping[str, Any]]] = []

    def add(self, track: str, name: str, start: float, end: float, **about: Any) -> None:
        """One interval, from `time.perf_counter`, in seconds."""
        with self._lock:
            self._events.append((track, name, start, end, about))

    def last_token(self) -> list[Span]:
        """The latest pass through the layers: everything from where the first layer began, or was under way then.

        Times count from that beginning; what began before has a negative start. Empty when no layer has run.
        """
        with self._lock:
            events = sorted(self._events, key=lambda event: event[2])
        spans = []
        for track, name, start, end, about in events:
            found = _NAME.fullmatch(name)
            assert found is not None, "named by the link and the runtime"
            spans.append(Span(track, int(found[1]), None if found[2] is None else int(found[2]), start, end, about))
        begins = [span.start for span in spans if span.track == LAYER and span.layer == 0]
        if not begins:
            return []
        zero = begins[-1]
        return [replace(span, start=span.start - zero, end=span.end - zero) for span in spans if span.end > zero]

    def to_json(self) -> dict[str, Any]:
        """The trace, ready for JSON; times in microseconds from the first event."""
        with self._lock:
            events = sorted(self._events, key=lambda event: event[2])
        zero = events[0][2] if events else 0.0
        names = [
            {"name": "thread_name", "ph": "M", "pid": 1, "tid": number, "args": {"name": track}}
            for track, number in _TRACKS.items()
        ]
        spans = [
            {
                "name": name, "cat": track, "ph": "X", "pid": 1, "tid": _TRACKS[track],
                "ts": round((start - zero) * 1e6, 1), "dur": round((end - start) * 1e6, 1), "args": dict(about),
            }
            for track, name, start, end, about in events
        ]  # fmt: skip
        return {"traceEvents": [*names, *spans], "displayTimeUnit": "ms"}

    def write(self, path: str | Path) -> None:
        """Write the trace, whole or not at all."""
        write_text(Path(path), json.dumps(self.to_json()) + "\n")
