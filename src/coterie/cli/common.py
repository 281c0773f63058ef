"""What every verb shares: progress on stderr, results on stdout, tables."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from coterie.progress import Progress

_QUIET_SECONDS = 1.0

JsonOption = Annotated[bool, typer.Option("--json", help="Print exactly one JSON object on stdout.")]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Same seed, same result.")]


class Interrupted(Exception):
    """Ctrl-C in a command that leaves something behind; the message says what, and what to do with it."""


@contextmanager
def progress() -> Iterator[Progress]:
    """A progress listener that shows a bar on stderr once work has taken a second; nothing if that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from coterie.progress import silent

    console = Console(stderr=True)
    if not console.is_terminal:
        yield silent
        return
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn(),
        console=console, transient=True,
    )  # fmt: skip
    started = time.monotonic()
    tasks: dict[str, Any] = {}

    def listen(what: str, done: int, total: int) -> None:
        if what not in tasks:
            if time.monotonic() - started < _QUIET_SECONDS:
                return
            bar.start()
            tasks[what] = bar.add_task(what, total=total)
        bar.update(tasks[what], completed=done, total=total)

    try:
        yield listen
    finally:
        if tasks:  # stopping a bar that never showed prints a blank line
            bar.stop()


@contextmanager
def warnings_as_notes() -> Iterator[None]:
    """Print what the library warns of as one line each on stderr, after the work; nothing is lost on an error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            yield
        finally:
            for warning in caught:
                note(f"warning: {warning.message}")


def emit_json(result: Mapping[str, Any]) -> None:
    """Print the one JSON object of a `--json` command."""
    print(json.dumps(result, allow_nan=False))  # noqa: T201 - this is the CLI's output


def say(text: str = "") -> None:
    """Print a line of a result for people."""
    from rich.console import Console

    Console(highlight=False, soft_wrap=True).print(text, markup=False)


def note(text: str) -> None:
    """Print a remark on stderr: it is no part of the result."""
    from rich.console import Console

    Console(stderr=True, highlight=False, soft_wrap=True).print(text, markup=False)


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], title: str | None = None) -> None:
    """Print a table, the first column left-aligned and the others right-aligned."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    told = None if title is None else Text(title, "table.title")  # as text: a [name] in it is no markup
    drawn = Table(title=told, box=SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for index, column in enumerate(columns):
        drawn.add_column(Text(column), justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        drawn.add_row(*(Text(f"{item:.3f}" if isinstance(item, float) else str(item)) for item in row))
    terminal = Console(highlight=False)
    # a file or a pipe has no width, and rich would take 80 columns for it and cut the cells short
    console = terminal if terminal.is_terminal else Console(highlight=False, width=160)
    console.print(drawn)
