"""The standard tasks' definitions, and their questions from local files of JSON lines."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from coterie.errors import ConfigError, unknown_name

_SUFFIXES = (".jsonl", ".jsonl.gz")
_MAX_LINE_CHARACTERS = 2**20


@dataclass(frozen=True)
class TaskDefinition:
    """One task of `coterie/data/tasks.yaml`, which says what the fields mean."""

    name: str
    files: tuple[str, ...]
    fields: Mapping[str, Any]
    config: Mapping[str, Any]
    sample: str | None = None
    examples: tuple[str, ...] = ()
    likelihood: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Questions:
    """A task and its rows.

    Attributes:
        definition: the task.
        limit: how many rows were asked for; None for all.
        source: the file they come from, for people.
        rows: each with the task's fields.
        available: how many rows the file has.
        examples: worked examples to show before a question, where the task wants some.
    """

    definition: TaskDefinition
    limit: int | None
    source: str
    rows: list[dict[str, Any]]
    available: int
    examples: list[dict[str, Any]]


def definitions() -> dict[str, TaskDefinition]:
    """Every task that can be asked, by name."""
    import yaml

    entries = yaml.safe_load((files("coterie.data") / "tasks.yaml").read_text(encoding="utf-8"))
    return {
        name: TaskDefinition(
            name,
            tuple(entry["files"]),
            entry["fields"],
            entry["config"],
            entry.get("sample"),
            tuple(entry.get("examples", ())),
            entry.get("likelihood"),
        )
        for name, entry in entries.items()
    }


def task(name: str) -> TaskDefinition:
    """The task of that name.

    Raises:
        ConfigError: for an unknown name, with the nearest known one.
    """
    known = definitions()
    if name not in known:
        raise unknown_name("task", name, known)
    return known[name]


def load_tasks(names: Sequence[str], folder: Path | None = None, limit: int | None = None) -> list[Questions]:
    """The questions of tasks: all, or `limit` of each evenly spread over its file (files are often sorted by subject).

    Args:
        names: tasks of `definitions()`.
        folder: where their files are; None for the sample of `arc_easy` that ships.
        limit: how many rows at most.

    Raises:
        ConfigError: for an unknown task, or when a file is missing, damaged or lacks a field, with file and line.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"a limit of {limit} questions leaves none; choose at least 1")
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ConfigError(f"task {min(twice)} is named twice; name it once")
    return [_load(definition, folder, limit) for definition in [task(name) for name in names]]


def _load(definition: TaskDefinition, folder: Path | None, limit: int | None) -> Questions:
    if folder is None:
        path = _sample(definition)
        source = f"{path.name}, which ships with coterie"
    else:
        path = _find(definition.name, folder, definition.files)
        source = str(path)
    rows = read_rows(path, definition.fields)
    available = len(rows)
    if limit is not None and limit < available:
        rows = [rows[number * available // limit] for number in range(limit)]
    examples = [] if folder is None else _examples(definition, folder)
    return Questions(definition, limit, source, rows, available, examples)


def _examples(definition: TaskDefinition, folder: Path) -> list[dict[str, Any]]:
    """The worked examples of a task that shows some."""
    if not definition.examples:
        return []
    path = _find(definition.name, folder, definition.examples)
    rows = read_rows(path, definition.fields)
    wanted = definition.config["num_fewshot"]
    if len(rows) < wanted:
        raise ConfigError(f"{path} has {len(rows)} rows, task {definition.name} shows {wanted}; give a longer file")
    return rows


def read_rows(path: Path, fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines, plain or gzipped, reduced to the given fields.

    Raises:
        ConfigError: for a file that cannot be read or has no rows, or a malformed line, with its number.
    """
    rows = []
    for number, line in _lines(path):
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as reason:
            raise ConfigError(f"{where}: no JSON ({reason}); mend or remove the line") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{where}: a {type(row).__name__}, not an object with {', '.join(fields)}")
        for field, kind in fields.items():
            problem = _problem(row, field, kind)
            if problem:
                raise ConfigError(f"{where}: field {field!r} {problem}; mend or remove the line")
        rows.append({field: row[field] for field in fields})
    if not rows:
        raise ConfigError(f"{path} has no rows; check the path")
    return rows


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The numbered lines of a text file that are not blank."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            number = 0
            while line := file.readline(_MAX_LINE_CHARACTERS):
                number += 1
                if len(line) == _MAX_LINE_CHARACTERS:
                    raise ConfigError(f"{path}, line {number}: longer than a million characters; it is no question")
                if line.strip():
                    yield number, line
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as reason:
        raise ConfigError(f"cannot read {path} ({reason}); check that it is whole") from None


def _problem(row: Mapping[str, Any], field: str, kind: Any) -> str | None:
    """What is wrong with a field, if anything."""
    if field not in row:
        return "is missing"
    value = row[field]
    if isinstance(kind, list):
        right, wanted = value in kind and type(value) is type(kind[0]), f"one of {kind}"
    elif kind == "index":
        number = len(row["choices"])
        right, wanted = type(value) is int and 0 <= value < number, f"an index of the {number} choices"
    elif kind in ("texts", "four texts"):
        right = isinstance(value, list) and len(value) > 0 and all(isinstance(item, str) and item for item in value)
        right, wanted = right and (kind == "texts" or len(value) == 4), f"a list of {kind}"
    else:
        right, wanted = isinstance(value, str) and value != "", "a text"
        if right and kind == "blank":
            right, wanted = value.count("_") == 1, "a text with one blank (_)"
    return None if right else f"is {str(value)[:60]!r}, not {wanted}"


def _sample(definition: TaskDefinition) -> Path:
    if definition.sample is None:
        wanted = " or ".join(f"{stem}{_SUFFIXES[0]}" for stem in definition.files)
        raise ConfigError(f"task {definition.name} needs its file; give --task-data DIR with {wanted} (or .gz) in it")
    return Path(str(files("coterie.data") / definition.sample))


def _find(name: str, folder: Path, stems: Sequence[str]) -> Path:
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; give the one that holds the task files")
    for stem in stems:
        for suffix in _SUFFIXES:
            path = folder / f"{stem}{suffix}"
            if path.is_file():
                return path
    wanted = " or ".join(f"{stem}{_SUFFIXES[0]}" for stem in stems)
    raise ConfigError(f"{folder} has no file for task {name}; put {wanted} (or .gz) there")
