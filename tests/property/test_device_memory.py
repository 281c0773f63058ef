"""Blocks on a device at random: there is always room within the budget, and records are what was copied there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.checkpoint.store_layout import StoreLayout

pytestmark = pytest.mark.needs("torch")

LAYOUT = StoreLayout(2, 5, 10, 256, "F32")  # blocks of 4 neurons, 12 KiB; the third is shorter


class _AtOnce:
    """A device on which nothing is late."""

    def empty(self, nbytes: int) -> Any:
        import torch

        return torch.zeros(nbytes, dtype=torch.uint8)

    def copy(self, into: Any, source: Any) -> Any:
        into.copy_(source)
        return self

    def done(self) -> bool:
        return True

    def computed(self) -> Any:
        return self

    def copy_after(self, event: Any) -> None:
        pass

    def compute_after(self, event: Any) -> None:
        pass


@given(data=st.data(), blocks=st.integers(3, 24), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_there_is_room_as_long_as_the_budget_says(data: Any, blocks: int, seed: int) -> None:
    import torch

    from coterie.offloading.device_memory import DeviceMemory

    assert LAYOUT.blocks == 3
    device: Any = _AtOnce()
    memory, rng = DeviceMemory(LAYOUT, device, blocks, 3, poison=True), np.random.default_rng(seed)
    held: dict[tuple[int, int], Any] = {}
    for _ in range(40):
        key = (int(rng.integers(2)), int(rng.integers(5)))
        here = len(held.get(key, ())) // LAYOUT.block_bytes + (len(held.get(key, ())) % LAYOUT.block_bytes > 0)
        used = sum(-(-len(values) // LAYOUT.block_bytes) for values in held.values())
        end = int(rng.integers(here + 1, 4)) if here < 3 else here
        if end > here and used + end - here <= blocks:
            _, nbytes = LAYOUT.span(here, end)
            values = torch.from_numpy(rng.integers(0, 256, nbytes, dtype=np.uint8))
            assert memory.buffer(*key, here, end) is None
            memory.put(*key, here, end, values)
            held[key] = torch.cat([held.get(key, values[:0]), values])
        elif here:
            keep = int(rng.integers(0, here))
            memory.evict(*key, keep)
            held[key] = held[key][: keep * LAYOUT.block_bytes]
        for each, values in held.items():
            if len(values):
                record = memory.record(*each).reshape(-1).view(torch.uint8)
                assert torch.equal(record[: len(values)], values)


def test_a_scattered_expert_is_copied_together() -> None:
    import torch

    from coterie.offloading.device_memory import DeviceMemory

    device: Any = _AtOnce()
    memory, ones = DeviceMemory(LAYOUT, device, 5, 3), torch.ones(LAYOUT.record_bytes, dtype=torch.uint8)
    memory.buffer(0, 0, 0, 2)  # slots 0, 1
    memory.buffer(0, 1, 0, 1)  # 2
    memory.buffer(0, 2, 0, 2)  # 3, 4
    memory.evict(0, 2, 1)  # 4
    memory.evict(0, 1, 0)  # 2
    memory.put(0, 2, 0, 1, ones[: LAYOUT.block_bytes])
    memory.record(0, 2)
    assert memory.gathered_bytes == 0
    memory.evict(0, 0, 1)  # 1
    memory.buffer(1, 1, 0, 3)  # 1, 2, 4: none are three in a row
    memory.put(1, 1, 0, 3, ones)
    record = memory.record(1, 1)
    assert memory.gathered_bytes == 3 * LAYOUT.block_bytes
    assert (record.reshape(-1).view(torch.uint8)[: LAYOUT.record_bytes] == 1).all()
    assert memory.beside_bytes == 3 * LAYOUT.block_bytes
