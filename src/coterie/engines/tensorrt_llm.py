"""TensorRT-LLM: the YAML file of `moe_config.load_balancer`.

Checked against NVIDIA/TensorRT-LLM `tensorrt_llm/llmapi/llm_args.py` (MoeLoadBalancerConfig, validate_load_balancer),
`_torch/modules/fused_moe/interface.py` and `examples/wide_ep/ep_load_balancer`, releases 1.0 to 1.3:

- the file is read with a safe YAML loader into a model that refuses unknown keys;
- `initial_global_assignments` maps the layer's index in the whole model to `num_slots` expert ids; a MoE layer
  without an entry stops the server (KeyError), as does a row that lacks an expert;
- `num_slots` must be a multiple of the expert-parallel size; rank r owns slots [r n, (r + 1) n), n = num_slots / ep;
- `layer_updates_per_iter: 0` keeps the assignment; more lets it be rebalanced away;
- a load balancer is accepted only with attention data parallelism and more than one rank;
- up to 1.2 the backend for it is WIDEEP, which the later candidates of 1.3 no longer have (pull request 17797); there
  CUTEDSL, CUTLASS, TRTLLM, DEEPGEMM, DENSEGEMM and the MEGAMOE ones balance load, VANILLA, TRITON and MARLIN do not
  (pull request 18626).

The candidates of release 1.4 tell kinds of load balancers apart by a `mode`; that is not written here. The
wheels are on NVIDIA's own index alone, so the tests state these rules again instead of running them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import coterie
from coterie.engines.maps import EngineFile, LayerRow, brief, expert_list, is_int, some
from coterie.placement.placement import Placement
from coterie.spec import MoESpec

_SLOTS, _ROWS, _UPDATES = "num_slots", "initial_global_assignments", "layer_updates_per_iter"


class TensorRTLLMExporter:
    """The load balancer file of TensorRT-LLM."""

    name = "tensorrt-llm"
    title = "TensorRT-LLM"
    suffixes: tuple[str, ...] = ()
    reads_yaml = True
    even_ranks = True
    min_devices = 2
    needs_layer_ids = True
    needs_model_layers = False
    dispatch: tuple[str, ...] = ("random",)  # in turn, wherever they are

    def export(self, placement: Placement, spec: MoESpec) -> str:
        """A static assignment, one MoE layer a line."""
        devices = placement.topology.num_devices
        lines = [
            f"# written by coterie {coterie.__version__} for {devices} ranks of {json.dumps(spec.model)}",
            f"{_SLOTS}: {placement.physical_to_logical_map.shape[1]}",
            f"{_UPDATES}: 0",
            f"{_ROWS}:",
        ]
        for layer_id, row in zip(spec.layer_ids, placement.physical_to_logical_map.tolist(), strict=True):
            lines.append(f"  {layer_id}: {json.dumps(row)}")
        return "\n".join(lines) + "\n"

    def launch_flags(self, placement: Placement, spec: MoESpec, path: Path) -> list[str]:
        """Ranks, and the options file that names this one."""
        devices = str(placement.topology.num_devices)
        return ["--tp_size", devices, "--ep_size", devices, "--extra_llm_api_options", "options.yaml"]

    def launch_notes(self, placement: Placement, spec: MoESpec, path: Path) -> list[str]:
        """What the options file must hold, and what TensorRT-LLM does not say by itself."""
        topology, file = placement.topology, json.dumps(str(path))
        notes = [
            f"options.yaml must hold: {{enable_attention_dp: true, moe_config: {{load_balancer: {file}}}}}",
            "choose a moe_config backend that balances load: WIDEEP up to 1.2; from 1.3 on, where there is no WIDEEP, "
            "CUTEDSL, CUTLASS, TRTLLM, DEEPGEMM, DENSEGEMM or MEGAMOE_...; not VANILLA, TRITON or MARLIN",
            "multi-token prediction layers need an assignment of their own, which this file does not have",
        ]
        if topology.num_nodes > 1:
            notes.append(f"rank r must run on node r // {topology.devices_per_node}")
        return notes

    def recognises(self, document: Any) -> bool:
        """A file with slots or assignments."""
        return isinstance(document, dict) and (_SLOTS in document or _ROWS in document)

    def read(self, document: Any) -> EngineFile:
        """The layers in rising order of their index."""
        file = EngineFile()
        slots, rows, updates = document.get(_SLOTS), document.get(_ROWS), document.get(_UPDATES, 0)
        extra = [key for key in document if key not in (_SLOTS, _ROWS, _UPDATES)]
        if extra:
            file.problems.append(f"it has the key {brief(extra[0])}; TensorRT-LLM refuses unknown keys")
        if not is_int(slots) or slots < 1:
            file.problems.append(f"{_SLOTS} is {brief(slots)}; it must be a whole number of slots")
        if not is_int(updates) or updates < 0:
            file.problems.append(f"{_UPDATES} is {brief(updates)}; it must be 0 or more")
        elif updates:
            file.notes.append(f"{_UPDATES} is {updates}: the placement will be rebalanced away; 0 keeps it")
        if not isinstance(rows, dict) or not rows:
            file.problems.append(f"{_ROWS} is {brief(rows)}; it must map layers to lists of expert ids")
            return file
        strange = [key for key in rows if not is_int(key) or key < 0]
        if strange:
            file.problems.append(f"{_ROWS} names a layer {brief(strange[0])}; layers are whole numbers from 0")
        for layer in sorted(key for key in rows if is_int(key) and key >= 0):
            experts = expert_list(rows[layer], f"model layer {layer}", file.problems)
            if experts is None:
                continue
            file.rows.append(LayerRow(f"model layer {layer}", experts, layer_id=layer))
            if is_int(slots) and len(experts) != slots:
                file.problems.append(f"model layer {layer} has {len(experts)} slots, {_SLOTS} says {slots}")
        return file

    def layer_problems(self, file: EngineFile, spec: MoESpec) -> list[str]:
        """The layers must be exactly the model's MoE layers."""
        have = [row.layer_id for row in file.rows]
        if not spec.layer_ids:
            wrong = len(have) != spec.num_layers
            return (
                [f"it has {len(have)} sound layers for {spec.num_layers} MoE layers of {spec.model}"] if wrong else []
            )
        missing = [layer for layer in spec.layer_ids if layer not in have]
        extra = [layer for layer in have if layer not in spec.layer_ids]
        problems = []
        if missing:
            problems.append(f"it lacks layer {some(missing)}, which {spec.model} has as MoE; TensorRT-LLM would stop")
        if extra:
            problems.append(f"it has layer {some(extra)}, which is no MoE layer of {spec.model}")
        return problems

    def moe_rows(self, file: EngineFile, spec: MoESpec) -> list[LayerRow]:
        """All of them."""
        return file.rows
