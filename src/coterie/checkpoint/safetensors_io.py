"""What a checkpoint's safetensors files hold, from their headers alone; and whether the files are whole."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.errors import CheckpointError
from coterie.files import parse_json, read_text

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies.

    Attributes:
        file: the safetensors file.
        dtype: the format's name of the element type: "BF16", "F32", "U8", ...
        shape: elements along each axis.
        start: offset of its first byte from the beginning of the file.
        nbytes: its bytes.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


def has_weights(folder: Path) -> bool:
    """Whether the folder holds safetensors weights, whole or not."""
    return (folder / INDEX_FILE).is_file() or (folder / SINGLE_FILE).is_file()


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint by name; only headers are read.

    Args:
        folder: a model folder with `model.safetensors`, or its shards and their index.

    Raises:
        CheckpointError: when files are missing, truncated or damaged, or hold other tensors than the index says.
    """
    return merged(read_files(folder))


def merged(files: Mapping[Path, Mapping[str, StoredTensor]]) -> dict[str, StoredTensor]:
    """The tensors of several files by name."""
    return {name: tensor for tensors in files.values() for name, tensor in tensors.items()}


def read_files(folder: Path) -> dict[Path, dict[str, StoredTensor]]:
    """As `read_headers`, file by file."""
    index = folder / INDEX_FILE
    if not index.is_file():
        if not (folder / SINGLE_FILE).is_file():
            raise _no_weights(folder)
        return {folder / SINGLE_FILE: read_header(folder / SINGLE_FILE)}
    weight_map = _weight_map(index)
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of its {len(names)} weight files, {missing[0]} for one; download it again"
        )
    files = {folder / name: read_header(folder / name) for name in names}
    held = merged(files)
    absent = next((name for name in weight_map if name not in held), None)
    if absent is not None:
        raise CheckpointError(
            f"{index} places {absent} in {weight_map[absent]}, which does not hold it; download the model again"
        )
    return files


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Every tensor of one safetensors file by name.

    Raises:
        CheckpointError: when the file is truncated or no safetensors file.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(_LENGTH_BYTES)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == _LENGTH_BYTES else -1
            if not 0 <= length <= min(_MAX_HEADER_BYTES, size - _LENGTH_BYTES):
                raise CheckpointError(f"{file} ({size:,} bytes) is truncated or no safetensors file; download it again")
            text = stream.read(length)
    except OSError as reason:
        raise CheckpointError(f"cannot read {file}: {reason.strerror}") from reason
    header = parse_json(text.decode("utf-8", "replace"), file, CheckpointError)
    if not isinstance(header, dict):
        raise CheckpointError(f"{file} is no safetensors file: its header is no JSON object; download it again")
    begin = _LENGTH_BYTES + length
    tensors = {name: _tensor(file, name, header[name], begin) for name in header if name != "__metadata__"}
    end = max((tensor.start + tensor.nbytes for tensor in tensors.values()), default=begin)
    if size < end:
        raise CheckpointError(f"{file} is truncated: {size:,} of its {end:,} bytes are there; download it again")
    return tensors


def _tensor(file: Path, name: str, entry: Any, begin: int) -> StoredTensor:
    try:
        first, last = entry["data_offsets"]
        dtype, shape = str(entry["dtype"]), tuple(map(int, entry["shape"]))
        whole = 0 <= first <= last and (last > first) == (math.prod(shape) > 0)
    except (TypeError, KeyError, ValueError):
        whole = False
    if not whole:
        raise CheckpointError(f"{file} is damaged: its header's entry for {name} makes no sense; download it again")
    return StoredTensor(file, dtype, shape, begin + first, last - first)


def _weight_map(index: Path) -> Mapping[str, str]:
    document = parse_json(read_text(index, CheckpointError), index, CheckpointError)
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    named = isinstance(weight_map, dict) and all(isinstance(name, str) for name in weight_map.values())
    if not weight_map or not named or not all(_is_plain_name(name) for name in set(weight_map.values())):
        raise CheckpointError(f"{index} has no weight_map from tensors to file names; download it again")
    return dict(weight_map)


def _is_plain_name(name: str) -> bool:
    """Whether it names a file in the folder itself: an index must not lead elsewhere."""
    return name == Path(name).name and name not in ("", ".", "..")


def _no_weights(folder: Path) -> CheckpointError:
    if any(folder.glob("*.bin")):
        return CheckpointError(
            f"{folder} holds PyTorch .bin weights, which can run code when they are loaded; convert them to safetensors"
        )
    return CheckpointError(f"{folder} holds no weights: neither {SINGLE_FILE} nor {INDEX_FILE}; download the model")
