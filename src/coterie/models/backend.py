"""Transformers, imported when first needed, and kept quiet while it works."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from coterie.errors import BackendUnavailable, ConfigError, unknown_name

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


def kernel_module(name: str, modules: Mapping[str, str], model: Any) -> Any:
    """The module with a kernel, imported.

    Args:
        name: of the kernel.
        modules: the kernels there are: name to module.
        model: what it is to run in.

    Raises:
        BackendUnavailable: when it needs Triton, which is not installed.
        ConfigError: for an unknown kernel, or Triton on a CPU, unless its interpreter is asked for.
    """
    if name not in modules:
        raise unknown_name("kernel", name, modules)
    if name == "triton" and importlib.util.find_spec("triton") is None:
        raise BackendUnavailable(
            "kernel='triton' needs triton, which is not installed; run: pip install 'coterie[triton]'"
        )
    if name == "triton" and next(model.parameters()).device.type == "cpu":
        runtime: Any = importlib.import_module("triton.knobs").runtime
        if not runtime.interpret:
            raise ConfigError(
                "kernel='triton' runs on GPUs and the model is on the CPU: use kernel='torch' (with TRITON_INTERPRET=1 "
                "in the environment it runs there too, slowly)"
            )
    return importlib.import_module(modules[name])


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
