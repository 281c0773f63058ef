"""Damaged stores and failing disks: each fault ends in one line, and nothing is computed with what did not arrive."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import coterie
from coterie.errors import CheckpointError

pytestmark = pytest.mark.needs("transformers")


def logits(model: Any, ids: Any) -> Any:
    import torch

    with torch.inference_mode():
        return model(input_ids=ids, use_cache=False).logits


def copied(small: Any, folder: Path) -> Path:
    shutil.copytree(small.store, folder)
    return folder


def test_a_skeleton_of_another_model_is_refused(small: Any, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    store = copied(small, tmp_path / "store")
    weights = load_file(store / "model" / "model.safetensors")
    name = next(name for name in weights if "gate" in name)
    save_file({**weights, name: weights[name] + 1}, store / "model" / "model.safetensors")
    with pytest.raises(CheckpointError, match="they are of different models"):
        coterie.offload(store, "20%")
    save_file({key: value for key, value in weights.items() if key != name}, store / "model" / "model.safetensors")
    with pytest.raises(CheckpointError, match="lacks 1 tensors"):
        coterie.offload(store, "20%")


def test_a_corrupted_block_is_named_and_never_computed_with(small: Any, prompts: Any, tmp_path: Path) -> None:
    import torch

    from coterie.checkpoint.expert_store import open_store

    store = copied(small, tmp_path / "store")
    layout = open_store(store).layout
    with (store / "experts.bin").open("r+b") as file:
        file.seek(layout.offset(1, 3) + 2 * layout.block_bytes + 5)
        file.write(b"\xaa\xbb")
    model = coterie.offload(store, "30%")
    everything = torch.arange(3, 260)[None]
    for _ in range(2):
        with pytest.raises(CheckpointError, match="corrupted in layer 1, expert 3, block 2"):
            logits(model, everything)
    narrow = coterie.offload(store, "30%", lambda layer, ids, weights: torch.full_like(ids, 32))
    logits(narrow, everything)  # the two blocks before it are whole
    for each in (model, narrow):
        assert each.stats().peak_expert_bytes <= each.stats().budget_bytes
        each.close()


def test_a_failing_disk_is_tried_again_then_told(
    offload: Any, prompts: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    model, real, fails = offload("20%"), os.preadv, [1]

    def preadv(*arguments: Any) -> int:
        if fails[0] > 0:
            fails[0] -= 1
            raise OSError(5, "Input/output error")
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", preadv)
    assert torch.equal(logits(model, prompts), expected[0][1])
    fails[0] = 10**9
    with pytest.raises(
        CheckpointError, match=r"cannot read layer \d, expert \d .*: Input/output error; check the disk"
    ):
        logits(model, prompts)
    fails[0] = 0
    assert torch.equal(logits(model, prompts), expected[0][1]), "usable again"


def test_a_disk_that_stalls_ends_in_an_error(offload: Any, prompts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, stall, real = offload("20%", timeout=0.2), threading.Event(), os.preadv

    def preadv(*arguments: Any) -> int:
        stall.wait(20)
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", preadv)
    started = time.monotonic()
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"has not ended after 0\.2 s; the disk stalls"):
            logits(model, prompts)
    assert time.monotonic() - started < 10
    stall.set()


def test_a_file_that_became_shorter_is_told(small: Any, prompts: Any, tmp_path: Path) -> None:
    store = copied(small, tmp_path / "store")
    model = coterie.offload(store, "20%")
    os.truncate(store / "experts.bin", 4096)
    with pytest.raises(CheckpointError, match="became shorter; pack the model again"):
        logits(model, prompts)
    model.close()


def test_without_direct_reads_that_is_said_once(
    offload: Any, prompts: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.warns(UserWarning, match="without direct reads") as told:
        model = offload("20%")
    assert len(told) == 1
    assert torch.equal(logits(model, prompts), expected[0][1])
    assert not model.stats().direct
