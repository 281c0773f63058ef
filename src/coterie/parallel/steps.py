"""Work in steps that need not be done twice: each leaves its output and a mark of what it was made from.

A step is reused when its mark names the same settings, the same outputs of the steps before it, and the output that is
there now. So a changed option redoes its own step and those after it, and a damaged or edited file is noticed.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import coterie
from coterie.errors import ConfigError
from coterie.files import write_text

KIND = "coterie.step"


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        name: what to call it; also the name of its mark.
        output: the file or folder it writes, relative to the folder of all steps.
        settings: all that decides its output, besides the outputs of the steps before it; ready for JSON.
        run: writes the output, whole or not at all, to the path it is given.
    """

    name: str
    output: str
    settings: Mapping[str, Any]
    run: Callable[[Path], None]


@dataclass(frozen=True)
class Done:
    """A step that is done.

    Attributes:
        name: its name.
        output: where its output is.
        seconds: how long it took when it ran.
        reused: whether it ran before and not now.
    """

    name: str
    output: Path
    seconds: float
    reused: bool

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary, ready for JSON."""
        return {"name": self.name, "output": str(self.output), "seconds": self.seconds, "reused": self.reused}


def run_steps(folder: Path, steps: Sequence[Step], told: Callable[[Done], None] = lambda done: None) -> list[Done]:
    """Do the steps in order, in a folder that is made where it is missing; what is done already is reused.

    Args:
        folder: where outputs and marks are.
        steps: in order; each may read the outputs of those before it.
        told: called after each step.

    Raises:
        ConfigError: when the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder}: {error.strerror}; choose another") from error
    found, before = [], ""
    for step in steps:
        output, mark = folder / step.output, folder / f"{step.name}.step.json"
        made_from = {
            "kind": KIND, "name": step.name, "settings": dict(step.settings), "before": before,
            "coterie": coterie.__version__,
        }  # fmt: skip
        known = _read(mark)
        digest = digest_of(output)
        reused = digest is not None and known == {**made_from, "output": digest, "seconds": known.get("seconds")}
        if not reused:
            mark.unlink(missing_ok=True)
            started = time.perf_counter()
            step.run(output)
            seconds, digest = time.perf_counter() - started, digest_of(output)
            assert digest is not None, f"{step.name} wrote no {output}"
            write_text(mark, json.dumps({**made_from, "output": digest, "seconds": seconds}, indent=1) + "\n")
        else:
            seconds = float(known["seconds"])
        before = f"{before}{digest}"
        found.append(Done(step.name, output, seconds, reused))
        told(found[-1])
    return found


def digest_of(path: Path) -> str | None:
    """Sixteen hex digits of a file's contents, or of all files in a folder; None when there is nothing."""
    if not path.exists():
        return None
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(path)}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as stream:
            while piece := stream.read(2**20):
                digest.update(piece)
    return digest.hexdigest()[:16]


def _read(mark: Path) -> dict[str, Any]:
    """What a mark says; nothing where it is missing or damaged."""
    try:
        data = json.loads(mark.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) and isinstance(data.get("seconds"), int | float) else {}
