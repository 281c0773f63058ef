"""Every error Coterie raises on purpose.

    CoterieError                what a user can cause or mend; the CLI prints one line and exits with 2
    ├── ConfigError             an option, a name or a topology that cannot be
    ├── TraceError              a routing trace or profile that is missing, damaged, or lacks what was asked of it
    ├── CheckpointError         a model folder or config that cannot be used
    ├── InfeasiblePlacement     a placement that cannot exist, or that an engine would misread
    ├── BudgetError             a byte budget that is too small
    ├── BackendUnavailable      an optional package or device that is not there
    └── RankError               a process of a group that is missing, ended, stalled or is out of step

Each message gives the value, the limit and the remedy.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class CoterieError(Exception):
    """The root of the tree; catch this to catch everything Coterie raises on purpose."""


class ConfigError(CoterieError):
    """An option, a name or a topology that cannot be."""


class TraceError(CoterieError):
    """A routing trace or profile that is missing, damaged, or lacks what was asked of it."""


class CheckpointError(CoterieError):
    """A model folder or config that cannot be used."""


class InfeasiblePlacement(CoterieError):
    """A placement that cannot exist, or that an engine would misread."""


class BudgetError(CoterieError):
    """A byte budget that is too small."""


class BackendUnavailable(CoterieError):
    """An optional package or device that is not there; the message holds the install command."""


class RankError(CoterieError):
    """A process of a group that is missing, ended, stalled or is out of step; named where it is known."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> ConfigError:
    """The error for a name that is not in a registry, with the nearest known name.

    Args:
        kind: what the name names, e.g. "placement method".
        name: what was asked for.
        known: the names that exist.
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return ConfigError(f"unknown {kind} {name!r}; {hint}choose one of: {', '.join(names)}")
