"""The header of a .npy array, believed only as far as the bytes behind it reach. Objects (pickles) are refused."""

from __future__ import annotations

import ast
import math
import struct
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from coterie.errors import TraceError

MAGIC = b"\x93NUMPY"
_MAX_HEADER_BYTES = 10_000


@dataclass(frozen=True)
class NpyHeader:
    """What a .npy header declares.

    Attributes:
        dtype: of the elements; never object.
        shape: of the array, row-major.
        start: where the elements start, bytes.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        """Size of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_npy_header(stream: IO[bytes], num_bytes: int, what: str) -> NpyHeader:
    """Read the header at the start of `stream` and hold it against the number of bytes that are there.

    Args:
        stream: at the first byte of the array's file; left at the first element.
        num_bytes: size of the whole file.
        what: the array's name, for messages.

    Raises:
        TraceError: when it is no .npy array, holds Python objects, is column-major, or its size is not as declared.
    """
    head = stream.read(8)
    if len(head) < 8 or head[:6] != MAGIC:
        raise TraceError(f"{what} is no .npy array; write it with numpy.save or numpy.savez")
    width = {1: 2, 2: 4}.get(head[6])
    if width is None:
        raise TraceError(f"{what} has .npy version {head[6]}; plain arrays have 1 or 2: save it again")
    length_bytes = stream.read(width)
    length = struct.unpack("<H" if width == 2 else "<I", length_bytes)[0] if len(length_bytes) == width else 0
    if not 0 < length <= _MAX_HEADER_BYTES:
        raise TraceError(
            f"{what} has a .npy header of {length} bytes, at most {_MAX_HEADER_BYTES} are read; save it again"
        )
    dtype, column_major, shape = _parse(stream.read(length), what)
    if dtype.hasobject:
        raise TraceError(f"{what} holds pickled Python objects, which are never loaded; save plain integer arrays")
    if column_major and len(shape) > 1:
        raise TraceError(f"{what} is stored column-major; save numpy.ascontiguousarray of it")
    header = NpyHeader(dtype, shape, 8 + width + length)
    if header.start + header.num_bytes != num_bytes:
        raise TraceError(
            f"{what} declares {list(shape)} {dtype} = {header.num_bytes} bytes "
            f"but {num_bytes - header.start} are there; it is truncated or damaged: copy or record it again"
        )
    return header


def _parse(text: bytes, what: str) -> tuple[np.dtype[Any], bool, tuple[int, ...]]:
    try:
        fields = ast.literal_eval(text.decode("latin-1").strip())
        descr, column_major, shape = fields["descr"], fields["fortran_order"], fields["shape"]
        if not isinstance(descr, str) or not isinstance(shape, tuple):
            raise TypeError
        if not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError
        return np.dtype(descr), bool(column_major), shape
    except (ValueError, SyntaxError, TypeError, KeyError, RecursionError, MemoryError) as error:
        raise TraceError(
            f"{what} has a damaged .npy header, or records instead of numbers; save plain arrays"
        ) from error
