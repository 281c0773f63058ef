"""Output files that exist whole or not at all, and small input files that are never trusted."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from coterie.errors import ConfigError, CoterieError

MAX_TEXT_BYTES = 64 * 2**20


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
    except OSError as error:
        reason = f"{error.strerror}; choose a folder that exists and is writable"
        raise ConfigError(f"cannot write {path}: {reason}") from error
    temporary = Path(name)
    try:
        yield temporary
        os.chmod(temporary, 0o666 & ~umask)  # at the end, since some libraries put a file of their own there
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


def read_text(path: Path, error: type[CoterieError], *, remedy: str = "check the path") -> str:
    """The UTF-8 text of a small file (placements, maps, configs), never more than `MAX_TEXT_BYTES` of it.

    Args:
        path: the file.
        error: what to raise.
        remedy: what to do about a file that is no text.

    Raises:
        CoterieError: the given `error`, when the file is missing, unreadable, too large or no text.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TEXT_BYTES + 1)
    except FileNotFoundError:
        raise error(f"{path} does not exist; check the path") from None
    except (OSError, ValueError) as reason:  # ValueError: a NUL in the path
        raise error(f"cannot read {path}: {getattr(reason, 'strerror', None) or reason}") from reason
    if len(data) > MAX_TEXT_BYTES:
        raise error(f"{path} is larger than {MAX_TEXT_BYTES // 2**20} MiB; it is no placement, map or config")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as reason:
        raise error(f"{path} is no UTF-8 text (byte {reason.start}); {remedy}") from None


def about_file(path: Path, message: str) -> str:
    """A message of something wrong in a file or folder, with its path in front unless the message names it already."""
    for said in (str(path), path.name):
        found = re.search(rf"(?<!\S){re.escape(said)}(?=[\s:;,]|$)", message)
        if found:
            return f"{message[: found.start()]}{path}{message[found.end() :]}"
    return f"{path}: {message}"


def parse_json(
    text: str, source: str | Path, error: type[CoterieError], *, strict: bool = False, remedy: str = "write it again"
) -> Any:
    """The JSON value in `text`.

    Args:
        text: the JSON.
        source: what to call it in messages.
        error: what to raise.
        strict: also refuse NaN, infinities and a key that is written twice, where the last would silently win.
        remedy: what to do about JSON that is none.

    Raises:
        CoterieError: the given `error`, when the text is truncated, no JSON, or nested too deeply.
    """
    try:
        if strict:
            return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_unique_keys)
        return json.loads(text)
    except (ValueError, RecursionError) as reason:
        raise error(f"{source} is truncated or no JSON ({reason}); {remedy}") from reason


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} is written twice")
    return values


@contextmanager
def replacing_folder(path: Path, mark: str) -> Iterator[Path]:
    """A temporary folder beside `path` that takes its place when the block ends well.

    A folder that is there already is only replaced if it is empty, or if the same command wrote it: it holds a file
    named `mark`, and no file that the new one does not hold too (numbers in their names aside).

    Raises:
        ConfigError: when `path` is something else, the current folder, or cannot be written.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not (target.is_dir() and ((target / mark).is_file() or not any(target.iterdir()))):
        raise ConfigError(f"{path} exists and was not written by this command; name a new folder")
    if Path.cwd().is_relative_to(target):
        raise ConfigError(f"{path} is the current folder and cannot be replaced; name a folder in it")
    try:
        scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.", suffix=".partial"))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; choose a folder that exists") from error
    new, old = scratch / "new", scratch / "old"
    try:
        new.mkdir()
        yield new
        strangers = _shapes(target) - _shapes(new)
        if strangers:
            raise ConfigError(f"{path} holds {min(strangers)}, which this command did not write; name a new folder")
        if target.exists():
            target.rename(old)
        new.rename(target)
    except OSError as error:
        reason = f"{error.strerror or error}; free some space or choose another folder"
        raise ConfigError(f"cannot write {path}: {reason}") from error
    finally:
        if old.exists() and not target.exists():
            old.rename(target)
        shutil.rmtree(scratch, ignore_errors=True)


def refuse_own_folder(source: Path, target: Path) -> None:
    """Refuse to write a model's copy into its own folder, or around it.

    Raises:
        ConfigError: when one of the folders is in the other.
    """
    if target.resolve().is_relative_to(source.resolve()) or source.resolve().is_relative_to(target.resolve()):
        raise ConfigError(f"{target} is the model's own folder; name a new one, beside it")


def _shapes(folder: Path) -> set[str]:
    """The files in a folder and below, every number in their names written as #."""
    files = (found for found in folder.rglob("*") if found.is_symlink() or not found.is_dir())
    return {re.sub(r"\d+", "#", str(found.relative_to(folder))) for found in files}


def distinct(paths: Sequence[str], what: str) -> list[str]:
    """Short names for files, the folder and the ending left out.

    Args:
        paths: where they are.
        what: what to call them, "traces".

    Raises:
        ConfigError: when two have the same.
    """
    short = [path.rstrip("/").rpartition("/")[2].partition(".")[0] for path in paths]
    for name in short:
        if short.count(name) > 1:
            raise ConfigError(f"{short.count(name)} {what} are called {name!r}; give each once, or rename one")
    return short
