"""What every study leaves behind: a folder with its page and its figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.errors import ConfigError
from coterie.files import write_text

if TYPE_CHECKING:
    from coterie.report.page import Page


def prepare_folder(out: Path) -> None:
    """Make the folder, before the long work.

    Raises:
        ConfigError: when it cannot be.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {out}: {error.strerror}; choose another with --out") from None


def write_study(page: Page, result: dict[str, Any], out: Path) -> None:
    """Write index.html and study.json into a folder, each whole or not at all.

    Raises:
        ConfigError: when the folder cannot be made or written to.
    """
    prepare_folder(out)
    page.save(out / "index.html")
    write_text(out / "study.json", json.dumps(result, allow_nan=False, indent=1) + "\n")
