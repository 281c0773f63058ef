"""A change of a model that evaluation can apply and undo: pruned destinations, narrower experts, another store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Change:
    """A change with an exact inverse.

    Attributes:
        name: what to call it in results.
        apply: takes the model and returns a context manager, inside which the model is changed. It is entered many
            times, once for every batch of windows, so it should be cheap.
        settings: what it was made from, ready for JSON.
    """

    name: str
    apply: Callable[[Any], AbstractContextManager[Any]]
    settings: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary, ready for JSON."""
        return {"name": self.name, **self.settings}


@contextmanager
def changed(model: Any, changes: Sequence[Change]) -> Iterator[Any]:
    """The model with the changes applied, first to last; they are undone in reverse, on errors too."""
    with ExitStack() as stack:
        for change in changes:
            stack.enter_context(change.apply(model))
        yield model


def describe(changes: Sequence[Change]) -> str:
    """A few words on the changes, for messages."""
    return " and ".join(change.name for change in changes) or "no change"
