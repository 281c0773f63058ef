"""Layers on threads: order, errors, and stopping early."""

from __future__ import annotations

import threading
import time

import pytest

from coterie.placement.parallel import map_layers
from coterie.progress import silent


def test_results_come_in_order_and_progress_counts_up() -> None:
    heard: list[tuple[str, int, int]] = []

    def work(layer: int) -> int:
        time.sleep(0.01 * (5 - layer))  # the first layer is the last to finish
        return layer * layer

    def listen(what: str, done: int, total: int) -> None:
        heard.append((what, done, total))

    assert map_layers(work, 5, "squaring", listen) == [0, 1, 4, 9, 16]
    assert heard == [("squaring", done, 5) for done in range(1, 6)]


def test_an_error_comes_out_and_stops_the_rest() -> None:
    begun = []

    def work(layer: int) -> int:
        begun.append(layer)
        if layer == 1:
            raise ValueError("layer 1 is bad")
        time.sleep(0.01)
        return layer

    with pytest.raises(ValueError, match="layer 1 is bad"):
        map_layers(work, 500, "working", silent)
    assert len(begun) < 500


def test_an_interrupt_leaves_no_work_behind() -> None:
    """Ctrl-C arrives in the thread that waits: what was begun ends, what was not is dropped."""
    begun, ended, release = [], [], threading.Event()

    def work(layer: int) -> int:
        begun.append(layer)
        if layer > 0:
            release.wait(5)
        time.sleep(0.005)  # so that the rest cannot all run before it is dropped
        ended.append(layer)
        return layer

    def interrupt(what: str, done: int, total: int) -> None:
        release.set()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        map_layers(work, 500, "working", interrupt)
    assert sorted(begun) == sorted(ended)
    assert len(begun) < 500
    count = len(begun)
    time.sleep(0.05)
    assert len(begun) == count
