"""TensorRT-LLM's own loading rule, stated again, over the files written for it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from coterie.engines.base import export_file
from coterie.engines.tensorrt_llm import TensorRTLLMExporter
from coterie.engines.validate import validate
from coterie.errors import InfeasiblePlacement
from coterie.families import spec_from_config
from coterie.placement.placement import Placement
from coterie.spec import MoESpec
from coterie.topology import Topology

V3 = {
    "model_type": "deepseek_v3", "num_hidden_layers": 9, "first_k_dense_replace": 3, "moe_layer_freq": 1,
    "n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
}  # fmt: skip
SPEC = spec_from_config(V3, "V3-small")


class LoadBalancerConfig:
    """A strict model with three fields, set up for an expert-parallel size, asked by every MoE layer."""

    def __init__(
        self,
        num_slots: int | None = None,
        initial_global_assignments: dict[int, list[int]] | None = None,
        layer_updates_per_iter: int = 0,
    ):
        self.num_slots, self.rows, self.updates = num_slots, initial_global_assignments, layer_updates_per_iter

    def local_experts(self, layer_idx: int, rank: int, ep_size: int, num_experts: int) -> list[int]:
        """What one rank of one MoE layer loads."""
        assert ep_size > 1
        if self.num_slots is None or self.num_slots % ep_size:
            raise ValueError("num_slots must be divisible by ep_size")
        assert self.rows is not None
        row = self.rows[layer_idx]
        assert isinstance(row, list)
        assert len(row) == self.num_slots >= num_experts
        assert set(row) == set(range(num_experts))
        own = self.num_slots // ep_size
        return row[rank * own : (rank + 1) * own]


def _load(path: Path) -> LoadBalancerConfig:
    return LoadBalancerConfig(**yaml.safe_load(path.read_text()))


def _placement(spec: MoESpec = SPEC, devices: int = 4) -> Placement:
    rng = np.random.default_rng(2)
    rows = np.stack([rng.permutation(spec.num_experts) for _ in range(spec.num_layers)])
    return Placement(rows, Topology(devices_per_node=devices), spec)


@pytest.mark.parametrize("devices", [2, 4, 16])
def test_every_rank_loads_what_the_placement_says(tmp_path: Path, devices: int) -> None:
    placement, path = _placement(devices=devices), tmp_path / "balancer.yaml"
    export_file(TensorRTLLMExporter(), placement, path, SPEC)
    config = _load(path)
    assert config.updates == 0
    home = placement.device_of_expert()
    for layer, layer_idx in enumerate(range(3, 9)):  # the model asks by its own layer numbers
        for rank in range(devices):
            held = config.local_experts(layer_idx, rank, devices, 16)
            assert sorted(held) == np.flatnonzero(home[layer] == rank).tolist()
    with pytest.raises(KeyError):
        config.local_experts(2, 0, devices, 16)


def test_a_model_name_cannot_break_the_file(tmp_path: Path) -> None:
    spec = MoESpec("evil\nnum_slots: 1 # \"'{", 6, 16, 4, layer_ids=SPEC.layer_ids, num_model_layers=9)
    path = tmp_path / "b.yaml"
    export_file(TensorRTLLMExporter(), _placement(spec), path)
    assert _load(path).num_slots == 16


def _problems(tmp_path: Path, **changes: Any) -> str:
    path = tmp_path / "b.yaml"
    export_file(TensorRTLLMExporter(), _placement(), path, SPEC)
    document = yaml.safe_load(path.read_text()) | changes
    path.write_text(yaml.safe_dump({key: value for key, value in document.items() if value != "absent"}))
    return " | ".join(validate(path, SPEC, Topology(devices_per_node=4)).problems)


def test_damage(tmp_path: Path) -> None:
    assert _problems(tmp_path) == ""
    rows = {layer: list(range(16)) for layer in range(3, 9)}
    quoted = {"4" if layer == 4 else layer: row for layer, row in rows.items()}
    lost = {**rows, 5: [0, *range(15)]}
    for changes, message in [
        ({"initial_global_assignments": {**rows, 2: list(range(16))}}, "layer 2, which is no MoE layer of V3-small"),
        ({"initial_global_assignments": {k: v for k, v in rows.items() if k != 8}}, "it lacks layer 8"),
        ({"initial_global_assignments": {k - 3: v for k, v in rows.items()}}, "it lacks layer 6, 7, 8"),
        ({"initial_global_assignments": lost}, "model layer 5 lacks expert 15"),
        ({"initial_global_assignments": lost}, "twice on one device: expert 0 on device 0"),
        ({"initial_global_assignments": {**rows, 4: [0.0, *range(1, 16)]}}, "model layer 4 holds 0.0"),
        ({"initial_global_assignments": quoted}, "names a layer '4'"),
        ({"initial_global_assignments": {**rows, 4: rows[4][:12]}}, "model layer 4 has 12 slots, num_slots says 16"),
        ({"initial_global_assignments": []}, "initial_global_assignments is []"),
        ({"initial_global_assignments": "absent"}, "initial_global_assignments is None"),
        ({"num_slots": 18}, "model layer 3 has 16 slots, num_slots says 18"),
        ({"num_slots": "absent"}, "num_slots is None"),
        ({"num_slots": True}, "num_slots is True"),
        ({"layer_updates_per_iter": -1}, "layer_updates_per_iter is -1"),
        ({"ep_size": 4}, "the key 'ep_size'; TensorRT-LLM refuses unknown keys"),
    ]:
        assert message in _problems(tmp_path, **changes)


def test_uneven_slots_and_online_rebalancing(tmp_path: Path) -> None:
    rows = {layer: [*range(16), 0, 1] for layer in range(3, 9)}
    found = _problems(tmp_path, num_slots=18, initial_global_assignments=rows)
    assert found == "18 slots do not spread evenly over 4 devices; use a number that divides them"
    with pytest.raises(ValueError, match="divisible"):
        _load(tmp_path / "b.yaml").local_experts(3, 0, 4, 16)
    assert _problems(tmp_path, layer_updates_per_iter=2) == ""
    assert "rebalanced away" in validate(tmp_path / "b.yaml", SPEC).notes[0]


def test_one_rank_is_refused_and_the_flags_name_the_options_file(tmp_path: Path) -> None:
    with pytest.raises(InfeasiblePlacement, match="takes no placement for 1 device"):
        export_file(TensorRTLLMExporter(), _placement(devices=1), tmp_path / "b.yaml", SPEC)
    exported = export_file(TensorRTLLMExporter(), _placement(), tmp_path / "b.yaml", SPEC)
    assert exported.flags == ("--tp_size", "4", "--ep_size", "4", "--extra_llm_api_options", "options.yaml")
    options = yaml.safe_load(exported.notes[0].removeprefix("options.yaml must hold: "))
    assert options == {"enable_attention_dp": True, "moe_config": {"load_balancer": str(tmp_path / "b.yaml")}}
