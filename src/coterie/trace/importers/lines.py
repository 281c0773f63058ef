"""JSON from text files, plain or gzip-compressed, a bounded line at a time."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from coterie.errors import TraceError
from coterie.units import format_bytes

_GZIP_MAGIC = b"\x1f\x8b"


def head(path: Path, num_bytes: int) -> bytes:
    """The first bytes of the (decompressed) file; nothing when it cannot be read."""
    try:
        with path.open("rb") as raw, _decompressed(raw) as file:
            return file.read(num_bytes)
    except (OSError, EOFError, zlib.error):
        return b""


def json_lines(
    path: Path, max_line_bytes: int, advanced: Callable[[int], None] = lambda _: None
) -> Iterator[tuple[int, Any]]:
    """Each line's number (from 1) and value; blank lines are skipped.

    Args:
        path: the file.
        max_line_bytes: longer lines are refused, not read.
        advanced: told now and then how many bytes of the file are behind.

    Raises:
        TraceError: for a line that is no JSON or too long, naming it, and for a damaged file.
    """
    number = 0
    try:
        with path.open("rb") as raw, _decompressed(raw) as file:
            while line := file.readline(max_line_bytes + 1):
                number += 1
                if len(line) > max_line_bytes:
                    limit = format_bytes(max_line_bytes)
                    raise TraceError(f"line {number} is longer than {limit}; write one record a line")
                if number % 4096 == 0:
                    advanced(raw.tell())
                if not line.isspace():
                    yield number, parse(line, f"line {number}")
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"cannot be read after line {number} ({error}); copy it again") from error


def parse(text: bytes, what: str) -> Any:
    """The JSON value in `text`, or a TraceError that names `what`."""
    try:
        return json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{what} is no JSON ({error}); is the file truncated?") from error


def _decompressed(raw: IO[bytes]) -> IO[bytes]:
    magic = raw.read(2)
    raw.seek(0)
    return gzip.GzipFile(fileobj=raw) if magic == _GZIP_MAGIC else raw  # type: ignore[return-value]
