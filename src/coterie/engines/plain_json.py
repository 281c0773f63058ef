"""A plain JSON map for anything else.

{"kind": "coterie.expert_map", "schema_version": 1, "coterie_version": "...",
 "model": {...}, "num_devices": 8, "devices_per_node": 8,
 "slots_per_device": [8, 8, ...],          device d owns the next slots_per_device[d] slots
 "layer_ids": [1, 2, ...],                 the MoE layers' places in the whole model; empty when unknown
 "physical_to_logical_map": [[...], ...]}  one row for each MoE layer, the expert in each slot
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import coterie
from coterie.engines.maps import EngineFile, LayerRow, brief, expert_list, is_int
from coterie.placement.placement import Placement
from coterie.spec import MoESpec

KIND = "coterie.expert_map"
SCHEMA_VERSION = 1


class PlainJsonExporter:
    """The plain map; MoE layers only, devices may have unequal numbers of slots."""

    name = "json"
    title = "the plain JSON map"
    suffixes: tuple[str, ...] = ()
    reads_yaml = False
    even_ranks = False
    min_devices = 1
    needs_layer_ids = False
    needs_model_layers = False
    dispatch: tuple[str, ...] = ()

    def export(self, placement: Placement, spec: MoESpec) -> str:
        """One MoE layer a line."""
        head = {
            "kind": KIND,
            "schema_version": SCHEMA_VERSION,
            "coterie_version": coterie.__version__,
            "model": spec.to_json(),
            "num_devices": placement.topology.num_devices,
            "devices_per_node": placement.topology.devices_per_node,
            "slots_per_device": placement.slots_per_device.tolist(),
            "layer_ids": list(spec.layer_ids),
        }
        fields = ",\n ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items())
        rows = ",\n  ".join(json.dumps(row) for row in placement.physical_to_logical_map.tolist())
        return f'{{\n {fields},\n "physical_to_logical_map": [\n  {rows}\n ]\n}}\n'

    def launch_flags(self, placement: Placement, spec: MoESpec, path: Path) -> list[str]:
        """None: no engine reads this file by itself."""
        return []

    def launch_notes(self, placement: Placement, spec: MoESpec, path: Path) -> list[str]:
        """How to use a placement where no file is read."""
        if placement.num_copies:
            return []  # only engines that read a file have copies
        return [
            "vLLM (0.32, 0.33) reads no placement file: its ranks own experts in order, so renumber the checkpoint's "
            "experts instead: coterie bake MODEL --placement PLACEMENT --out DIR",
        ]

    def recognises(self, document: Any) -> bool:
        """A file of this kind."""
        return isinstance(document, dict) and document.get("kind") == KIND

    def read(self, document: Any) -> EngineFile:
        """Devices own runs of slots, as `slots_per_device` says."""
        file = EngineFile()
        if document.get("schema_version") != SCHEMA_VERSION:
            file.problems.append(
                f"schema_version is {brief(document.get('schema_version'))}; it must be {SCHEMA_VERSION}"
            )
        slots = document.get("slots_per_device")
        if not isinstance(slots, list) or not slots or not all(is_int(count) and count > 0 for count in slots):
            file.problems.append(f"slots_per_device is {brief(slots)}; it must list the slots of each device")
            slots = None
        elif document.get("num_devices") != len(slots):
            file.problems.append(
                f"num_devices is {brief(document.get('num_devices'))} for {len(slots)} slots_per_device"
            )
        rows, ids = document.get("physical_to_logical_map"), document.get("layer_ids")
        if not isinstance(rows, list) or not rows:
            file.problems.append(
                f"physical_to_logical_map is {brief(rows)}; it must be a list with a list for each layer"
            )
            return file
        if not isinstance(ids, list) or not all(map(is_int, ids)) or len(ids) not in (0, len(rows)):
            file.problems.append(
                f"layer_ids is {brief(ids)}; it must be empty or list one id for each of {len(rows)} rows"
            )
            ids = []
        for layer, row in enumerate(rows):
            experts = expert_list(row, f"layer {layer}", file.problems)
            if experts is None:
                continue
            if slots is not None and sum(slots) != len(experts):
                file.problems.append(
                    f"layer {layer} has {len(experts)} slots, slots_per_device adds up to {sum(slots)}"
                )
            fits = slots is not None and sum(slots) == len(experts)
            layer_id = ids[layer] if ids else None
            file.rows.append(LayerRow(f"layer {layer}", experts, slots if fits else None, layer_id))
        return file

    def layer_problems(self, file: EngineFile, spec: MoESpec) -> list[str]:
        """There must be a row for every MoE layer, at its place."""
        if len(file.rows) != spec.num_layers:
            return [f"it has {len(file.rows)} sound layers for the {spec.num_layers} MoE layers of {spec.model}"]
        ids = [row.layer_id for row in file.rows if row.layer_id is not None]
        if ids and spec.layer_ids and tuple(ids) != spec.layer_ids:
            return [f"its layer_ids run from {ids[0]} to {ids[-1]}; {spec.model}'s MoE layers do not"]
        return []

    def moe_rows(self, file: EngineFile, spec: MoESpec) -> list[LayerRow]:
        """All of them."""
        return file.rows
