"""What every study leaves behind: a folder with its page and its figures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.errors import ConfigError
from coterie.files import write_text

if TYPE_CHECKING:
    from coterie.report.page import Page


@contextmanager
def prepared_folder(out: Path | None) -> Iterator[None]:
    """Make the folder before the long work in the block; if that fails, what was made and is empty goes again.

    Args:
        out: the folder; None: nothing is to be made.

    Raises:
        ConfigError: when it cannot be.
    """
    made = _made(out) if out is not None else []
    try:
        yield
    except BaseException:  # Ctrl-C too
        with suppress(OSError):  # not empty, so not ours to remove
            for folder in made:
                folder.rmdir()
        raise


def _made(out: Path) -> list[Path]:
    """Make a folder and those it is in; which ones were made, innermost first."""
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {out}: {error.strerror}; choose another with --out") from None
    return made


def write_study(page: Page, result: dict[str, Any], out: Path) -> None:
    """Write index.html and study.json into a folder, each whole or not at all.

    Raises:
        ConfigError: when the folder cannot be made or written to.
    """
    _made(out)
    page.save(out / "index.html")
    write_text(out / "study.json", json.dumps(result, allow_nan=False, indent=1) + "\n")
