"""An accelerator, as little of it as offloading needs: memory, copies on a stream of their own, events between them.

Experimental: `CudaDevice` has not run on a GPU yet. What uses it is tested with a device whose copies complete late.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch
from torch import Tensor

from coterie.checkpoint.store_layout import ALIGNMENT
from coterie.errors import BackendUnavailable, BudgetError, CheckpointError, ConfigError
from coterie.units import format_bytes

_CUDA: Any = torch.cuda  # not all of it is typed
_POLL_SECONDS = 50e-6


class Event(Protocol):
    """A point in a stream of work."""

    def done(self) -> bool:
        """Whether the work before it has ended."""


class Device(Protocol):
    """Two streams of work, each in its own order: computations, which the caller's thread issues, and copies.

    Attributes:
        where: the torch device.
    """

    where: torch.device

    def free_bytes(self) -> int:
        """Memory that can be taken on it."""

    def empty(self, nbytes: int) -> Tensor:
        """Memory on it, [nbytes] uint8."""

    def pinned(self, nbytes: int) -> Tensor:
        """Memory of the host that copies can be made from while other work goes on, [nbytes] uint8, aligned."""

    def copy(self, into: Tensor, source: Tensor) -> Event:
        """Issue a copy, from any thread; the event is behind it."""

    def computed(self) -> Event:
        """An event behind all computations issued so far."""

    def copy_after(self, event: Event) -> None:
        """Copies issued from now on begin when the event is done; nothing waits here."""

    def compute_after(self, event: Event) -> None:
        """Computations issued from now on begin when the event is done; nothing waits here."""


def wait_for(event: Event, timeout: float) -> None:
    """Wait for an event, at most `timeout` seconds.

    Raises:
        CheckpointError: when it does not come in time.
    """
    until = time.monotonic() + timeout
    while not event.done():
        if time.monotonic() > until:
            raise CheckpointError(f"a copy to the device has not ended after {timeout:g} s; check the device")
        time.sleep(_POLL_SECONDS)


class _CudaEvent:
    def __init__(self, stream: Any) -> None:
        self.event = _CUDA.Event()
        self.event.record(stream)

    def done(self) -> bool:
        """See `Event`."""
        return bool(self.event.query())


class CudaDevice:
    """A GPU through torch. Experimental: it has not run on one yet.

    Args:
        name: "cuda" or "cuda:1".

    Raises:
        BackendUnavailable: when there is no such GPU, or torch is built without CUDA.
        ConfigError: when the name is not a GPU's.
    """

    def __init__(self, name: str = "cuda") -> None:
        try:
            where = torch.device(name)
        except RuntimeError:
            where = torch.device("cpu")
        if where.type != "cuda":
            raise ConfigError(f"device {name!r} is no GPU; write cuda or cuda:1, or leave it out to run on the CPU")
        count = _CUDA.device_count() if _CUDA.is_available() else 0
        if (where.index or 0) >= count:
            raise BackendUnavailable(
                f"device {name!r} is not there: torch {torch.__version__} sees {count} CUDA GPUs; install a build of "
                "torch for them, or leave device out to run on the CPU"
            )
        self.where = torch.device("cuda", where.index or 0)
        self._copies = _CUDA.Stream(self.where)

    def free_bytes(self) -> int:
        """See `Device`, as for the rest."""
        return int(_CUDA.mem_get_info(self.where)[0])

    def empty(self, nbytes: int) -> Tensor:
        """Memory on it; BudgetError when it has not as much."""
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.where)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            raise BudgetError(
                f"{self.where} grants no {nbytes:,} bytes ({format_bytes(nbytes)}) for experts; choose a smaller budget"
            ) from error

    def pinned(self, nbytes: int) -> Tensor:
        """Pinned memory of the host; BudgetError when the system grants none."""
        try:
            memory = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise BudgetError(
                f"the system grants no {nbytes:,} bytes ({format_bytes(nbytes)}) of pinned memory; raise its limit "
                "(ulimit -l), or read with fewer threads"
            ) from error
        start = -memory.data_ptr() % ALIGNMENT
        return memory[start : start + nbytes]

    def copy(self, into: Tensor, source: Tensor) -> Event:
        """On the stream of copies."""
        with _CUDA.device(self.where), _CUDA.stream(self._copies):
            into.copy_(source, non_blocking=True)
            return _CudaEvent(self._copies)

    def computed(self) -> Event:
        """On the stream that computes now."""
        with _CUDA.device(self.where):
            return _CudaEvent(_CUDA.current_stream(self.where))

    def copy_after(self, event: Event) -> None:
        """The stream of copies waits."""
        assert isinstance(event, _CudaEvent)
        self._copies.wait_event(event.event)

    def compute_after(self, event: Event) -> None:
        """The stream that computes now waits."""
        assert isinstance(event, _CudaEvent)
        _CUDA.current_stream(self.where).wait_event(event.event)
