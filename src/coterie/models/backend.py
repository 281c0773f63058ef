"""Transformers, imported when first needed, and kept quiet while it works."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from coterie.errors import BackendUnavailable

OLDEST, NEXT = (5, 23), (5, 26)  # versions of Transformers: what is undocumented is known to hold in between


def import_transformers() -> Any:
    """The package `transformers`, with torch behind it.

    Raises:
        BackendUnavailable: when one of them is not installed, or transformers in another version.
    """
    for name in ("torch", "transformers"):
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            raise BackendUnavailable(
                f"running models needs {name}, which is not installed; run: pip install 'coterie[models]'"
            ) from error
    version = tuple(int(part) for part in module.__version__.split(".")[:2])
    if not OLDEST <= version < NEXT:
        raise BackendUnavailable(
            f"transformers {module.__version__} is installed; models run with {_text(OLDEST)} and newer, below "
            f"{_text(NEXT)}; run: pip install 'coterie[models]'"
        )
    return module


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and no reports of Transformers inside the block; what it found is told by our errors."""
    logging = importlib.import_module("transformers.utils.logging")
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
