"""Ranges between files: the same bytes whatever the kernel can do."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from coterie.checkpoint import byte_copy
from coterie.checkpoint.byte_copy import BLOCK_BYTES, copy_range
from coterie.errors import CheckpointError

DATA = np.random.default_rng(0).integers(0, 256, 5 * BLOCK_BYTES + 77, dtype=np.uint8).tobytes()


def copied(folder: Path, start: int, to: int, nbytes: int) -> bytes:
    (folder / "a").write_bytes(DATA)
    with (folder / "a").open("rb") as source, (folder / "b").open("wb") as target:
        copy_range(source.fileno(), target.fileno(), start, to, nbytes)
    return (folder / "b").read_bytes()


@pytest.mark.parametrize("way", ["kernel", "cannot", "says nothing", "absent"])
@pytest.mark.parametrize("start", [0, 5, BLOCK_BYTES])
def test_every_way_copies_the_range(way: str, start: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(*arguments: int) -> int:
        raise OSError(errno.EXDEV, "between file systems")

    monkeypatch.setattr(byte_copy, "_BUFFER_BYTES", 1000)
    if way == "cannot":
        monkeypatch.setattr(os, "copy_file_range", cannot, raising=False)
    elif way == "says nothing":
        monkeypatch.setattr(os, "copy_file_range", lambda *arguments: 0, raising=False)
    elif way == "absent":
        monkeypatch.delattr(os, "copy_file_range", raising=False)
    nbytes = len(DATA) - start - 3
    assert copied(tmp_path, start, 11, nbytes) == bytes(11) + DATA[start : start + nbytes]


def test_after_the_first_block_boundary_steps_are_aligned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, real = [], byte_copy._copy

    def seen(*arguments: int) -> int:
        steps.append(arguments[2:])
        return real(*arguments)

    monkeypatch.setattr(byte_copy, "_copy", seen)
    copied(tmp_path, 100, 100, len(DATA) - 100)
    assert steps[0] == (100, 100, BLOCK_BYTES - 100)
    assert all(source % BLOCK_BYTES == target % BLOCK_BYTES == 0 for source, target, _ in steps[1:])


def test_a_source_that_ends_before_and_a_full_disk_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="bytes shorter while it was read"):
        copied(tmp_path, 0, 0, len(DATA) + 1)

    def full(*arguments: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "copy_file_range", full, raising=False)
    with pytest.raises(OSError, match="No space left"):
        copied(tmp_path, 0, 0, 10)
