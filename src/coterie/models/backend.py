"""Transformers, imported when first needed, and kept quiet while it works."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from coterie.errors import BackendUnavailable


def import_transformers() -> Any:
    """The package `transformers`, with torch behind it.

    Raises:
        BackendUnavailable: when one of them is not installed.
    """
    for name in ("torch", "transformers"):
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            raise BackendUnavailable(
                f"running models needs {name}, which is not installed; run: pip install 'coterie[models]'"
            ) from error
    return module


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
