"""In which order one layer's experts are loaded and computed.

Each expert is a job on two machines in series: the link takes `load` (0 where it is resident), then the processor takes
`compute`; both take jobs in one order. What is resident can compute at once, so every order puts it first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import unknown_name

Schedule = Callable[[NDArray[Any], NDArray[Any], NDArray[Any]], NDArray[np.int64]]
"""(load [N], compute [N], widths [N]) -> the order of the jobs, [N] int64 indices."""


def fifo(load_N: NDArray[Any], compute_N: NDArray[Any], widths_N: NDArray[Any]) -> NDArray[np.int64]:
    """As the router gave them."""
    return np.argsort(np.asarray(load_N) > 0, kind="stable")


def widest_first(load_N: NDArray[Any], compute_N: NDArray[Any], widths_N: NDArray[Any]) -> NDArray[np.int64]:
    """Wider experts first: their computation hides the loads that follow. Source: CRISP section 3.4.1."""
    return np.lexsort((-np.asarray(widths_N), np.asarray(load_N) > 0))


def johnson(load_N: NDArray[Any], compute_N: NDArray[Any], widths_N: NDArray[Any]) -> NDArray[np.int64]:
    """No order ends sooner: loads shorter than their computation by rising load, the others by falling computation.

    Source: Johnson, Optimal two- and three-stage production schedules with setup times included, 1954; beyond the
    paper.
    """
    load, compute = np.asarray(load_N), np.asarray(compute_N)
    hides = load <= compute
    return np.lexsort((np.where(hides, load, -compute), ~hides))


SCHEDULES: dict[str, Schedule] = {"fifo": fifo, "widest-first": widest_first, "johnson": johnson}


def get_schedule(name: str) -> Schedule:
    """The schedule of this name.

    Raises:
        ConfigError: for an unknown name, with the nearest known one.
    """
    if name not in SCHEDULES:
        raise unknown_name("schedule", name, SCHEDULES)
    return SCHEDULES[name]


def makespan(load_N: NDArray[Any], compute_N: NDArray[Any], order_N: NDArray[Any]) -> float:
    """When the last job has computed.

    Args:
        load_N: [N] load times, any unit.
        compute_N: [N] compute times, the same unit.
        order_N: [N] the order of the jobs.

    Returns:
        the time from the start of the first load; 0 without jobs.
    """
    loaded = done = 0.0
    for job in order_N:
        loaded += float(load_N[job])
        done = max(done, loaded) + float(compute_N[job])
    return done
