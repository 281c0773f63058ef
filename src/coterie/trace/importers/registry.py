"""The formats by name, imported when first used, and which of them a file is."""

from __future__ import annotations

import importlib
from pathlib import Path

from coterie.errors import TraceError, unknown_name
from coterie.trace.importers.base import Importer

FORMATS = {
    "npz": ("coterie.trace.importers.npz", "NpzImporter"),
    "sglang": ("coterie.trace.importers.sglang", "SglangImporter"),
    "vllm": ("coterie.trace.importers.vllm", "VllmImporter"),
    "jsonl": ("coterie.trace.importers.jsonl", "JsonlImporter"),
}


def importer(name: str) -> Importer:
    """The importer of that name.

    Raises:
        ConfigError: for a name that is not known.
    """
    if name not in FORMATS:
        raise unknown_name("trace format", name, FORMATS)
    module, attribute = FORMATS[name]
    found: Importer = getattr(importlib.import_module(module), attribute)()
    return found


def detect(path: Path) -> Importer:
    """The importer that recognises the file or folder by its content.

    Raises:
        TraceError: when none does, or more than one.
    """
    found = [candidate for candidate in map(importer, FORMATS) if candidate.sniff(path)]
    if len(found) == 1:
        return found[0]
    names = " or ".join(candidate.name for candidate in found)
    if found:
        raise TraceError(f"{path} may be {names}; name its format with --format")
    if path.is_file() and path.stat().st_size == 0:
        raise TraceError(f"{path} is empty; record it again")
    raise TraceError(
        f"{path} is of no known trace format; name one with --format: {', '.join(FORMATS)}; tables of loads "
        "without tokens are read by coterie loads"
    )
