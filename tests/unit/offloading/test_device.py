"""Offloading to a device whose copies come late: a wait that is left out gives wrong results, and is caught."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

import coterie
from coterie.errors import BackendUnavailable, BudgetError, CheckpointError, ConfigError

pytestmark = pytest.mark.needs("transformers")


def logits(model: Any, ids: Any) -> Any:
    import torch

    with torch.inference_mode():
        return model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize(
    ("budget", "threads", "ahead", "policy"),
    [("40%", 2, False, "company"), ("26%", 1, True, "lru"), ("70%", 1, True, "reuse"), ("100%", 2, False, "lfu")],
)
def test_outputs_are_the_hosts_bit_for_bit(
    budget: str, threads: int, ahead: bool, policy: str, offload: Any, make_device: Any, prompts: Any
) -> None:
    import torch

    device, host = make_device(), offload("100%")
    model = offload(budget, device=device, threads=threads, ahead=ahead, policy=policy, check=True)
    for ids in (prompts, prompts[:1, :3], prompts[:, 5:6]):
        assert torch.equal(logits(model, ids), logits(host, ids))
    with torch.inference_mode():
        texts = [each.generate(prompts, max_new_tokens=4, do_sample=False) for each in (model, host)]
    assert torch.equal(*texts)
    stats = model.stats()
    assert device.taken <= stats.budget_bytes, "blocks, scratch and staging"
    assert stats.peak_expert_bytes <= stats.budget_bytes


def test_experts_in_eight_bits_run_on_a_device_as_on_the_host(
    small: Any, make_device: Any, prompts: Any, tmp_path: Path
) -> None:
    import torch

    coterie.pack(small.folder, tmp_path / "store", profile=small.profile, bits=8)
    model = coterie.offload(tmp_path / "store", "60%", device=make_device(), threads=1, check=True)
    host = coterie.offload(tmp_path / "store", "100%", check=True)
    for ids in (prompts, prompts[:1, :3], prompts[:, 5:6]):
        assert torch.equal(logits(model, ids), logits(host, ids))
    assert model.stats().misses > 0
    for each in (model, host):
        each.close()


@pytest.mark.parametrize("name", ["value", "crisp"])
def test_widths_differ_from_expert_to_expert(
    name: str, offload: Any, small: Any, make_device: Any, prompts: Any
) -> None:
    import torch

    from coterie.pruning.width_planning import plan_widths

    plan = plan_widths(small.profile, name, **({"bytes": 0.5} if name == "value" else {}))
    model = offload("35%", plan, device=make_device(), threads=1, ahead=True, check=True)
    host = offload("100%", plan)
    for start in range(0, 12, 3):
        ids = prompts[:, start : start + 4]
        assert torch.equal(logits(model, ids), logits(host, ids))
    assert model.stats().misses > 0
    assert model.stats().gathered_bytes > 0, "prefixes of many lengths lie scattered"
    assert host.stats().gathered_bytes == 0


def test_computing_before_a_copy_is_caught(offload: Any, make_device: Any, prompts: Any) -> None:
    class Hasty(make_device.kind):  # type: ignore[misc,name-defined]
        def compute_after(self, event: Any) -> None:
            pass

    model = offload("50%", device=make_device(Hasty, late=0.02), check=True)
    with pytest.raises(CheckpointError, match="computed with other weights than the store's"):
        logits(model, prompts)


def test_reading_over_what_is_still_copied_is_caught(
    offload: Any, make_device: Any, prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("coterie.offloading.device_link"), "wait_for", lambda *_: None)
    model = offload("50%", device=make_device(late=0.02), threads=1, check=True)
    with pytest.raises(CheckpointError, match="computed with other weights than the store's"):
        logits(model, prompts)


def test_a_copy_that_never_ends_is_an_error(offload: Any, make_device: Any, prompts: Any) -> None:
    class Never:
        def done(self) -> bool:
            return False

    class Stuck(make_device.kind):  # type: ignore[misc,name-defined]
        def copy(self, into: Any, source: Any) -> Never:
            return Never()

        def compute_after(self, event: Never) -> None:
            pass

    model = offload("50%", device=make_device(Stuck), threads=1, timeout=0.1)
    with pytest.raises(CheckpointError, match=r"a copy to the device has not ended after 0\.1 s; check the device"):
        logits(model, prompts)


def test_memory_is_copied_to_only_after_what_computes_with_it(small: Any, make_device: Any) -> None:
    import torch

    from coterie.checkpoint.expert_store import open_store
    from coterie.offloading.device_memory import DeviceMemory

    layout, device = open_store(small.store).layout, make_device()
    memory = DeviceMemory(layout, device, blocks=4, longest=4)
    memory.buffer(0, 0, 0, 4)
    memory.put(0, 0, 0, 4, torch.ones(4 * layout.block_bytes, dtype=torch.uint8))
    place = memory.record(0, 0).data_ptr()
    device.log.clear()
    memory.evict(0, 0, 2)
    memory.buffer(1, 3, 0, 2)
    memory.put(1, 3, 0, 2, torch.zeros(2 * layout.block_bytes, dtype=torch.uint8))
    assert device.log == ["computed", "copy_after", place + 2 * layout.block_bytes]


def test_budgets_count_staging_and_scratch(offload: Any, make_device: Any) -> None:
    message = "holds one expert and 960.0 KiB of staging and scratch, 1,179,648 bytes"
    with pytest.raises(BudgetError, match=message):
        offload("30%", device=make_device())
    assert offload(1_179_648, device=make_device()).stats().budget_bytes == 1_179_648


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("cuda:99", BackendUnavailable, "'cuda:99' is not there: torch .* sees [0-9]+ CUDA GPUs"),
        ("cpu", ConfigError, "'cpu' is no GPU; write cuda"),
        ("gpu 0", ConfigError, "'gpu 0' is no GPU"),
    ],
)
def test_devices_that_are_not_there(name: str, error: type[Exception], message: str, small: Any) -> None:
    with pytest.raises(error, match=message):
        coterie.offload(small.store, "50%", device=name)


def test_pinned_memory_that_is_refused_is_told() -> None:
    import torch

    from coterie.offloading.device import CudaDevice

    if torch.cuda.is_available():
        pytest.skip("needs a torch without CUDA, which refuses to pin")
    with pytest.raises(BudgetError, match=r"grants no 10 bytes .* of pinned memory"):
        CudaDevice.pinned(object.__new__(CudaDevice), 10)
