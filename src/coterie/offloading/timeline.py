"""When every load and computation began and ended, as a Chrome trace that Perfetto opens."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coterie.files import write_text

LINK, COMPUTE, WAIT = "link", "compute", "wait"
_TRACKS = {COMPUTE: 1, WAIT: 2, LINK: 3}


class Timeline:
    """Collects intervals; every thread may add some."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: list[tuple[str, str, float, float, Mapping[str, Any]]] = []

    def add(self, track: str, name: str, start: float, end: float, **about: Any) -> None:
        """One interval, from `time.perf_counter`, in seconds."""
        with self._lock:
            self._events.append((track, name, start, end, about))

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
