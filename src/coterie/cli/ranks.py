"""What verbs that run in several processes share: joining the others, and one line from rank 0 on an error."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.cli.common import warnings_as_notes

if TYPE_CHECKING:
    from coterie.parallel.comms import Comms
    from coterie.parallel.processes import Launch

TimeoutOption = Annotated[float, typer.Option("--timeout", help="Seconds to wait for another process.")]
_QUIET, _LINGER_SECONDS = 2, 1.0


@contextmanager
def ranks(timeout: float) -> Iterator[tuple[Comms, Launch]]:
    """The group that torchrun started, while the block runs.

    Raises:
        CoterieError: on rank 0; the others exit with the same code and no word.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # an error is one line; torch reads this when imported
    from coterie.models.backend import import_transformers

    import_transformers()
    from coterie.parallel.processes import Launch, ToldByRankZero, joined

    try:
        launch = Launch.of_environment()
        with warnings_as_notes(), joined(launch, timeout) as comms:
            yield comms, launch
    except ToldByRankZero:
        time.sleep(_LINGER_SECONDS)  # torchrun ends all ranks when one ends, and rank 0 has a line to print
        raise typer.Exit(_QUIET) from None


def try_writing(*files: Path | None) -> None:
    """Raise for a place that cannot be written, before the work; what is there stays."""
    from coterie.errors import ConfigError

    for file in files:
        if file is not None and (file.is_dir() or not os.access(file.absolute().parent, os.W_OK)):
            raise ConfigError(f"cannot write {file}: name a file in a folder that exists and is writable")
