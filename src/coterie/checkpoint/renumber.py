"""A checkpoint whose experts bear other numbers: names change in the headers, data is copied undecoded.

Only tensors that have experts along an axis (routers; all experts' weights in one tensor) are moved within
themselves, slice by slice. So memory stays small, and any quantisation that is by expert is fine.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from coterie.checkpoint.byte_copy import BLOCK_BYTES, copy_range, write_at
from coterie.checkpoint.expert_axis import ExpertTensor, expert_tensors, renamed
from coterie.checkpoint.safetensors_io import INDEX_FILE, StoredTensor, read_header, read_headers
from coterie.errors import CheckpointError
from coterie.files import read_text
from coterie.progress import Progress, silent

_SMALL_SLICE_BYTES = 64 * 1024  # smaller ones are moved in memory: a system call each would take longer
_STRING = r'"((?:[^"\\]|\\.)*)"'
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
    source: Path, out: Path, map_LE: NDArray[np.int64], layer_ids: Iterable[int],
    headers: Mapping[str, FileHeader] | None = None, progress: Progress = silent,
) -> dict[str, FileHeader]:  # fmt: skip
    """Write the weights of the checkpoint in `source`, and their index, into the folder `out`, experts renumbered.

    Args:
        source: a model folder with safetensors weights.
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
    tensors = read_headers(source)
    found = expert_tensors(tensors, layer_ids, map_LE.shape[1])
    rename = renaming(found, map_LE)
    files = sorted({tensor.file for tensor in tensors.values()})
    before: dict[str, FileHeader] = {}
    done, total = 0, sum(file.stat().st_size for file in files)
    for file in files:
        wanted = None if headers is None else _wanted(headers, file)
        before[file.name] = _renumber_file(file, out / file.name, found, rename, map_LE, wanted)
        done += file.stat().st_size
        progress("renumbering", done, total)
    index = source / INDEX_FILE
    if index.is_file():
        text = read_text(index, CheckpointError)
        (out / INDEX_FILE).write_text(_rename_index(text, rename, index), encoding="utf-8", newline="")
    return before


def renaming(found: Mapping[str, ExpertTensor], map_LE: NDArray[np.int64]) -> Callable[[str], str]:
    """From a tensor's name in the source to its name in the copy."""
    slot_LE = np.argsort(map_LE, axis=1)

    def rename(name: str) -> str:
        own = found.get(name)
        return name if own is None or own.expert is None else renamed(name, int(slot_LE[own.layer, own.expert]))

    return rename


def _wanted(headers: Mapping[str, FileHeader], file: Path) -> FileHeader:
    if file.name not in headers:
        raise CheckpointError(f"{file} was not there when the placement was baked; remove it, or bake again")
    return headers[file.name]


def _renumber_file(
    file: Path, target: Path, found: Mapping[str, ExpertTensor], rename: Callable[[str], str],
    map_LE: NDArray[np.int64], wanted: FileHeader | None,
) -> FileHeader:  # fmt: skip
    moved = [(tensor, found[name].layer) for name, tensor in read_header(file).items() if _is_moved(found, name)]
    with file.open("rb") as reader, target.open("wb") as writer:
        old = reader.read(struct.unpack("<Q", reader.read(8))[0])
        new = _rename_header(old, rename, file, None if wanted is None else wanted.nbytes)
        if wanted is not None and _describe(new) != wanted:
            raise CheckpointError(f"{file} was changed since the placement was baked; it cannot be undone")
        writer.write(struct.pack("<Q", len(new)) + new)
        writer.flush()
        position, shift = 8 + len(old), len(new) - len(old)
        for tensor, layer in sorted(moved, key=lambda item: item[0].start):
            copy_range(reader.fileno(), writer.fileno(), position, position + shift, tensor.start - position)
            _move_slices(reader, writer, tensor, tensor.start + shift, map_LE[layer])
            position = tensor.start + tensor.nbytes
        left = os.fstat(reader.fileno()).st_size - position
        copy_range(reader.fileno(), writer.fileno(), position, position + shift, left)
    return _describe(old)


def _is_moved(found: Mapping[str, ExpertTensor], name: str) -> bool:
    return name in found and found[name].expert is None


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


def _rename_header(old: bytes, rename: Callable[[str], str], file: Path, nbytes: int | None) -> bytes:
    """The header with other names, all else as it was; padded with spaces, as the format allows.

    It keeps its length where the new names fit; else it grows by whole blocks, so that data stays aligned to blocks as
    it was (`copy_range`).
    """
    text = old.rstrip(b" ").decode("utf-8")
    new = _rename_keys(text, _TENSOR_KEY, rename).encode()
    before, after = json.loads(text), json.loads(new)
    if after != {rename(name): entry for name, entry in before.items()}:
        raise CheckpointError(f"the header of {file} is written in a way that cannot be renamed; save the model again")
    if nbytes is None:
        nbytes = len(old) + -(-max(0, len(new) - len(old)) // BLOCK_BYTES) * BLOCK_BYTES
    return new.ljust(nbytes, b" ")


def _rename_index(text: str, rename: Callable[[str], str], index: Path) -> str:
    new = _rename_keys(text, _FILE_KEY, rename)
    before, after = json.loads(text), json.loads(new)
    renamed_map = {rename(name): file for name, file in before["weight_map"].items()}
    if after != {**before, "weight_map": renamed_map}:
        raise CheckpointError(f"{index} is written in a way that cannot be renamed; save the model again")
    return new


def _rename_keys(text: str, keys: re.Pattern[str], rename: Callable[[str], str]) -> str:
    return keys.sub(lambda hit: f'"{rename(hit[1])}"', text)


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
