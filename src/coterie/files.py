"""Output files that exist whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coterie.errors import ConfigError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, renamed to it when the block ends well and removed when it does not.

    An exception, Ctrl-C included, leaves the old file (or none) as it was. The new file gets the
    permissions any newly created file would get.

    Raises:
        ConfigError: when the folder is missing or cannot be written, or the disk is full.
    """
    path = Path(path)
    if path.is_dir():
        raise ConfigError(f"cannot write {path}: it is a folder; name a file in it")
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
        os.close(handle)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
    except OSError as error:
        reason = f"{error.strerror}; choose a folder that exists and is writable"
        raise ConfigError(f"cannot write {path}: {reason}") from error
    temporary = Path(name)
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        reason = f"{error.strerror or error}; free some space or choose another folder"
        raise ConfigError(f"cannot write {path}: {reason}") from error
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8 to `path`, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
