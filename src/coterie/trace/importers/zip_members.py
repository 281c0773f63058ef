"""The arrays of an .npz archive, streamed; pickles and decompression bombs are refused."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import TraceError
from coterie.trace.importers.archives import DAMAGE
from coterie.trace.importers.base import PIECE_BYTES
from coterie.trace.importers.npy_header import NpyHeader, read_npy_header
from coterie.units import format_bytes

_MAX_TEXT_BYTES = 2**22
# Deflate reaches 1000:1 on constant data only; routing traces stay below 20:1.
_MAX_RATIO, _RATIO_MATTERS_FROM_BYTES = 200, 2**26


class ZipMembers:
    """An archive's arrays by name, each read in stored order."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self._infos = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        self._headers: dict[str, NpyHeader] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._infos

    def first(self, *names: str) -> str | None:
        """The one of `names` that is there, or None.

        Raises:
            TraceError: when more than one is.
        """
        held = [name for name in names if name in self]
        if len(held) > 1:
            raise TraceError(f"it holds {held[0]} and {held[1]}, which mean the same; keep one")
        return held[0] if held else None

    def header(self, name: str) -> NpyHeader:
        """The declared dtype and shape, held against the member's size."""
        if name not in self._headers:
            with self._open(name):
                pass
        return self._headers[name]

    def integers(self, name: str) -> NpyHeader:
        """The header of a one-axis integer array."""
        header = self.header(name)
        if header.dtype.kind not in "iu" or len(header.shape) != 1:
            raise TraceError(f"{name} is {list(header.shape)} {header.dtype}; it is a list of integers, one a token")
        return header

    def pieces(self, name: str, counts: Iterable[int]) -> Iterator[NDArray[Any]]:
        """The elements in stored order, `counts` of them at a time."""
        dtype = self.header(name).dtype
        with self._open(name) as stream:
            for count in counts:
                raw = stream.read(count * dtype.itemsize)
                if len(raw) != count * dtype.itemsize:
                    raise TraceError(f"{name} ends early; copy or record it again")
                yield np.frombuffer(raw, dtype)

    def copy_integers(self, name: str, target: NDArray[Any], highest: int | None = None) -> None:
        """Copy a one-axis array piece by piece, checking that every value is within 0 .. highest."""
        limit = int(np.iinfo(target.dtype).max) if highest is None else highest
        size = self.integers(name).shape[0]
        step = PIECE_BYTES // 8
        starts = range(0, size, step)
        for start, piece in zip(starts, self.pieces(name, (min(step, size - at) for at in starts)), strict=True):
            for value in (int(piece.min()), int(piece.max())):
                if not 0 <= value <= limit:
                    raise TraceError(f"{name} holds {value}; its values run from 0 to {limit}")
            target[start : start + piece.size] = piece

    def text(self, name: str) -> Any:
        """The JSON value in a 0-d unicode string array."""
        header = self.header(name)
        if header.dtype.kind != "U" or header.shape != () or header.num_bytes > _MAX_TEXT_BYTES:
            limit = format_bytes(_MAX_TEXT_BYTES)
            raise TraceError(f"{name} is {list(header.shape)} {header.dtype}; it is one JSON string of at most {limit}")
        (piece,) = self.pieces(name, [1])
        try:
            return json.loads(str(piece[0]))
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{name} holds no JSON ({error}); write it with json.dumps") from error

    @contextmanager
    def _open(self, name: str) -> Iterator[IO[bytes]]:
        info = self._infos[name]
        if info.file_size > max(_RATIO_MATTERS_FROM_BYTES, _MAX_RATIO * info.compress_size):
            sizes = f"{format_bytes(info.file_size)} in {format_bytes(info.compress_size)}"
            raise TraceError(f"{name} packs {sizes}, more than {_MAX_RATIO}:1; store it uncompressed if it is genuine")
        try:
            with self._archive.open(info) as stream:
                self._headers[name] = read_npy_header(stream, info.file_size, name)
                yield stream
        except DAMAGE as error:
            raise TraceError(f"{name} cannot be unpacked ({error}); copy or record it again") from error
