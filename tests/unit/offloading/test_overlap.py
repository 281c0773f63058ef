"""What load time is hidden and what is waited for, on a link whose reads end when the test says so."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from coterie.offloading.stats import OffloadStats

pytestmark = pytest.mark.needs("transformers")


class Gated:
    """Reads wait for their turn; what happens is written down in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from coterie.offloading.flights import Flights
        from coterie.offloading.link import Link
        from coterie.offloading.runtime import Runtime

        self.events: list[str] = []
        self.opened: dict[str, threading.Event] = {}
        read, wait, compute = Link._read_retrying, Flights.wait_for, Runtime._compute

        def gated_read(link: Any, each: Any, *where: Any) -> None:
            name = f"{each.load.layer}.{each.load.expert}"
            assert self.opened[name].wait(20)
            read(link, each, *where)
            self.events.append(f"read {name}")

        def told_wait(flights: Any, layer: int, expert: int, blocks: int | None = None) -> None:
            name = f"{layer}.{expert}"
            if not flights.idle and not self.opened[name].is_set():
                self.events.append(f"wait {name}")
                threading.Timer(0.05, self.opened[name].set).start()
            wait(flights, layer, expert, blocks)

        def told_compute(runtime: Any, visit: Any, job: Any) -> None:
            self.events.append(f"compute {visit.layer}.{job.expert}")
            for opened in self.opened.values():  # whatever is still to come is read while this computes
                opened.set()
            until = time.monotonic() + 20
            while not runtime._flights.idle and time.monotonic() < until:
                time.sleep(0.001)
            compute(runtime, visit, job)

        monkeypatch.setattr(Link, "_read_retrying", gated_read)
        monkeypatch.setattr(Flights, "wait_for", told_wait)
        monkeypatch.setattr(Runtime, "_compute", told_compute)


def test_a_read_under_computation_is_hidden_and_the_first_is_not(
    small: Any, offload: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two experts of one layer miss: the first is waited for, the second arrives while the first computes."""
    import torch

    from coterie.models.layers import find_moe_layers

    model, gated = offload("100%", schedule="fifo", threads=1), Gated(monkeypatch)
    gated.opened.update({"0.3": threading.Event(), "0.5": threading.Event()})
    forward = find_moe_layers(model)[0].experts.forward
    hidden, ids, weights = torch.randn(1, 64), torch.tensor([[3, 5]]), torch.tensor([[0.6, 0.4]])
    with torch.inference_mode():
        forward(hidden, ids, weights)
    stats = model.stats()
    assert gated.events == ["wait 0.3", "read 0.3", "compute 0.3", "read 0.5", "compute 0.5"]
    assert stats.exposed_seconds > 0.04, "the first read is waited for, as long as it was held back"
    assert stats.load_seconds > stats.exposed_seconds, "the second is not"
    assert 0 < stats.overlap < 1
    with torch.inference_mode():
        forward(hidden, ids, weights)
    again = model.stats().since(stats)
    assert (again.hits, again.misses, again.load_seconds, again.exposed_seconds) == (2, 0, 0, 0)
    assert (again.overlap, again.attainable_overlap) == (1, 1)
    assert again.compute_seconds > 0
    assert again.coordination_seconds > 0
    assert again.lookup_seconds > 0


def test_overlap_by_hand() -> None:
    half = OffloadStats("lru", "fifo", 1, load_seconds=4.0, exposed_seconds=3.0, compute_seconds=2.0)
    assert (half.overlap, half.attainable_overlap) == (0.25, 0.5)
    hidden = OffloadStats("lru", "fifo", 1, load_seconds=4.0, exposed_seconds=0.0, compute_seconds=9.0)
    assert (hidden.overlap, hidden.attainable_overlap) == (1.0, 1.0)
    late = OffloadStats("lru", "fifo", 1, load_seconds=1.0, exposed_seconds=1.2)
    assert late.overlap == 0.0, "waiting for a thread is no negative overlap"
    assert half.since(hidden).compute_seconds == -7.0
