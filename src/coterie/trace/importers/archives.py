"""What can go wrong in a zip archive, and what it holds."""

from __future__ import annotations

import struct
import zipfile
import zlib
from pathlib import Path

DAMAGE = (OSError, EOFError, ValueError, RuntimeError, struct.error, zlib.error, zipfile.BadZipFile)
"""What `zipfile` raises for archives that are damaged, encrypted, or packed by a method that is not there."""
ZIP_MAGIC = b"PK\x03\x04"


def member_names(path: Path) -> list[str]:
    """The names in the archive; none when it is no archive."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except DAMAGE:
        return []


def begins_as_archive(path: Path) -> bool:
    """Whether the file begins as a zip archive does, whole or not."""
    try:
        with path.open("rb") as file:
            return file.read(len(ZIP_MAGIC)) == ZIP_MAGIC
    except OSError:
        return False
