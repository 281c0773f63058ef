"""Profiling that was interrupted: its sums on disk, taken up again only by the same run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coterie.calibration.sums import Sums
from coterie.errors import ConfigError, TraceError
from coterie.profile.profile_file import read_arrays, write_arrays

_KIND, _VERSION = "profile_in_progress", 1


def save_state(path: Path, sums: Sums, settings: Mapping[str, Any]) -> None:
    """Write the sums, whole or not at all."""
    described = {
        "settings": dict(settings), "windows": sums.windows, "num_tokens": sums.num_tokens, "nats": sums.nats.hex(),
        "ablated": sums.ablated,
    }  # fmt: skip
    write_arrays(path, _KIND, _VERSION, dict(sums.arrays()), described)


def load_state(path: Path, sums: Sums, settings: Mapping[str, Any]) -> None:
    """Take up the sums at `path`.

    Args:
        path: what `save_state` wrote.
        sums: fresh ones of this run; they are overwritten.
        settings: what decides this run's result.

    Raises:
        ConfigError: when the file is damaged, or of another model, text or setting.
    """
    remedy = f"delete {path}, or choose another output"
    try:
        arrays, described = read_arrays(path, _KIND, _VERSION)
    except TraceError as error:
        raise ConfigError(f"cannot go on from {path}: {error}; or {remedy}") from error
    theirs = described.get("settings", {})
    differing = [name for name, value in settings.items() if theirs.get(name) != value]
    if differing:
        name = differing[0]
        raise ConfigError(
            f"{path} is of another run ({name} was {theirs.get(name)!r} and is {settings[name]!r}); repeat that run to "
            f"finish it, or {remedy}"
        )
    try:
        same = all(
            arrays[name].shape == mine.shape and arrays[name].dtype == mine.dtype for name, mine in sums.arrays()
        )
        counts = tuple(int(described[name]) for name in ("windows", "num_tokens", "ablated"))
        nats = float.fromhex(described["nats"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"cannot go on from {path}: it lacks {error}; {remedy}") from error
    if not same:
        raise ConfigError(f"cannot go on from {path}: its arrays are of another shape; {remedy}")
    sums.fill(arrays)
    sums.windows, sums.num_tokens, sums.ablated = counts
    sums.nats = nats
