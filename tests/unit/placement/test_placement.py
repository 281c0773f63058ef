"""The placement itself: maps, their inverse, and a JSON file that is right or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError, InfeasiblePlacement
from coterie.placement.placement import Placement
from coterie.spec import MoESpec
from coterie.topology import Topology

SPEC = MoESpec("toy", 2, 5, 2)
TWO = Topology.parse("2")
DEVICES = [[1, 0, 0, 1, 0], [0, 1, 1, 0, 0]]


def make(**fields: Any) -> Placement:
    return Placement.from_devices(DEVICES, TWO, SPEC, **fields)


def test_a_device_owns_a_run_of_slots_with_experts_in_rising_order() -> None:
    found = make()
    assert found.physical_to_logical_map.tolist() == [[1, 2, 4, 0, 3], [0, 3, 4, 1, 2]]
    assert found.slots_per_device.tolist() == [3, 2]
    assert found.device_of_slot().tolist() == [0, 0, 0, 1, 1]
    assert found.device_of_expert().tolist() == DEVICES


def test_slots_within_a_device_may_stand_in_any_order() -> None:
    found = Placement(np.array([[4, 1, 2, 3, 0], [0, 3, 4, 2, 1]]), TWO, SPEC)
    assert found.device_of_expert().tolist() == DEVICES


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        ([[0, 0, 0, 1, 1], [0, 0, 1, 1, 1]], r"layer 1 puts \[2, 3\] experts on devices with \[3, 2\] slots"),
        ([[0, 0, 0, 1, 2], [0, 0, 0, 1, 1]], r"layer 0 puts \[3, 1, 1\] experts"),
        ([[0, 0, 0, 1, 1]], r"shape \[1, 5\]; 2 layers of 5 slots"),
        ([[0, 0, 1, 1], [0, 0, 1, 1]], "layer 0 puts"),
    ],
)
def test_devices_that_do_not_fit_are_refused(devices: Any, words: str) -> None:
    with pytest.raises(InfeasiblePlacement, match=words):
        Placement.from_devices(devices, TWO, SPEC)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ([0, 1, 2, 3, 3], "layer 1 holds expert 3 2 times"),
        ([0, 1, 2, 3, 5], "layer 1 holds expert 5; experts run from 0 to 4"),
        ([0, 1, 2, 3, -1], "layer 1 holds expert -1"),
    ],
)
def test_maps_that_lose_an_expert_are_refused(row: list[int], words: str) -> None:
    with pytest.raises(InfeasiblePlacement, match=words):
        Placement(np.array([[0, 1, 2, 3, 4], row]), TWO, SPEC)


def test_another_model_is_refused() -> None:
    found = make()
    found.require_model(MoESpec("same shape, other name", 2, 5, 2), "the trace")
    for spec in (MoESpec("o", 3, 5, 2), MoESpec("o", 2, 6, 2), MoESpec("o", 2, 5, 1)):
        with pytest.raises(
            InfeasiblePlacement, match=r"placement is for toy \(2 layers, 5 experts, top-2\), the trace is"
        ):
            found.require_model(spec, "the trace")


def test_a_file_comes_back_as_it_was(tmp_path: Path) -> None:
    topology = Topology(2, 1, 3.5, (2, 3), 1e9, 2e9)
    spec = MoESpec("toy", 2, 5, 2, 1, 1, (1, 2), 3, 64)
    rows = np.array([[4, 1, 2, 3, 0], [0, 3, 4, 2, 1]])
    written = Placement(rows, topology, spec, {"name": "cap", "seed": 3}, {"fit": {"dpt": 1.25, "layers": {}}})
    written.save(tmp_path / "p.json")
    read = Placement.load(tmp_path / "p.json")
    np.testing.assert_array_equal(read.physical_to_logical_map, rows)
    assert (read.topology, read.spec, read.method, read.metrics) == (topology, spec, written.method, written.metrics)
    assert read.to_json() == written.to_json()


def test_the_file_is_for_people_too(tmp_path: Path) -> None:
    make().save(tmp_path / "p.json")
    text = (tmp_path / "p.json").read_text()
    assert "\n  [1, 2, 4, 0, 3],\n" in text  # a layer a line
    assert json.loads(text)["slots_per_device"] == [3, 2]
    assert json.loads(text)["kind"] == "coterie.placement"


def drop(key: str) -> Any:
    return lambda data: data.pop(key)


def put(*path_and_value: Any) -> Any:
    *path, last, value = path_and_value

    def change(data: Any) -> None:
        for key in path:
            data = data[key]
        data[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (put("kind", "coterie.spectrum"), "no Coterie placement"),
        (drop("kind"), "no Coterie placement"),
        (put("schema_version", 2), "schema 2, this version reads 1; upgrade"),
        (drop("physical_to_logical_map"), "lacks 'physical_to_logical_map'"),
        (drop("model"), "lacks 'model'"),
        (drop("metrics"), "lacks 'metrics'"),
        (put("physical_to_logical_map", 0, 0, 9), "layer 0 holds expert 9"),
        (put("physical_to_logical_map", 0, 0, 10**30), "no expert id"),
        (put("physical_to_logical_map", 0, 0, 1.0), "no expert id"),
        (put("physical_to_logical_map", 0, 0, True), "no expert id"),
        (put("physical_to_logical_map", 0, []), "no list of lists"),
        (put("physical_to_logical_map", 0, [0, 1, 2]), "3 to 5 slots"),
        (put("physical_to_logical_map", "01234"), "no list of lists"),
        (put("model", "num_experts", 6), "need"),
        (put("model", "num_experts", 10**30), "p.json"),
        (put("model", "num_layers", 10**30), "p.json"),
        (put("model", "num_experts", 0), "at least 1"),
        (put("model", 5), "p.json"),
        (put("model", "top_k", "2"), "must be an integer"),
        (put("topology", "devices_per_node", 3), r"slots_per_device says \[3, 2\], the topology \[2, 2, 1\]"),
        (drop("slots_per_device"), "lacks 'slots_per_device'"),
        (put("topology", "num_nodes", 10**30), "at most 4096"),
        (put("topology", "inter_cost", 10**400), "p.json"),
        (put("topology", "intra_bandwidth_bytes_per_s", 10**400), "p.json"),
        (put("topology", "colour", 1), "unknown key 'colour'"),
        (put("topology", []), "p.json"),
        (put("method", 3), "p.json"),
        (put("metrics", "abc"), "p.json"),
    ],
)
def test_a_damaged_file_is_one_clear_error(tmp_path: Path, change: Any, words: str) -> None:
    path = tmp_path / "p.json"
    data = json.loads(make().to_json())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(InfeasiblePlacement, match=words) as raised:
        Placement.load(path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000])
def test_what_is_no_json_object_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "p.json").write_bytes(content)
    with pytest.raises(InfeasiblePlacement, match=r"p\.json"):
        Placement.load(tmp_path / "p.json")


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(InfeasiblePlacement, match="does not exist"):
        Placement.load(tmp_path / "p.json")
    with pytest.raises(InfeasiblePlacement, match="cannot read"):
        Placement.load(tmp_path)
    with pytest.raises(ConfigError, match="choose a folder that exists"):
        make().save(tmp_path / "missing" / "p.json")
