"""A change of a model that evaluation can apply and undo: pruned destinations, narrower experts, another store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any


def _nothing() -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Change:
    """A change with an exact inverse.

    Attributes:
        name: what to call it in results.
        apply: takes the model and, where they are known, the numbers of the sequences that the batch's rows hold
            (else None); returns a context manager, inside which the model is changed. It is entered anew for every
            batch of windows, so it should be cheap.
        settings: what it was made from, ready for JSON.
        measured: what it has counted so far, ready for JSON.
    """

    name: str
    apply: Callable[[Any, Sequence[int] | None], AbstractContextManager[Any]]
    settings: Mapping[str, Any] = field(default_factory=dict)
    measured: Callable[[], dict[str, Any]] = _nothing

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary, ready for JSON."""
        return {"name": self.name, **self.settings, **self.measured()}


@contextmanager
def changed(model: Any, changes: Sequence[Change], sequences: Sequence[int] | None = None) -> Iterator[Any]:
    """The model with the changes applied, first to last; they are undone in reverse, on errors too.

    Args:
        model: a model.
        changes: what to apply.
        sequences: numbers of the sequences that the rows of the batch hold, where the batch is known.
    """
    with ExitStack() as stack:
        for change in changes:
            stack.enter_context(change.apply(model, sequences))
        yield model


def describe(changes: Sequence[Change]) -> str:
    """A few words on the changes, for messages."""
    return " and ".join(change.name for change in changes) or "no change"
