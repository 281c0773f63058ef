"""A spectrum in a folder, and folders that hold none."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from coterie.errors import InfeasiblePlacement
from coterie.placement.placement import Placement
from coterie.placement.spectrum_files import INDEX, KIND, load_spectrum, write_spectrum
from coterie.spec import MoESpec
from coterie.topology import Topology


def test_written_and_read(tmp_path: Path) -> None:
    spec = MoESpec("toy", 1, 4, 2)
    made = [Placement.from_devices([row], Topology(1, 2), spec) for row in ([0, 0, 1, 1], [0, 1, 0, 1])]
    index = write_spectrum(made, tmp_path)
    assert [entry["file"] for entry in index["placements"]] == ["place-0.json", "place-1.json"]
    found = load_spectrum(tmp_path)
    assert [np.array_equal(a.device_of_expert(), b.device_of_expert()) for a, b in zip(made, found, strict=True)]


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (None, "does not exist"),
        ({"kind": "other", "placements": [{"file": "a.json"}]}, "holds no spectrum"),
        ({"kind": KIND, "placements": []}, "holds no spectrum"),
        ({"kind": KIND, "placements": [{"file": "../a.json"}]}, "names a file outside its folder"),
        ({"kind": KIND, "placements": [3]}, "names a file outside its folder"),
        ({"kind": KIND, "placements": [{"file": "a.json"}]}, r"a\.json does not exist"),
    ],
)
def test_folders_that_hold_none(tmp_path: Path, index: object, words: str) -> None:
    if index is not None:
        (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(InfeasiblePlacement, match=words):
        load_spectrum(tmp_path)
