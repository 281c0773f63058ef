"""Small real inputs that ship with the package; README.md beside them says where each comes from."""

from __future__ import annotations

import lzma
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


def text_names() -> tuple[str, ...]:
    """The domains of which a held-out text ships, in order."""
    return tuple(sorted(_texts()))


def text(name: str) -> str:
    """A shipped text, held out from what the shipped models were trained on.

    Raises:
        ConfigError: for a domain that is not shipped.
    """
    texts = _texts()
    if name not in texts:
        raise unknown_name("text domain", name, texts)
    stored = texts[name].read_bytes()
    return (lzma.decompress(stored) if texts[name].suffix == ".xz" else stored).decode("utf-8")


def _texts() -> dict[str, Path]:
    """The file of each text; capitals mark licences and notes."""
    folder = Path(str(files(__name__) / "text"))
    found = (path for path in folder.glob("*.txt*") if path.name.islower())
    return {path.name.partition(".txt")[0]: path for path in found}
