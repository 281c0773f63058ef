"""A routing trace as one safetensors file, memory-mapped on reading and streamed on writing."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from coterie.errors import ConfigError, TraceError
from coterie.files import replacing
from coterie.spec import MoESpec
from coterie.trace.check import check_decisions
from coterie.trace.routing_trace import SCHEMA_VERSION, TOKEN_FIELDS, RoutingTrace

ARRAY_FIELDS = ("expert_ids", "weights", "kept", *TOKEN_FIELDS)
_DTYPES = {
    "U8": np.uint8, "U16": np.uint16, "U32": np.uint32, "I8": np.int8, "I16": np.int16, "I32": np.int32,
    "I64": np.int64, "BOOL": np.bool_, "F16": np.float16, "F32": np.float32, "F64": np.float64,
}  # fmt: skip
_CODES = {np.dtype(kind): code for code, kind in _DTYPES.items()}
_KEY = "coterie"
_COPY_BYTES = 2**24


@contextmanager
def writing(
    path: Path, arrays: Mapping[str, tuple[Any, tuple[int, ...]]], metadata: Mapping[str, Any]
) -> Iterator[dict[str, NDArray[Any]]]:
    """Memory-mapped arrays to fill; the file appears at `path` when the block ends well.

    The safetensors library writes tensors it holds in memory; this writes the same format for arrays that
    need not fit there. Space is reserved first, so that a full disk is an error and not a crash.

    Args:
        path: the file to make.
        arrays: for each name its dtype and shape.
        metadata: stored as JSON under one key of the safetensors header.

    Raises:
        TraceError: for a dtype that the format has no name for.
        ConfigError: when the file cannot be written.
    """
    order = sorted(arrays, key=lambda name: (-np.dtype(arrays[name][0]).itemsize, name))
    header: dict[str, Any] = {"__metadata__": {_KEY: json.dumps(metadata)}}
    offset = 0
    for name in order:
        dtype, shape = np.dtype(arrays[name][0]), arrays[name][1]
        if dtype not in _CODES:
            raise TraceError(f"{name} has dtype {dtype}; a file stores {', '.join(kind.name for kind in _CODES)}")
        size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as temporary:
        with temporary.open("r+b") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.flush()
            _reserve(file.fileno(), 8 + len(text) + offset)
        yield {name: _map(temporary, header[name], 8 + len(text), "r+") for name in order}


def _reserve(descriptor: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:  # pragma: no cover - platforms without it only lose the early error
        os.truncate(descriptor, size)


def _map(path: Path, entry: Mapping[str, Any], start: int, mode: Any) -> NDArray[Any]:
    return np.memmap(path, _DTYPES[entry["dtype"]], mode, start + entry["data_offsets"][0], tuple(entry["shape"]))


def describe(trace: RoutingTrace) -> dict[str, Any]:
    """The metadata of a trace file: schema, spec and provenance."""
    return {
        "kind": "routing_trace",
        "schema_version": SCHEMA_VERSION,
        "spec": trace.spec.to_json(),
        "weight_ordered": trace.weight_ordered,
        "provenance": dict(trace.provenance),
    }


def save_trace(trace: RoutingTrace, path: Path) -> None:
    """Write `trace` to `path`, copying a bounded piece at a time."""
    held = {name: getattr(trace, name) for name in ARRAY_FIELDS if getattr(trace, name) is not None}
    with writing(path, {name: (value.dtype, value.shape) for name, value in held.items()}, describe(trace)) as target:
        for name, value in held.items():
            flat = (value[layer] for layer in range(len(value))) if value.ndim == 3 else (value,)
            for row, source in enumerate(flat):
                sink = target[name][row] if value.ndim == 3 else target[name]
                step = max(1, _COPY_BYTES // max(1, source[:1].nbytes))
                for start in range(0, len(source), step):
                    sink[start : start + step] = source[start : start + step]


def load_trace(path: Path) -> RoutingTrace:
    """Memory-map the trace at `path` and check every decision in it (ids, repeats, weights).

    Raises:
        TraceError: when the file is missing, truncated, no routing trace, or holds impossible decisions.
    """
    header, start = _read_header(path)
    try:
        metadata = json.loads(header.get("__metadata__", {})[_KEY])
        if metadata["kind"] != "routing_trace":
            raise TraceError(f"{path} holds a {metadata['kind']}, not a routing trace")
        if metadata["schema_version"] > SCHEMA_VERSION:
            version = metadata["schema_version"]
            raise TraceError(f"{path} has trace schema {version}, this version reads up to {SCHEMA_VERSION}; upgrade")
        spec, provenance = MoESpec.from_json(metadata["spec"]), dict(metadata["provenance"])
        ordered = bool(metadata["weight_ordered"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TraceError(f"{path} is a safetensors file but no routing trace; import its source first") from error
    except ConfigError as error:
        raise TraceError(f"{path}: {error}") from error
    arrays: dict[str, Any] = {}
    for name in ARRAY_FIELDS:
        if name in header:
            if header[name]["dtype"] not in _DTYPES or 0 in header[name]["shape"]:
                shape = header[name]["shape"]
                raise TraceError(f"{path}: {name} has dtype {header[name]['dtype']} and shape {shape}; record it again")
            arrays[name] = _map(path, header[name], start, "r")
    if "expert_ids" not in arrays:
        raise TraceError(f"{path} holds no expert_ids; it is no routing trace")
    try:
        trace = RoutingTrace(spec=spec, weight_ordered=ordered, provenance=provenance, **arrays)
        check_decisions(trace)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from error
    return trace


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file that the library has checked, and where its data start."""
    try:
        with safe_open(path, framework="numpy"):
            pass  # the library checks header, offsets and file size
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            return json.loads(file.read(size)), 8 + size
    except FileNotFoundError:
        raise TraceError(f"{path} does not exist; check the path") from None
    except (SafetensorError, OSError, ValueError, struct.error) as error:
        raise TraceError(f"{path} is truncated or no safetensors file ({error}); copy or import it again") from error


def is_safetensors(path: Path) -> bool:
    """Whether the file begins as a safetensors file does: a plausible header length, then a brace."""
    try:
        with path.open("rb") as file:
            head = file.read(9)
    except OSError:
        return False
    return len(head) == 9 and struct.unpack("<Q", head[:8])[0] < 2**31 and head[8:9] == b"{"
