"""A spectrum of placements in a folder: place-0.json, place-1.json, ... and index.json, which says what each is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coterie.errors import InfeasiblePlacement
from coterie.files import write_text
from coterie.placement.placement import Placement, read_json

KIND = "coterie.spectrum"
INDEX = "index.json"


def index_entry(placement: Placement) -> dict[str, Any]:
    """What is said of one placement: its method and the means over layers of its metrics."""
    metrics = {
        part: {key: value for key, value in values.items() if key != "layers"}
        for part, values in placement.metrics.items()
    }
    return {"method": dict(placement.method), "metrics": metrics}


def write_spectrum(placements: Sequence[Placement], folder: Path) -> dict[str, Any]:
    """Write place-0.json ... and index.json into a folder that is there; returns the index."""
    names = [f"place-{number}.json" for number in range(len(placements))]
    entries = [{"file": name, **index_entry(placement)} for name, placement in zip(names, placements, strict=True)]
    index = {"kind": KIND, "placements": entries}
    for name, placement in zip(names, placements, strict=True):
        placement.save(folder / name)
    write_text(folder / INDEX, json.dumps(index, indent=1, allow_nan=False) + "\n")
    return index


def load_spectrum(folder: Path) -> list[Placement]:
    """The placements of a folder that `write_spectrum` filled, in order.

    Raises:
        InfeasiblePlacement: when it holds no spectrum, or a damaged one.
    """
    index = read_json(folder / INDEX)
    entries = index.get("placements")
    if index.get("kind") != KIND or not isinstance(entries, list) or not entries:
        raise InfeasiblePlacement(f"{folder} holds no spectrum; make one with coterie place --spectrum")
    names = [entry.get("file") if isinstance(entry, dict) else None for entry in entries]
    if any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise InfeasiblePlacement(f"{folder / INDEX} names a file outside its folder; make the spectrum again")
    return [Placement.load(folder / str(name)) for name in names]
