"""Ranks as processes: the exchange on torch.distributed, and joining the group that a launcher started."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from coterie.errors import ConfigError, CoterieError, RankError
from coterie.parallel.comms import Comms, share
from coterie.parallel.faults import Faults

Result = TypeVar("Result")
_stores: Any = dist  # which exports stores without saying so
_POLL_SECONDS, _LINGER_SECONDS = 0.05, 1.0
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class ToldByRankZero(CoterieError):
    """An error that rank 0 has too, and tells: the others end quietly with the same exit code."""


class ProcessComms:
    """One rank of a group of processes; see `Comms`. Made by `joined`."""

    def __init__(self, rank: int, size: int, device: torch.device, faults: Faults) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.sent_bytes_G = [0] * size
        self._faults = faults

    def exchange(
        self, send_NB: Tensor, send_counts: Sequence[int], receive_NB: Tensor, receive_counts: Sequence[int]
    ) -> None:
        """See `Comms.exchange`."""
        if self.size == 1:
            return
        row_bytes = send_NB[:1].numel() * send_NB.element_size()
        for rank, count in enumerate(send_counts):
            self.sent_bytes_G[rank] += count * row_bytes
        try:
            if self.device.type == "cuda":
                dist.all_to_all_single(receive_NB, send_NB, list(receive_counts), list(send_counts))
            else:
                _exchange_pairs(send_NB, send_counts, receive_NB, receive_counts)
        except RuntimeError as error:
            told = self._faults.explain(error)
            error.__traceback__ = None  # its frames hold the group, whose connections tell others by closing
            raise told from error


def _exchange_pairs(
    send_NB: Tensor, send_counts: Sequence[int], receive_NB: Tensor, receive_counts: Sequence[int]
) -> None:
    """`all_to_all_single` as single messages on gloo, with all receives posted before the first send.

    A gloo rank starts to send when it hears that the receive is posted. In gloo's own all-to-all that word queues
    behind the rows on their way in the other direction, so that a pair of ranks uses its link one way at a time: with
    two ranks 12 to 15 MB/s on a link limited to 25 MB/s each way, in this order 22 to 24. Ranks take turns as
    receivers, each beginning with its neighbour.
    """
    size, own = len(send_counts), dist.get_rank()
    parts: Any = torch.split  # untyped in torch
    arriving, leaving = parts(receive_NB, list(receive_counts)), parts(send_NB, list(send_counts))
    turns = range(1, size)
    works = [
        dist.irecv(arriving[(own - i) % size], (own - i) % size) for i in turns if receive_counts[(own - i) % size]
    ]
    works += [dist.isend(leaving[(own + i) % size], (own + i) % size) for i in turns if send_counts[(own + i) % size]]
    for work in works:
        assert work is not None, "this rank is in the group"
        work.wait()


@dataclass(frozen=True)
class Launch:
    """What a launcher says in the environment.

    Attributes:
        rank: this process.
        size: processes in all.
        host: where the group meets.
        port: there.
        hosted: whether the launcher keeps the meeting place (torchrun does), not rank 0.
        attempt: how often the launcher has started the group before.
    """

    rank: int
    size: int
    host: str
    port: int
    hosted: bool
    attempt: str

    @classmethod
    def of_environment(cls) -> Launch:
        """From torchrun's variables.

        Raises:
            ConfigError: when they are missing or wrong.
        """
        missing = [name for name in _VARIABLES if not os.environ.get(name)]
        if missing:
            raise ConfigError(
                f"{missing[0]} is not set: this runs in several processes; start it with "
                "torchrun --nproc-per-node N -m coterie ..."
            )
        try:
            rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        except ValueError as error:
            raise ConfigError(f"{error} in {', '.join(_VARIABLES)}; start the processes with torchrun") from None
        if not 0 <= rank < size:
            raise ConfigError(f"RANK = {rank} and WORLD_SIZE = {size}: ranks run from 0; start them with torchrun")
        hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return cls(rank, size, os.environ["MASTER_ADDR"], port, hosted, attempt)


@contextmanager
def joined(launch: Launch, timeout: float = 60.0) -> Iterator[ProcessComms]:
    """The group of all ranks, while the block runs: NCCL where there is a GPU for this rank, else gloo.

    An error that leaves the block is left for the other ranks to read, which would wait for this one.

    Args:
        launch: from `Launch.of_environment`.
        timeout: seconds to wait for ranks that are missing, and for an answer of one that is there.

    Raises:
        ConfigError: when the port is taken, or the timeout is not positive.
        RankError: when ranks are missing.
        ToldByRankZero: the same, where rank 0 tells it.
    """
    if not 1 <= timeout < 1e6:
        message = f"timeout = {timeout:g}; give seconds, at least 1"
        raise ToldByRankZero(message) if launch.rank else ConfigError(message)
    store = _meet(launch, timeout)
    faults = Faults(store, launch.rank, launch.size, timeout, hosted_here=not launch.hosted)
    faults.introduce()
    _await_all(launch, store, timeout)
    device = _device()
    try:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", store=_stores.PrefixStore("group", store), rank=launch.rank,
            world_size=launch.size, timeout=timedelta(seconds=timeout),
        )  # fmt: skip
    except RuntimeError as error:
        raise faults.explain(error) from error
    try:
        yield ProcessComms(launch.rank, launch.size, device, faults)
    except ToldByRankZero:
        _leave()
        raise
    except BaseException as error:
        faults.leave_word(error)
        _leave()  # whoever waits for this rank notices, and looks in the store why
        faults.stay()
        raise
    _leave()


def _leave() -> None:
    with suppress(RuntimeError):
        dist.destroy_process_group()


def agreed(comms: Comms, step: Callable[[], Result]) -> Result:
    """What `step` returns, once it has gone well on every rank; else one error, told by rank 0.

    Raises:
        CoterieError: on rank 0, its own error or the first of another rank.
        ToldByRankZero: on the others.
    """
    result, failure = None, None
    try:
        result = step()
    except (CoterieError, OSError) as error:
        failure = error
    told = share(comms, None if failure is None else str(failure))
    first = next((rank for rank, text in enumerate(told) if text is not None), None)
    if first is None:
        return result  # type: ignore[return-value]
    if comms.rank:
        raise ToldByRankZero(told[first])
    raise failure or RankError(f"rank {first}: {told[first]}")


def _meet(launch: Launch, timeout: float) -> Any:
    """The store where ranks find one another."""
    keeps = launch.rank == 0 and not launch.hosted
    if not keeps:
        _await_listener(launch, timeout)
    try:
        store = _stores.TCPStore(
            launch.host, launch.port, is_master=keeps,
            timeout=timedelta(seconds=timeout), wait_for_workers=False,
        )  # fmt: skip
    except (RuntimeError, OSError) as error:
        if keeps and "in use" in str(error):
            raise ConfigError(f"port {launch.port} is taken; choose another one with --master-port") from error
        raise _no_group(launch, timeout, error) from error
    return _stores.PrefixStore(f"coterie/{launch.attempt}", store)


def _await_listener(launch: Launch, timeout: float) -> None:
    """Wait until something listens where the group meets: torch's own client waits much longer than it is told."""
    end = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((launch.host, launch.port), timeout=1.0).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise _no_group(launch, timeout, error) from error
            time.sleep(_POLL_SECONDS)


