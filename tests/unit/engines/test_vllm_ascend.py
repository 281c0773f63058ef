"""vllm-ascend's own loading rule, stated again, over the files written for it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.engines.base import export_file
from coterie.engines.validate import validate
from coterie.engines.vllm_ascend import VllmAscendExporter
from coterie.errors import InfeasiblePlacement
from coterie.placement.placement import Placement
from coterie.spec import MoESpec
from coterie.topology import Topology

SPEC = MoESpec("DeepSeek-V2-Lite", 26, 64, 6, layer_ids=tuple(range(1, 27)), num_model_layers=27)


def load_layer(path: Path, moe_layer: int, num_experts: int, ep_size: int) -> tuple[np.ndarray, np.ndarray]:
    """For one MoE layer (counted from 0) the local slot of each expert on each rank, and the slot tokens go to."""
    data = json.loads(path.read_text())
    if moe_layer > data["moe_layer_count"]:
        raise ValueError("Invalid EPLB Table")
    held = np.array([device["device_expert"] for device in data["layer_list"][moe_layer]["device_list"]])
    assert held.dtype.kind == "i"  # a ragged list is no tensor
    local = np.full((ep_size, num_experts), -1)
    for rank in range(ep_size):
        local[rank, held[rank]] = np.arange(held.shape[1])
    per_rank = int((local[0] >= 0).sum())  # slots are numbered by rank 0's count
    physical = np.full(num_experts, 0)
    for expert in range(num_experts):
        ranks = np.flatnonzero(local[:, expert] >= 0)
        if len(ranks):
            physical[expert] = ranks[0] * per_rank + local[ranks[0], expert]
    return local, physical


def _placement(spec: MoESpec = SPEC, devices: int = 8) -> Placement:
    rng = np.random.default_rng(1)
    rows = np.stack([rng.permutation(spec.num_experts) for _ in range(spec.num_layers)])
    return Placement(rows, Topology(devices_per_node=devices), spec)


@pytest.mark.parametrize("devices", [2, 8, 32])
def test_every_rank_holds_what_the_placement_says(tmp_path: Path, devices: int) -> None:
    placement, path = _placement(devices=devices), tmp_path / "map.json"
    export_file(VllmAscendExporter(), placement, path)
    home = placement.device_of_expert()
    for layer in range(SPEC.num_layers):
        local, physical = load_layer(path, layer, 64, devices)
        assert ((local >= 0) == (np.arange(devices)[:, None] == home[layer])).all()
        assert (physical // (64 // devices) == home[layer]).all()
        assert (placement.physical_to_logical_map[layer, physical] == np.arange(64)).all()


def test_one_rank_would_ignore_the_file(tmp_path: Path) -> None:
    with pytest.raises(InfeasiblePlacement, match="takes no placement for 1 device"):
        export_file(VllmAscendExporter(), _placement(devices=1), tmp_path / "m.json")


def _document(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    path = tmp_path / "map.json"
    export_file(VllmAscendExporter(), _placement(), path)
    assert validate(path, SPEC).valid
    return path, json.loads(path.read_text())


def _problems(path: Path, document: dict[str, Any]) -> str:
    path.write_text(json.dumps(document))
    return " | ".join(validate(path, SPEC).problems)


def test_maps_that_vllm_ascend_silently_misuses_are_found(tmp_path: Path) -> None:
    path, good = _document(tmp_path)
    swapped = json.loads(json.dumps(good))
    swapped["layer_list"][0], swapped["layer_list"][1] = good["layer_list"][1], good["layer_list"][0]
    assert "vllm-ascend takes layers by position" in _problems(path, swapped)
    load_layer(path, 0, 64, 8)
    devices = json.loads(json.dumps(good))
    devices["layer_list"][2]["device_list"].reverse()
    assert "ranks are taken by position" in _problems(path, devices)
    load_layer(path, 2, 64, 8)
    twice = json.loads(json.dumps(good))
    held = twice["layer_list"][4]["device_list"][3]["device_expert"]
    lost, held[1] = held[1], held[0]
    found = _problems(path, twice)
    assert f"layer 4 lacks expert {lost}" in found
    assert f"layer 4 holds the same expert twice on one device: expert {held[0]} on device 3" in found
    load_layer(path, 4, 64, 8)


def test_other_damage(tmp_path: Path) -> None:
    path, good = _document(tmp_path)
    layer = good["layer_list"][0]
    short = {**good, "layer_list": good["layer_list"][:-1]}
    assert "moe_layer_count is 26 for 25 layers" in _problems(path, short)
    assert "25 sound layers for the 26 MoE layers" in _problems(path, {**short, "moe_layer_count": 25})
    for change, message in [
        ({"layer_list": []}, "layer_list is []; it must be a list"),
        ({"layer_list": "x"}, "it must be a list of layers"),
        ({"moe_layer_count": "26"}, "moe_layer_count is '26'"),
        ({"layer_list": [{**layer, "device_count": 7}, *good["layer_list"][1:]]}, "device_count 7 for 8 devices"),
        ({"layer_list": [{**layer, "layer_id": True}, *good["layer_list"][1:]]}, "the layer_id True"),
        ({"layer_list": [{**layer, "device_list": []}, *good["layer_list"][1:]]}, "layer 0 has the device_list []"),
        ({"layer_list": [{**layer, "device_list": [1]}, *good["layer_list"][1:]]}, "must be a list of devices"),
        ({"layer_list": [7, *good["layer_list"][1:]]}, "layer 0 has the device_list None"),
    ]:
        assert message in _problems(path, {**good, **change})
    uneven = json.loads(json.dumps(good))
    moved = uneven["layer_list"][0]["device_list"]
    moved[1]["device_expert"].append(moved[0]["device_expert"].pop())
    assert "layer 0 has 7 to 9 slots a device" in _problems(path, uneven)
    fewer = json.loads(json.dumps(good))
    halves = [d["device_expert"] for d in fewer["layer_list"][0]["device_list"]]
    fewer["layer_list"][0] |= {
        "device_count": 4,
        "device_list": [{"device_id": i, "device_expert": halves[2 * i] + halves[2 * i + 1]} for i in range(4)],
    }
    assert _problems(path, fewer) == "layers have 4 to 8 devices; every layer needs the same"


def test_layer_ids_may_count_from_0_or_as_in_the_model(tmp_path: Path) -> None:
    path, good = _document(tmp_path)
    for shift, sound in [(0, True), (1, True), (3, False)]:
        shifted = json.loads(json.dumps(good))
        for layer in shifted["layer_list"]:
            layer["layer_id"] += shift
        assert (_problems(path, shifted) == "") is sound


def test_launch_flags(tmp_path: Path) -> None:
    path = tmp_path / "a map.json"
    exported = export_file(VllmAscendExporter(), _placement(), path)
    assert exported.flags[:4] == ("--enable-expert-parallel", "--tensor-parallel-size", "8", "--additional-config")
    assert json.loads(exported.flags[4]) == {"eplb_config": {"expert_map_path": str(path), "dynamic_eplb": False}}
