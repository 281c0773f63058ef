"""Where a model's experts go and how they get there: the host's memory, or a device's."""

from __future__ import annotations

from typing import Any

from coterie.checkpoint.expert_store import ExpertStore
from coterie.models.memory import available_bytes
from coterie.offloading.budget import most_blocks
from coterie.offloading.device import CudaDevice, Device
from coterie.offloading.device_link import DeviceLink, staging_bytes
from coterie.offloading.device_memory import DeviceMemory
from coterie.offloading.link import Link
from coterie.offloading.memory import ExpertMemory, Memory
from coterie.offloading.timeline import Timeline


class Places:
    """The host, or a device beside it.

    Args:
        store: the store.
        device: a GPU's name, or a device; None: the host.
        widest: neurons that an expert runs at most; None: all.
        threads: that read.

    Attributes:
        beside_bytes: what a budget pays for beside experts.

    Raises:
        BackendUnavailable: when there is no such device.
        ConfigError: when the name is none.
    """

    def __init__(self, store: ExpertStore, device: str | Device | None, widest: int | None, threads: int) -> None:
        self._store, self._threads = store, threads
        self._device: Device | None = CudaDevice(device) if isinstance(device, str) else device
        self._longest, self._staging_bytes, self.beside_bytes = most_blocks(store.layout, widest), 0, 0
        if self._device is not None:
            self._staging_bytes = staging_bytes(store.layout, max(1, threads))
            self.beside_bytes = self._longest * store.layout.block_bytes + self._staging_bytes

    def free_bytes(self) -> int:
        """Memory that experts can take."""
        return available_bytes() if self._device is None else self._device.free_bytes()

    def put(self, model: Any) -> Any:
        """A model, moved to where its experts will be."""
        return model if self._device is None else model.to(self._device.where)

    def memory_and_link(
        self, blocks: int, check: bool, direct: bool, bandwidth: float | None, timeline: Timeline | None, timeout: float
    ) -> tuple[Memory, Link]:
        """Room for so many blocks, and what brings them there; see `offload`."""
        if self._device is None:
            link = Link(self._store, self._threads, direct, bandwidth, timeline)
            return ExpertMemory(self._store.layout, poison=check), link
        memory = DeviceMemory(
            self._store.layout, self._device, blocks, self._longest, self._staging_bytes, poison=check
        )
        threads = self._threads
        return memory, DeviceLink(
            self._store, memory, self._device, threads, direct, bandwidth, timeline, timeout
        )  # fmt: skip