def _no_group(launch: Launch, timeout: float, error: Exception) -> RankError:
    return RankError(
        f"rank {launch.rank} finds no group at {launch.host}:{launch.port} within {timeout:g} s ({_line(error)}); is "
        "rank 0 running, and are --master-addr and --master-port the same everywhere?"
    )


def _await_all(launch: Launch, store: Any, timeout: float) -> None:
    """Wait until every rank has introduced itself."""
    keys = [f"here/{rank}" for rank in range(launch.size)]
    try:
        store.wait(keys, timedelta(seconds=timeout))
    except RuntimeError as error:
        try:
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        except RuntimeError:
            raise RankError(f"rank {launch.rank}: rank 0 ended while others were missing; start all again") from error
        if launch.rank == 0:
            time.sleep(_LINGER_SECONDS)  # the store goes with this process, and the others want to read it
        names = f"rank {missing[0]} is" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))} are"
        message = (
            f"{names} missing after {timeout:g} s, of {launch.size} that were asked for; start every rank, or give a "
            "longer --timeout"
        )
        raise (ToldByRankZero if launch.rank and 0 not in missing else RankError)(message) from error


def _device() -> torch.device:
    """A GPU of this rank's own, if there is one for each local rank; else the CPU."""
    local, local_size = (int(os.environ.get(name, "0")) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if local_size and torch.cuda.device_count() >= local_size:
        return torch.device("cuda", local)
    return torch.device("cpu")


def _line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200]
