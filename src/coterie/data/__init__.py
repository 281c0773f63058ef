"""Small real inputs that ship with the package; README.md beside them says where each comes from."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from coterie.errors import unknown_name

NAMES = ("dsv2lite-intent", "dsv2lite-law", "gptoss20b-decode")


def path(name: str) -> Path:
    """The file of a shipped trace, an .npz.

    Raises:
        ConfigError: for a name that is not shipped.
    """
    if name not in NAMES:
        raise unknown_name("shipped trace", name, NAMES)
    return Path(str(files(__name__) / f"{name}.npz"))
