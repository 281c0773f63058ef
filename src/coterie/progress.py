"""How long work tells its caller how far it is, without knowing who listens."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called as (what, done, total); `what` names the stage, counts are in the stage's own unit."""


def silent(what: str, done: int, total: int) -> None:
    """The listener that listens to nothing; the default everywhere."""
