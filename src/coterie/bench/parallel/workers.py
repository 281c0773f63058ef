"""The ranks of the parallel benchmark, seen from the benchmark: started, asked, and ended whatever happens."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import IO, Any

from coterie.bench.parallel.network import Network
from coterie.errors import RankError

ANSWER_SECONDS = 300.0
_START_SECONDS = 120.0
_PORT = "29531"


@contextmanager
def workers(network: Network) -> Iterator[Workers]:
    """One worker in each namespace, joined to a group; all are ended when the block ends.

    Raises:
        RankError: when one does not start.
    """
    made = Workers(network)
    try:
        made.start()
        yield made
    finally:
        made.stop()


class Workers:
    """What `workers` yields."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._processes: list[subprocess.Popen[str]] = []
        self._errors: list[IO[str]] = []

    def start(self) -> None:
        """Start all, and wait until they have found one another."""
        size = self._network.topology.num_devices
        for rank in range(size):
            said = {
                "RANK": f"{rank}", "WORLD_SIZE": f"{size}", "MASTER_ADDR": self._network.address(0),
                "MASTER_PORT": _PORT, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by stop()
            self._errors.append(errors)
            command = [sys.executable, "-m", "coterie.bench.parallel.worker"]
            self._processes.append(self._network.start(rank, command, {**os.environ, **said}, errors))
        self._answers(_START_SECONDS)

    def ask(self, message: Mapping[str, Any], seconds: float = ANSWER_SECONDS) -> list[dict[str, Any]]:
        """Give every worker the same line; their answers, by rank.

        Raises:
            RankError: when one ended, failed, or did not answer in time.
        """
        for rank, process in enumerate(self._processes):
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps(message) + "\n")
                process.stdin.flush()
            except BrokenPipeError:
                raise self._lost(rank) from None
        return self._answers(seconds)

    def stop(self) -> None:
        """End all: first by telling them that nothing more comes."""
        for process in self._processes:
            with suppress(OSError):
                assert process.stdin is not None
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(3.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()
        for errors in self._errors:
            errors.close()

    def _answers(self, seconds: float) -> list[dict[str, Any]]:
        end = time.monotonic() + seconds
        found = []
        for rank, process in enumerate(self._processes):
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise RankError(f"rank {rank} of the benchmark did not answer within {seconds:g} s; run it again")
            line = process.stdout.readline()
            answer = json.loads(line) if line.endswith("\n") else None
            if answer is None:
                raise self._lost(rank)
            if "error" in answer:
                raise RankError(str(answer["error"]))
            found.append(answer)
        return found

    def _lost(self, rank: int) -> RankError:
        """The error for a worker that ended without a word; its last one on stderr."""
        self._errors[rank].seek(0)
        last = ["", *self._errors[rank].read().strip().splitlines()][-1]
        return RankError(f"rank {rank} of the benchmark ended{f': {last}' if last else ''}; run it again")
