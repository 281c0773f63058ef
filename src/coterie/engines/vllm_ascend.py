"""vllm-ascend: `additional_config.eplb_config.expert_map_path`.

Checked against vllm-project/vllm-ascend `vllm_ascend/eplb/core/eplb_utils.py` (expert_file_to_tensor, init_eplb_config,
generate_log2phy_map), `ops/fused_moe/fused_moe.py`, `ascend_config.py` (EplbConfig) and, for older releases,
`ops/expert_load_balancer.py`:

- layers are taken by position in `layer_list`, MoE layers only, counted from 0; `layer_id` is not read;
- ranks are taken by position in `device_list`; `device_id` is not read, `device_count` only of the first layer;
- every rank must have the same number of experts (a ragged list is no tensor; slots are numbered by rank 0's count);
- of two copies of one expert on one rank only the last is kept, and its slot count no longer fits;
- a layer beyond `moe_layer_count` (multi-token prediction) falls back to the default placement;
- with one rank the file is ignored;
- a name that does not end in .json stops the server (TypeError).

The tests load files with the first and third module themselves (tests/contract/test_engine_code.py), release 0.23.0.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from coterie.engines.maps import EngineFile, LayerRow, brief, expert_list, is_int
from coterie.placement.placement import Placement
from coterie.spec import MoESpec


class VllmAscendExporter:
    """The expert map file of vllm-ascend."""

    name = "vllm-ascend"
    title = "vllm-ascend"
    suffixes: tuple[str, ...] = (".json",)
    reads_yaml = False
    even_ranks = True
    min_devices = 2
    needs_layer_ids = False
    needs_model_layers = False
    dispatch: tuple[str, ...] = ("random",)  # each rank a fixed one, wherever it is

    def export(self, placement: Placement, spec: MoESpec) -> str:
        """For each MoE layer the experts of each rank, one layer a line."""
        devices = placement.topology.num_devices
        layers = []
        for layer, row in enumerate(placement.physical_to_logical_map):
            device_list = [
                {"device_id": device, "device_expert": experts.tolist()}
                for device, experts in enumerate(row.reshape(devices, -1))
            ]
            layers.append(json.dumps({"layer_id": layer, "device_count": devices, "device_list": device_list}))
        lines = ",\n".join(layers)
        return f'{{"moe_layer_count": {len(layers)}, "layer_list": [\n{lines}\n]}}\n'

    def launch_flags(self, placement: Placement, spec: MoESpec, path: Path) -> list[str]:
        """Expert parallelism over all ranks, and the file."""
        config = {"eplb_config": {"expert_map_path": str(path), "dynamic_eplb": False}}
        return [
            "--enable-expert-parallel",
            "--tensor-parallel-size", str(placement.topology.num_devices),
            "--additional-config", json.dumps(config),
        ]  # fmt: skip

    def launch_notes(self, placement: Placement, spec: MoESpec, path: Path) -> list[str]:
        """What vllm-ascend does not say by itself."""
        topology = placement.topology
        notes = [
            f"the ranks are tensor times data parallel: any split whose product is {topology.num_devices} will do",
            "before eplb_config existed expert_map_path stood directly in --additional-config",
            "the file is taken only with a quantisation that supports EPLB (w8a8_dynamic), and not by model runner V2",
        ]
        if topology.num_nodes > 1:
            notes.append(f"rank r must run on node r // {topology.devices_per_node}")
        return notes

    def recognises(self, document: Any) -> bool:
        """A file with a list of layers."""
        return isinstance(document, dict) and ("layer_list" in document or "moe_layer_count" in document)

    def read(self, document: Any) -> EngineFile:
        """Layers and ranks by position."""
        file = EngineFile()
        layers, count = document.get("layer_list"), document.get("moe_layer_count")
        if not isinstance(layers, list) or not layers:
            file.problems.append(f"layer_list is {brief(layers)}; it must be a list of layers")
            return file
        if not is_int(count) or count != len(layers):
            file.problems.append(f"moe_layer_count is {brief(count)} for {len(layers)} layers in layer_list")
        for position, layer in enumerate(layers):
            _read_layer(layer, position, file)
        devices = sorted({len(row.slots_per_device or ()) for row in file.rows})
        if len(devices) > 1:
            file.problems.append(f"layers have {devices[0]} to {devices[-1]} devices; every layer needs the same")
        ids = [row.layer_id for row in file.rows if row.layer_id is not None]
        if any(later <= earlier for earlier, later in itertools.pairwise(ids)):
            file.problems.append("layer_id does not rise through layer_list; vllm-ascend takes layers by position")
        return file

    def layer_problems(self, file: EngineFile, spec: MoESpec) -> list[str]:
        """There must be a layer for every MoE layer, numbered from 0 or as in the model."""
        if len(file.rows) != spec.num_layers:
            return [f"it has {len(file.rows)} sound layers for the {spec.num_layers} MoE layers of {spec.model}"]
        ids = tuple(row.layer_id for row in file.rows)
        if ids in (tuple(range(spec.num_layers)), spec.layer_ids) or not spec.layer_ids:
            return []
        return [f"its layer_id run from {ids[0]} to {ids[-1]}; {spec.model}'s MoE layers do not"]

    def moe_rows(self, file: EngineFile, spec: MoESpec) -> list[LayerRow]:
        """All of them."""
        return file.rows


def _read_layer(layer: Any, position: int, file: EngineFile) -> None:
    """Append the layer to `file.rows` if its form is sound, and what is wrong to `file.problems`."""
    where = f"layer {position}"
    devices = layer.get("device_list") if isinstance(layer, dict) else None
    if not isinstance(devices, list) or not devices or not all(isinstance(device, dict) for device in devices):
        file.problems.append(f"{where} has the device_list {brief(devices)}; it must be a list of devices")
        return
    layer_id, count = layer.get("layer_id"), layer.get("device_count")
    if not is_int(layer_id) or layer_id < 0:
        file.problems.append(f"{where} has the layer_id {brief(layer_id)}; it must be a number from 0")
    if not is_int(count) or count != len(devices):
        file.problems.append(f"{where} has the device_count {brief(count)} for {len(devices)} devices in device_list")
    ids = [device.get("device_id") for device in devices]
    if ids != list(range(len(devices))) or not all(map(is_int, ids)):
        file.problems.append(f"{where} has the device_id {brief(ids)}; ranks are taken by position, from 0")
    experts = [
        expert_list(device.get("device_expert"), f"{where} device {rank}", file.problems)
        for rank, device in enumerate(devices)
    ]
    sound = [held for held in experts if held is not None]
    if len(sound) == len(experts):
        flat = [expert for held in sound for expert in held]
        file.rows.append(LayerRow(where, flat, [len(held) for held in sound], layer_id if is_int(layer_id) else None))
