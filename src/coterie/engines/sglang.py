"""SGLang: `--init-expert-location FILE.json`.

Checked against sgl-project/sglang `python/sglang/srt/eplb/expert_location.py` (init_by_mapping,
_compute_logical_to_all_physical_map, compute_logical_to_rank_dispatch_physical_map), `expert_location_dispatch.py` and
`server_args.py`:

- a name that ends in .json is read as a file, anything else but .pt is parsed as JSON itself;
- the file's keys become keyword arguments, so a key beside `physical_to_logical_map` stops the server (TypeError);
- the row of layer i is row i of the map, counted over `num_hidden_layers`: dense layers have rows too. Their content
  is never used to route, but an expert that is missing from one stops the server (it draws from an empty list);
- rank r owns slots [r P/ep, (r + 1) P/ep); neither shape nor coverage is checked, a wrong row count goes unnoticed;
- tokens follow the map only with `ep_dispatch_algorithm` set. Once a file is given it is "static" with an all-to-all
  backend and "dynamic" without one, where "static" stops the server: all ranks then work on the same tokens and must
  choose the same copy;
- "static": a rank sends to its own copy, else to one on its node where some but not all are there, else to one that is
  drawn once. The all-to-all backends set the expert-parallel size to the tensor-parallel one.

The tests load files with the first module itself (tests/contract/test_engine_code.py), release 0.5.23.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from coterie.engines.maps import EngineFile, LayerRow, brief, expert_list, some
from coterie.placement.placement import Placement
from coterie.spec import MoESpec

_KEY = "physical_to_logical_map"
BACKEND = "deepep"
"""The all-to-all backend in the flags, where nobody says which."""


def sglang_flags(placement: Placement, path: Path, backend: str) -> list[str]:
    """The server's arguments for a placement under an all-to-all backend, or "none"."""
    devices = str(placement.topology.num_devices)
    copies = ["--ep-num-redundant-experts", str(placement.num_copies)] if placement.num_copies else []
    by_chance = placement.num_copies and placement.method.get("dispatch") == "random"
    return [
        *copies,
        "--init-expert-location", str(path), "--tp-size", devices, "--ep-size", devices, "--moe-a2a-backend", backend,
        "--ep-dispatch-algorithm", "dynamic" if by_chance or backend == "none" else "static",
    ]  # fmt: skip


class SGLangExporter:
    """The expert location file of SGLang."""

    name = "sglang"
    title = "SGLang"
    suffixes: tuple[str, ...] = (".json",)
    reads_yaml = False
    even_ranks = True
    min_devices = 1
    needs_layer_ids = True
    needs_model_layers = True
    dispatch: tuple[str, ...] = ("nearest", "random")

    def export(self, placement: Placement, spec: MoESpec) -> str:
        """One row for each model layer; dense layers hold the experts in order, beginning again for copies."""
        slots = placement.physical_to_logical_map.shape[1]
        rows = [[slot % spec.num_experts for slot in range(slots)]] * spec.num_model_layers
        for layer_id, row in zip(spec.layer_ids, placement.physical_to_logical_map.tolist(), strict=True):
            rows[layer_id] = row
        lines = ",\n".join(json.dumps(row) for row in rows)
        return f'{{"{_KEY}": [\n{lines}\n]}}\n'

    def launch_flags(self, placement: Placement, spec: MoESpec, path: Path) -> list[str]:
        """The file, the sizes, how many copies there are, and that tokens follow the file over an all-to-all."""
        return sglang_flags(placement, path, BACKEND)

    def launch_notes(self, placement: Placement, spec: MoESpec, path: Path) -> list[str]:
        """What SGLang does not say by itself."""
        topology = placement.topology
        notes = [
            "leave out --enable-eplb: its first rebalancing replaces this placement by one made from load alone",
            "any all-to-all backend will do, not only deepep; with --moe-a2a-backend none (the default) every rank "
            "receives every token, so placement cannot reduce traffic, and --ep-dispatch-algorithm static is refused",
            "only models whose class defines get_model_config_for_expert_location use the file; look for "
            "'init_by_mapping' in the server's log",
        ]
        if topology.num_nodes > 1:
            notes.append(
                f"start with --nnodes {topology.num_nodes}: rank r must run on node r // {topology.devices_per_node}"
            )
        return notes

    def recognises(self, document: Any) -> bool:
        """A map that is no file of Coterie's own."""
        return isinstance(document, dict) and _KEY in document and "kind" not in document

    def read(self, document: Any) -> EngineFile:
        """Row i is model layer i."""
        file = EngineFile()
        extra = [key for key in document if key != _KEY]
        if extra:
            file.problems.append(f"it has the key {brief(extra[0])}; SGLang stops at any key but {_KEY}")
        rows = document[_KEY]
        if not isinstance(rows, list) or not rows:
            file.problems.append(f"{_KEY} is {brief(rows)}; it must be a list with a list for each model layer")
            return file
        for layer, row in enumerate(rows):
            experts = expert_list(row, f"model layer {layer}", file.problems)
            if experts is not None:
                file.rows.append(LayerRow(f"model layer {layer}", experts, layer_id=layer))
        return file

    def layer_problems(self, file: EngineFile, spec: MoESpec) -> list[str]:
        """There must be a row for every layer of the model."""
        have, need = {row.layer_id for row in file.rows}, spec.num_model_layers
        missing = [layer for layer in range(need) if layer not in have]
        if not need or (not missing and len(have) == need):
            return []
        if missing and len(have) == spec.num_layers:
            hint = "it seems to have MoE layers only, SGLang counts dense ones too"
        else:
            hint = f"layer {some(missing)} is missing" if missing else "it is for another model"
        return [f"it has {len(have)} sound rows for {spec.model}'s {need} layers; {hint}"]

    def moe_rows(self, file: EngineFile, spec: MoESpec) -> list[LayerRow]:
        """The rows at the MoE layers' places."""
        return [file.rows[layer_id] for layer_id in spec.layer_ids]
