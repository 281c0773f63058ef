"""Which rank is to blame when an exchange fails: what ranks left in the store, what the kernel says of processes."""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from coterie.errors import RankError

_GRACE_SECONDS = 3.0  # to hear from ranks on other machines, which notice a fault at about the same time
_POLL_SECONDS = 0.02


class Faults:
    """One rank's view of the others, by way of the store where they met.

    Args:
        store: where ranks leave word; values are bytes.
        rank: this one.
        size: how many there are.
        timeout: seconds that an exchange waits, for messages.
        hosted_here: whether rank 0 keeps the store, so that it is lost with rank 0.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: float, hosted_here: bool) -> None:
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout
        self._hosted_here = hosted_here

    def introduce(self) -> None:
        """Tell the others who this is: the process, and on which machine its number means something."""
        self._store.set(f"here/{self._rank}", json.dumps([_machine(), os.getpid()]))

    def leave_word(self, error: BaseException) -> None:
        """Tell the others why this rank ends; nothing where the store is gone too."""
        if isinstance(error, RankError):
            return  # about another rank, which they hear of as well
        text = " ".join(str(error).split())[:300]
        try:
            self._store.set(f"failed/{self._rank}", f"{type(error).__name__}: {text}" if text else type(error).__name__)
        except RuntimeError:
            return

    def explain(self, error: BaseException) -> RankError:
        """The error for an exchange that failed, within a few seconds."""
        timed_out = "imed out" in str(error)
        how = f"did not answer within {self._timeout:g} s" if timed_out else "is gone"
        remedy = "give a longer --timeout if it is only slow" if timed_out else "its own output says why"
        try:
            told = RankError(f"rank {self._rank}: {self._culprit(how)}; {remedy}, then start again")
        except RuntimeError:  # the store went with the rank that keeps it
            whose = "rank 0" if self._hosted_here else "the launcher"
            return RankError(f"rank {self._rank}: {whose} ended, and the group with it; its own output says why")
        with suppress(RuntimeError):
            self._store.set(f"explained/{self._rank}", how)
        return told

    def stay(self) -> None:
        """On the rank that keeps the store: until the others have read what they need there, or cannot any more."""
        if self._rank or not self._hosted_here:
            return
        end, others = time.monotonic() + _GRACE_SECONDS, list(range(1, self._size))
        with suppress(RuntimeError):
            self._store.set_timeout(timedelta(seconds=_GRACE_SECONDS))
            people = {rank: json.loads(self._store.get(f"here/{rank}")) for rank in others}
            while others and time.monotonic() < end:
                others = [rank for rank in others if not self._has_read(rank, *people[rank])]
                time.sleep(_POLL_SECONDS if others else 0)

    def _has_read(self, rank: int, machine: str, pid: int) -> bool:
        explained: bool = self._store.check([f"explained/{rank}"])
        return explained or _state(machine, pid) is not None

    def _culprit(self, how: str) -> str:
        """Who failed, in words."""
        self._store.set_timeout(timedelta(seconds=_GRACE_SECONDS))
        self._store.set(f"noticed/{self._rank}", how)
        others = [rank for rank in range(self._size) if rank != self._rank]
        people = {rank: json.loads(self._store.get(f"here/{rank}")) for rank in others}
        end = time.monotonic() + _GRACE_SECONDS
        silent = others
        while silent and time.monotonic() < end:
            for rank in others:
                if self._store.check([f"failed/{rank}"]):
                    return f"rank {rank} failed with {self._store.get(f'failed/{rank}').decode()}"
                state = _state(*people[rank])
                if state is not None and not self._store.check([f"noticed/{rank}"]):
                    return f"rank {rank} (process {people[rank][1]}) {state}"
            silent = [rank for rank in others if not self._store.check([f"noticed/{rank}"])]
            time.sleep(_POLL_SECONDS)
        if not silent:
            return f"the connection between ranks broke, and another rank {how}"
        return f"{_ranks(silent)} {how}"


def _machine() -> str:
    """Where process numbers are the same processes."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _state(machine: str, pid: int) -> str | None:
    """What the kernel says of a process of this machine that can not go on; None: nothing, or it is elsewhere."""
    if not machine or machine != _machine():
        return None
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return "ended"
    return {"Z": "ended", "X": "ended", "T": "is stopped", "t": "is stopped"}.get(state)


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"one of the ranks {', '.join(map(str, ranks))}"
