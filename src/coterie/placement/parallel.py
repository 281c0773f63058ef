"""The layers of a model are independent: work on several at a time."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

from coterie.progress import Progress

Result = TypeVar("Result")


def map_layers(function: Callable[[int], Result], num_layers: int, what: str, progress: Progress) -> list[Result]:
    """`function(layer)` for every layer, in order, on as many threads as there are cores.

    Threads, since the kernels release the interpreter's lock. An error or Ctrl-C drops the layers not yet begun.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    pool = ThreadPoolExecutor(max_workers=min(cores, num_layers))
    try:
        futures = [pool.submit(function, layer) for layer in range(num_layers)]
        for done, future in enumerate(as_completed(futures)):
            future.result()
            progress(what, done + 1, num_layers)
        return [future.result() for future in futures]
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
