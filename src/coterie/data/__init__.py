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


def text_names() -> list[str]:
    """The held-out texts that ship, one a domain; the models that ship were not trained on them."""
    return sorted(_text_files())


def text(name: str) -> str:
    """A held-out text that ships with the package.

    Args:
        name: one of `text_names()`.

    Raises:
        ConfigError: for a name that is not shipped.
    """
    found = _text_files()
    if name not in found:
        raise unknown_name("shipped text", name, found)
    data = found[name].read_bytes()
    return (lzma.decompress(data) if found[name].suffix == ".xz" else data).decode("utf-8")


def _text_files() -> dict[str, Path]:
    """The file of every text, plain or compressed, by its name without the endings; licences lie beside them."""
    folder = Path(str(files(__name__) / "text"))
    paths = [path for ending in ("txt", "txt.xz") for path in folder.glob(f"[!A-Z]*.{ending}")]
    return {path.name.removesuffix(".xz").removesuffix(".txt"): path for path in paths}
