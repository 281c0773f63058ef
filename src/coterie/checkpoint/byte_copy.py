"""Bytes from one open file to another inside the kernel: no page passes through Python where the kernel can do it."""

from __future__ import annotations

import errno
import os

from coterie.errors import CheckpointError

BLOCK_BYTES = 4096  # what file systems that share blocks between files (btrfs, XFS) align them to
_STEP_BYTES = 256 * 2**20
_BUFFER_BYTES = 8 * 2**20
_CANNOT = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}


def copy_range(source: int, target: int, source_start: int, target_start: int, nbytes: int) -> None:
    """Copy a range of bytes between two files.

    Up to the next block the bytes are copied by themselves, so that what follows is aligned: if both ranges lie alike
    in their blocks, a file system that can will share the blocks instead of copying them.

    Args:
        source: descriptor, readable.
        target: descriptor, writable.
        source_start: first byte in the source.
        target_start: where it goes.
        nbytes: how many.

    Raises:
        CheckpointError: when the source ends before.
    """
    end = source_start + nbytes
    while source_start < end:
        left = end - source_start
        step = min(left, -source_start % BLOCK_BYTES or _STEP_BYTES)
        done = _copy(source, target, source_start, target_start, step)
        if done == 0:
            raise CheckpointError(f"a file of weights became {left:,} bytes shorter while it was read; try again")
        source_start, target_start = source_start + done, target_start + done


def _copy(source: int, target: int, source_start: int, target_start: int, nbytes: int) -> int:
    """Copy at most `nbytes`; how many were."""
    if hasattr(os, "copy_file_range"):
        try:
            done = os.copy_file_range(source, target, nbytes, source_start, target_start)
        except OSError as error:
            if error.errno not in _CANNOT:
                raise
            done = 0
        if done:  # some file systems say 0 where they cannot
            return done
    data = os.pread(source, min(nbytes, _BUFFER_BYTES), source_start)
    write_at(target, data, target_start)
    return len(data)


def read_ahead(source: int) -> None:
    """Tell the kernel that a file will be read from its beginning to its end, so that it reads further ahead."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(source, 0, 0, os.POSIX_FADV_SEQUENTIAL)


def write_at(target: int, data: bytes, start: int) -> None:
    """Write all of `data` at an offset of an open file."""
    view = memoryview(data)
    while view:
        written = os.pwrite(target, view, start)
        view, start = view[written:], start + written
