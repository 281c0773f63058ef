"""A checkpoint whose experts bear other numbers: names change in the headers, data is copied undecoded.

Only tensors that have experts along an axis (routers; all experts' weights in one tensor) are moved within
themselves, slice by slice. So memory stays small, and any quantisation that is by expert is fine.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from coterie.checkpoint.byte_copy import BLOCK_BYTES, copy_range, read_ahead, write_at
from coterie.checkpoint.expert_axis import ExpertTensor, expert_tensors, renamed
from coterie.checkpoint.safetensors_io import INDEX_FILE, StoredTensor, merged
from coterie.errors import CheckpointError
from coterie.files import read_text
from coterie.progress import Progress, silent

_SMALL_SLICE_BYTES = 64 * 1024  # smaller ones are moved in memory: a system call each would take longer
_STRING = r'"([^"\\]*(?:\\.[^"\\]*)*)"'
_TENSOR_KEY, _FILE_KEY = re.compile(_STRING + r"(?=\s*:\s*\{)"), re.compile(_STRING + r'(?=\s*:\s*")')


@dataclass(frozen=True)
class FileHeader:
    """One file's header before it was changed, by which it can be made again.

    Attributes:
        nbytes: its length, padding included.
        sha256: of its bytes.
    """

    nbytes: int
    sha256: str


def renumber_files(
    files: Mapping[Path, Mapping[str, StoredTensor]], out: Path, map_LE: NDArray[np.int64], layer_ids: Iterable[int],
    headers: Mapping[str, FileHeader] | None = None, progress: Progress = silent,
) -> dict[str, FileHeader]:  # fmt: skip
    """Write the weights of a checkpoint, and their index, into the folder `out`, experts renumbered.

    Args:
        files: what `safetensors_io.read_files` found in the checkpoint's folder.
        out: an empty folder.
        map_LE: [L, E]: expert s of the copy is expert map[s] of the source.
        layer_ids: the model layer of each MoE layer.
        headers: to undo an earlier call: what that returned; the headers made must be these.
        progress: told of every file, in bytes.

    Returns:
        The source's headers, by file.

    Raises:
        CheckpointError: when the weights are damaged, hold what is not understood, or do not become `headers`.
    """
    found = expert_tensors(merged(files), layer_ids, map_LE.shape[1])
    names = new_names(found, map_LE)
    before: dict[str, FileHeader] = {}
    done, total = 0, sum(file.stat().st_size for file in files)
    for file, tensors in files.items():
        wanted = None if headers is None else _wanted(headers, file)
        moved = [(tensor, map_LE[own.layer]) for name, tensor in tensors.items()
                 if (own := found.get(name)) is not None and own.expert is None]  # fmt: skip
        changed = {name: names[name] for name in tensors if name in names}
        before[file.name] = _renumber_file(file, out / file.name, changed, moved, wanted)
        done += file.stat().st_size
        progress("renumbering", done, total)
    index = next(iter(files)).parent / INDEX_FILE
    if index.is_file():
        text = _rename_keys(read_text(index, CheckpointError), _FILE_KEY, names, index)
        (out / INDEX_FILE).write_text(text, encoding="utf-8", newline="")
    return before


def new_names(found: Mapping[str, ExpertTensor], map_LE: NDArray[np.int64]) -> dict[str, str]:
    """The name in the copy of every numbered expert's tensor of the source."""
    slots = np.argsort(map_LE, axis=1).tolist()
    return {name: renamed(name, slots[own.layer][own.expert]) for name, own in found.items() if own.expert is not None}


def _wanted(headers: Mapping[str, FileHeader], file: Path) -> FileHeader:
    if file.name not in headers:
        raise CheckpointError(f"{file} was not there when the placement was baked; remove it, or bake again")
    return headers[file.name]


def _renumber_file(
    file: Path, target: Path, names: Mapping[str, str], moved: Iterable[tuple[StoredTensor, NDArray[np.int64]]],
    wanted: FileHeader | None,
) -> FileHeader:  # fmt: skip
    with file.open("rb") as reader, target.open("wb") as writer:
        read_ahead(reader.fileno())
        old = reader.read(struct.unpack("<Q", reader.read(8))[0])
        new = _rename_header(old, names, file, None if wanted is None else wanted.nbytes)
        if wanted is not None and _describe(new) != wanted:
            raise CheckpointError(f"{file} was changed since the placement was baked; it cannot be undone")
        writer.write(struct.pack("<Q", len(new)) + new)
        writer.flush()
        position, shift = 8 + len(old), len(new) - len(old)
        for tensor, map_E in sorted(moved, key=lambda item: item[0].start):
            copy_range(reader.fileno(), writer.fileno(), position, position + shift, tensor.start - position)
            _move_slices(reader, writer, tensor, tensor.start + shift, map_E)
            position = tensor.start + tensor.nbytes
        left = os.fstat(reader.fileno()).st_size - position
        copy_range(reader.fileno(), writer.fileno(), position, position + shift, left)
    return _describe(old)


def _move_slices(
    reader: BinaryIO, writer: BinaryIO, tensor: StoredTensor, start: int, map_E: NDArray[np.int64]
) -> None:
    """Write a tensor of all experts with its slices in another order."""
    size = tensor.nbytes // len(map_E)
    if size <= _SMALL_SLICE_BYTES:
        data = os.pread(reader.fileno(), tensor.nbytes, tensor.start)
        if len(data) < tensor.nbytes:
            raise CheckpointError(f"{tensor.file} became shorter while it was read; try again")
        slices_ES = np.frombuffer(data, np.uint8).reshape(len(map_E), size)
        write_at(writer.fileno(), slices_ES[map_E].tobytes(), start)
        return
    for slot, expert in enumerate(map_E.tolist()):
        copy_range(reader.fileno(), writer.fileno(), tensor.start + expert * size, start + slot * size, size)


def _rename_header(old: bytes, names: Mapping[str, str], file: Path, nbytes: int | None) -> bytes:
    """The header with other names, all else as it was; padded with spaces, as the format allows.

    It keeps its length where the new names fit; else it grows by whole blocks, so that data stays aligned to blocks as
    it was (`copy_range`).
    """
    new = _rename_keys(old.rstrip(b" ").decode("utf-8"), _TENSOR_KEY, names, file).encode()
    if nbytes is None:
        nbytes = len(old) + -(-max(0, len(new) - len(old)) // BLOCK_BYTES) * BLOCK_BYTES
    return new.ljust(nbytes, b" ")


def _rename_keys(text: str, keys: re.Pattern[str], names: Mapping[str, str], file: Path) -> str:
    """The text with other keys; each of `names` must be one exactly once."""
    seen = []

    def rename(hit: re.Match[str]) -> str:
        new = names.get(hit[1])
        if new is None:
            return hit[0]
        seen.append(hit[1])
        return f'"{new}"'

    text = keys.sub(rename, text)
    if len(seen) != len(names) or len(set(seen)) != len(names):
        raise CheckpointError(f"{file} writes names in a way that cannot be changed; save the model again")
    return text


def _describe(header: bytes) -> FileHeader:
    return FileHeader(len(header), hashlib.sha256(header).hexdigest())


def headers_to_json(headers: Mapping[str, FileHeader]) -> dict[str, Any]:
    """Ready for JSON."""
    return {name: vars(header) for name, header in headers.items()}


def headers_from_json(data: Any) -> dict[str, FileHeader]:
    """The inverse of `headers_to_json`.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: when it is anything else.
    """
    return {str(name): FileHeader(int(item["nbytes"]), str(item["sha256"])) for name, item in data.items()}
