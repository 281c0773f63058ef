"""Who is blamed when an exchange fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import pytest

from coterie.errors import ConfigError, RankError

dist: Any = pytest.importorskip("torch.distributed")
pytestmark = pytest.mark.needs("transformers")  # the extra that brings torch
TIMED_OUT = RuntimeError("Timed out waiting 5000ms for recv operation to complete")
CLOSED = RuntimeError("Connection closed by peer [127.0.0.1]:1234")


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie.parallel.faults._GRACE_SECONDS", 0.3)


def faults(store: Any, rank: int, size: int = 3, hosted_here: bool = False) -> Any:
    from coterie.parallel.faults import Faults

    made = Faults(store, rank, size, timeout=5.0, hosted_here=hosted_here)
    made.introduce()
    return made


def elsewhere(store: Any, *ranks: int) -> None:
    """Ranks on another machine, of which the kernel says nothing."""
    for rank in ranks:
        store.set(f"here/{rank}", json.dumps(["another machine", 1]))


def test_a_rank_elsewhere_that_is_silent() -> None:
    store = dist.HashStore()
    one = faults(store, 0)
    elsewhere(store, 1, 2)
    store.set("noticed/1", "is gone")
    error = one.explain(TIMED_OUT)
    assert isinstance(error, RankError)
    assert str(error).startswith("rank 0: rank 2 did not answer within 5 s; give a longer --timeout")


def test_several_silent_ranks_are_all_named() -> None:
    store = dist.HashStore()
    one = faults(store, 0)
    elsewhere(store, 1, 2)
    assert "one of the ranks 1, 2 is gone" in str(one.explain(CLOSED))


def test_a_rank_that_left_word() -> None:
    store = dist.HashStore()
    one, other = faults(store, 0), faults(store, 1)
    elsewhere(store, 2)
    other.leave_word(ValueError("two\nlines"))
    assert "rank 0: rank 1 failed with ValueError: two lines" in str(one.explain(CLOSED))


def test_an_error_about_another_rank_is_no_word_of_ones_own() -> None:
    store = dist.HashStore()
    other = faults(store, 1)
    other.leave_word(RankError("rank 2 is gone"))
    assert not store.check(["failed/1"])
    other.leave_word(ConfigError("mine"))
    assert store.get("failed/1") == b"ConfigError: mine"


def test_a_process_of_this_machine_that_ended() -> None:
    from coterie.parallel.faults import _machine

    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    store = dist.HashStore()
    one = faults(store, 0, size=2)
    store.set("here/1", json.dumps([_machine(), child.pid]))
    assert f"rank 1 (process {child.pid}) ended" in str(one.explain(CLOSED))


def test_a_rank_that_noticed_and_ended_first_is_not_blamed() -> None:
    from coterie.parallel.faults import _machine

    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    store = dist.HashStore()
    one = faults(store, 0)
    store.set("here/1", json.dumps([_machine(), child.pid]))
    store.set("noticed/1", "is gone")
    elsewhere(store, 2)
    assert "rank 0: rank 2 is gone" in str(one.explain(CLOSED))


def test_all_noticed() -> None:
    store = dist.HashStore()
    one = faults(store, 0, size=2)
    store.set("here/1", json.dumps(["another machine", os.getpid()]))
    threading.Timer(0.1, store.set, ("noticed/1", "is gone")).start()
    assert "the connection between ranks broke" in str(one.explain(CLOSED))


@pytest.mark.parametrize(("hosted_here", "who"), [(True, "rank 0"), (False, "the launcher")])
def test_the_store_is_lost_too(hosted_here: bool, who: str) -> None:
    class Lost:
        def set(self, *_: Any) -> None:
            raise RuntimeError("Broken pipe")

        set_timeout = set

    from coterie.parallel.faults import Faults

    one = Faults(Lost(), 1, 2, 5.0, hosted_here)
    one.leave_word(ValueError("nobody hears it"))
    assert f"rank 1: {who} ended, and the group with it" in str(one.explain(CLOSED))


def test_it_does_not_take_long() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=5))
    one = faults(store, 0)
    elsewhere(store, 1, 2)
    started = time.monotonic()
    one.explain(CLOSED)
    assert time.monotonic() - started < 20


def test_who_keeps_the_store_stays_until_the_others_have_read_it() -> None:
    """Rank 1 failed; rank 0 knows at once, and rank 2 reads why a little later."""
    store, ended = dist.HashStore(), []
    keeper, late = faults(store, 0, hosted_here=True), faults(store, 2)
    elsewhere(store, 1)
    store.set("failed/1", "OSError: disk full")
    assert "rank 1 failed with OSError: disk full" in str(keeper.explain(CLOSED))
    staying = threading.Thread(target=lambda: ended.append(keeper.stay()))
    staying.start()
    time.sleep(0.1)
    assert not ended, "rank 0 ended before rank 2 had read"
    assert "rank 1 failed with OSError: disk full" in str(late.explain(CLOSED))
    store.set("explained/1", "is gone")
    staying.join(timeout=0.2)
    assert ended
    began = time.monotonic()
    late.stay()
    assert time.monotonic() - began < 0.1, "the others go at once"
