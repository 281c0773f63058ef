"""The plain map: unequal devices are allowed, everything else is checked."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from coterie.engines.base import export_file
from coterie.engines.plain_json import PlainJsonExporter
from coterie.engines.validate import validate
from coterie.placement.placement import Placement
from coterie.spec import MoESpec
from coterie.topology import Topology

SPEC = MoESpec("small", 3, 10, 2, layer_ids=(1, 2, 4), num_model_layers=5)
PLACEMENT = Placement(
    np.stack([np.random.default_rng(seed).permutation(10) for seed in range(3)]),
    Topology(2, 2, slots_per_device=(4, 3, 2, 1)),
    SPEC,
)


def _document(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    path = tmp_path / "map.json"
    export_file(PlainJsonExporter(), PLACEMENT, path)
    return path, json.loads(path.read_text())


def test_the_file_tells_the_device_of_every_expert(tmp_path: Path) -> None:
    path, document = _document(tmp_path)
    assert document["layer_ids"] == [1, 2, 4]
    assert (document["num_devices"], document["devices_per_node"]) == (4, 2)
    assert MoESpec.from_json(document["model"]) == SPEC
    home = PLACEMENT.device_of_expert()
    for layer, row in enumerate(document["physical_to_logical_map"]):
        slots = iter(row)
        for device, count in enumerate(document["slots_per_device"]):
            assert all(home[layer, next(slots)] == device for _ in range(count))
    report = validate(path, SPEC)
    assert (report.valid, report.format, report.num_devices) == (True, "json", 4)
    assert "renumber the checkpoint" in export_file(PlainJsonExporter(), PLACEMENT, path).notes[0]


def test_damage(tmp_path: Path) -> None:
    path, good = _document(tmp_path)
    rows = good["physical_to_logical_map"]
    for changes, message in [
        ({"schema_version": 2}, "schema_version is 2"),
        ({"slots_per_device": [4, 3, 3]}, "num_devices is 4 for 3"),
        ({"slots_per_device": [4, 3, 2, 2]}, "layer 0 has 10 slots, slots_per_device adds up to 11"),
        ({"slots_per_device": [4, 3, 2, True]}, "it must list the slots of each device"),
        ({"slots_per_device": None}, "slots_per_device is None"),
        ({"layer_ids": [1, 2]}, "layer_ids is [1, 2]"),
        ({"layer_ids": [1, 2, 3]}, "its layer_ids run from 1 to 3"),
        ({"physical_to_logical_map": rows[:2], "layer_ids": []}, "2 sound layers for the 3 MoE layers of small"),
        ({"physical_to_logical_map": {}}, "physical_to_logical_map is {}"),
        ({"physical_to_logical_map": [*rows[:2], [0] * 10]}, "layer 2 lacks expert 1, 2, 3 and 6 more"),
        ({"physical_to_logical_map": [*rows[:2], [0] * 10]}, "twice on one device: expert 0 on device 0"),
    ]:
        path.write_text(json.dumps(good | changes))
        assert message in " | ".join(validate(path, SPEC).problems)
