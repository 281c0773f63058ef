"""Every kind of file is recognised by its content, all problems are listed, and none passes that Placement refuses."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.engines.validate import validate
from coterie.errors import CoterieError, InfeasiblePlacement
from coterie.placement.placement import Placement
from coterie.spec import MoESpec
from coterie.topology import Topology

SPEC = MoESpec("small", 2, 8, 2, layer_ids=(1, 2), num_model_layers=3)


def _placement_json(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    path = tmp_path / "placement.json"
    rows = np.stack([np.random.default_rng(seed).permutation(8) for seed in range(2)])
    Placement(rows, Topology(2, 2), SPEC, {"name": "x"}, {}).save(path)
    return path, json.loads(path.read_text())


def test_a_sound_placement(tmp_path: Path) -> None:
    path, _ = _placement_json(tmp_path)
    report = validate(path, SPEC)
    assert (report.format, report.num_layers, report.num_slots, report.num_experts, report.num_devices) == (
        "placement", 2, 8, 8, 4,
    )  # fmt: skip
    assert report.valid
    assert report.notes == ()
    assert validate(path).notes == ("the model is not known: its layers and experts were not checked",)


def test_all_problems_are_listed_one_a_line(tmp_path: Path) -> None:
    path, good = _placement_json(tmp_path)
    rows = [[0, 0, 1, 2, 3, 4, 5, 9], [0, 1, 2, 3, 4, 5, "6", 7]]
    path.write_text(json.dumps(good | {"physical_to_logical_map": rows}))
    assert validate(path).problems == (
        "layer 1 holds '6'; expert ids are whole numbers",
        "layer 0 holds expert 9; experts run from 0 to 7",
        "layer 0 lacks expert 6, 7; every expert needs a slot",
        "layer 0 holds the same expert twice on one device: expert 0 on device 0",
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema_version": 9}, "schema 9"),
        ({"model": None}, "model is None; it must be an object"),
        ({"model": {"model": "x"}}, "the model's spec lacks num_experts, num_layers, top_k"),
        ({"topology": [8]}, "topology is [8]"),
        ({"topology": {"num_nodes": 3, "devices_per_node": 3}}, "8 experts on 9 devices"),
        ({"physical_to_logical_map": None}, "physical_to_logical_map is None"),
        ({"physical_to_logical_map": [list(range(8))]}, "2 layers of 8 slots need [2, 8]"),
        ({"physical_to_logical_map": [[*range(8), 0]] * 2}, "slots_per_device says [2, 2, 2, 2], the topology [3,"),
        ({"physical_to_logical_map": [list(range(8)), list(range(7))]}, "layer 1 has 7 slots, other layers 8"),
        ({"physical_to_logical_map": [list(range(8)), []]}, "layer 1 is []; it must be a list of expert ids"),
        ({"physical_to_logical_map": [list(range(8)), [True, *range(1, 8)]]}, "layer 1 holds True"),
        ({"metrics": 7}, "not iterable"),
    ],
)
def test_a_damaged_placement_never_passes(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path, good = _placement_json(tmp_path)
    path.write_text(json.dumps(good | changes))
    assert message in " | ".join(validate(path).problems)
    with pytest.raises(CoterieError):
        Placement.load(path)


def test_another_model_or_other_devices(tmp_path: Path) -> None:
    path, _ = _placement_json(tmp_path)
    other = MoESpec("other", 2, 8, 4)
    assert "the placement is for small" in validate(path, other).problems[0]
    elsewhere = MoESpec("small2", 2, 8, 2, layer_ids=(0, 1), num_model_layers=2)
    assert validate(path, elsewhere).problems == ("its MoE layers are not at the places where small2 has them",)
    assert validate(path, topology=Topology(1, 2)).problems[0] == "layer 0 is spread over 4 devices; there are 2"


def test_what_is_not_known_is_said(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text(json.dumps({"physical_to_logical_map": [[0, 1, 2, 2], [2, 1, 0, 0]]}))
    report = validate(path)
    assert report.valid
    assert report.num_experts == 3
    assert len(report.notes) == 3
    assert report.notes[2] == "4 slots for 3 experts: 1 hold a second copy"
    assert not validate(path, topology=Topology(1, 2)).valid  # expert 2 twice on device 1


def test_an_absurd_id_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text(json.dumps({"physical_to_logical_map": [[0, 1, 10**15, 3]]}))
    assert validate(path).problems == (
        "model layer 0 holds expert 1000000000000000; experts run from 0 to 3",
        "model layer 0 lacks expert 2; every expert needs a slot",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "object without named keys"),
        ("[]", "it holds a list"),
        ("hello", "it holds a str"),
        ("", "it holds a NoneType"),
        ('{"logical_count": [[1]]}', r"an object with the keys \['logical_count'\]"),
        ('{"kind": "coterie.width_plan", "physical_to_logical_map": [[0]]}', "no placement and no map"),
        ('{"physical_to_logical_map": [[0]], "physical_to_logical_map": [[0]]}', "written twice"),
        ('{"physical_to_logical_map": [[NaN]]}', "NaN"),
        ('{"physical_to_logical_map": [[0, 1]', "truncated"),
        (None, "does not exist"),
    ],
)
def test_unknown_files_are_refused(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "m.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InfeasiblePlacement, match=message):
        validate(path)


def test_an_engine_that_reads_json_only(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text("physical_to_logical_map:\n- [0, 1]\n- [1, 0]\n")
    report = validate(path)
    assert report.problems == ("it is YAML; SGLang reads JSON only",)
    assert "SGLang reads it only under a name that ends in .json" in report.notes


@pytest.mark.parametrize("rows", [[], {}, "x", 7, None, [[]], [7], [[1.5]], [["0"]], [[[0]]]])
def test_malformed_maps_never_pass(tmp_path: Path, rows: Any) -> None:
    path = tmp_path / "m.json"
    path.write_text(json.dumps({"physical_to_logical_map": rows}))
    assert not validate(path).valid
