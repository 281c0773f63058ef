"""SGLang's own loading rule, stated again, over the files written for it."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.engines.base import export_file
from coterie.engines.sglang import SGLangExporter, sglang_flags
from coterie.engines.validate import validate
from coterie.errors import InfeasiblePlacement
from coterie.families import spec_from_config
from coterie.placement.placement import Placement
from coterie.spec import MoESpec
from coterie.topology import Topology

DSV2_LITE = {
    "model_type": "deepseek_v2", "num_hidden_layers": 27, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "n_routed_experts": 64, "num_experts_per_tok": 6, "topk_method": "greedy", "n_group": 1, "topk_group": 1,
}  # fmt: skip
QWEN3 = {
    "model_type": "qwen3_moe", "num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
GPT_OSS = {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32, "num_experts_per_tok": 4}
MIXTRAL = {"model_type": "mixtral", "num_hidden_layers": 32, "num_local_experts": 8, "num_experts_per_tok": 2}
CONFIGS = {"DeepSeek-V2-Lite": DSV2_LITE, "Qwen3-30B-A3B": QWEN3, "gpt-oss-20b": GPT_OSS, "Mixtral-8x7B": MIXTRAL}


class SGLang:
    """What the server does with --init-expert-location, --ep-size and --ep-dispatch-algorithm static."""

    def __init__(self, argument: str, num_hidden_layers: int, num_experts: int, ep_size: int, redundant: int = 0):
        self.num_experts, self.ep_size = num_experts, ep_size
        self.num_physical = num_experts + redundant
        assert self.num_physical % ep_size == 0
        data = json.loads(Path(argument).read_text() if argument.endswith(".json") else argument)
        self._init_by_mapping(**data)
        # nothing compares the number of rows with num_hidden_layers; layer i simply takes row i
        self.num_hidden_layers = num_hidden_layers

    def _init_by_mapping(self, physical_to_logical_map: list[list[int]]) -> None:
        table = np.array(physical_to_logical_map)  # ragged rows and floats stop the server here
        assert table.ndim == 2
        assert table.dtype.kind == "i"
        self.table = table
        self.replicas: list[list[list[int]]] = [[[] for _ in range(self.num_experts)] for _ in table]
        for layer, row in enumerate(table):
            for slot, expert in enumerate(row):
                self.replicas[layer][expert].append(slot)

    def dispatch(self, rank: int, layer: int, expert: int) -> int:
        """The slot to which a rank sends a token for one expert."""
        own = self.table.shape[1] // self.ep_size
        candidates = self.replicas[layer][expert]
        local = [slot for slot in candidates if slot // own == rank]
        if local:
            return local[0]
        divmod(self.ep_size, len(candidates))  # the fair choice among none divides by zero
        return random.Random(42).choice(candidates)

    def experts_of_rank(self, rank: int, layer: int) -> list[int]:
        """The experts whose weights a rank loads."""
        own = self.num_physical // self.ep_size
        return [int(expert) for expert in self.table[layer, rank * own : (rank + 1) * own]]


def _spec(name: str) -> MoESpec:
    return spec_from_config(CONFIGS[name], name)


def _placement(spec: MoESpec, devices: int, seed: int = 0) -> Placement:
    rng = np.random.default_rng(seed)
    rows = np.stack([rng.permutation(spec.num_experts) for _ in range(spec.num_layers)])
    return Placement(rows, Topology(devices_per_node=devices), spec)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("devices", [1, 4, 8])
def test_every_rank_loads_and_receives_what_the_placement_says(tmp_path: Path, name: str, devices: int) -> None:
    spec = _spec(name)
    placement = _placement(spec, devices)
    path = tmp_path / "map.json"
    export_file(SGLangExporter(), placement, path, spec)
    server = SGLang(str(path), spec.num_model_layers, spec.num_experts, devices)
    assert server.table.shape == (spec.num_model_layers, spec.num_experts)
    home = placement.device_of_expert()
    per_rank = spec.num_experts // devices
    for layer, layer_id in enumerate(spec.layer_ids):
        for rank in range(devices):
            assert set(server.experts_of_rank(rank, layer_id)) == set(np.flatnonzero(home[layer] == rank))
        for expert in range(spec.num_experts):
            slot = server.dispatch(rank=0, layer=layer_id, expert=expert)
            assert server.table[layer_id, slot] == expert
            assert slot // per_rank == home[layer, expert]


def test_dense_layers_hold_the_experts_in_order(tmp_path: Path) -> None:
    spec = _spec("DeepSeek-V2-Lite")
    path = tmp_path / "map.json"
    export_file(SGLangExporter(), _placement(spec, 8), path, spec)
    rows = json.loads(path.read_text())["physical_to_logical_map"]
    assert rows[0] == [slot % 64 for slot in range(64)]
    assert rows[1] != rows[0]


def _write(path: Path, rows: list[Any], **extra: Any) -> Path:
    path.write_text(json.dumps({"physical_to_logical_map": rows, **extra}))
    return path


def _rows(spec: MoESpec) -> list[list[int]]:
    return [list(range(spec.num_experts)) for _ in range(spec.num_model_layers)]


def test_maps_that_sglang_silently_misuses_are_found(tmp_path: Path) -> None:
    """Each of these starts the server without a word, and validate refuses it."""
    spec, path = _spec("DeepSeek-V2-Lite"), tmp_path / "map.json"
    moe_only = _rows(spec)[1:]
    lost = _rows(spec)
    lost[3][-1] = -1  # counts from the end: expert 63 again
    twice = _rows(spec)
    for row in twice:
        row += [0, *range(1, 8)]  # expert 0 a second time, on rank 7: that is fine, ...
    twice[5][-9:] = [63] * 9  # ... but not the same expert several times on one rank
    for rows, redundant, message in [
        (moe_only, 0, "26 sound rows for DeepSeek-V2-Lite's 27 layers; it seems to have MoE layers only"),
        (_rows(spec)[:-1] + _rows(spec), 0, "53 sound rows"),
        (lost, 0, "model layer 3 holds expert -1"),
        (twice, 8, "model layer 5 holds the same expert twice on one device: expert 63 on device 7"),
    ]:
        _write(path, rows)
        SGLang(str(path), 27, 64, 8, redundant)
        report = validate(path, spec, Topology(devices_per_node=8))
        assert message in " | ".join(report.problems)
    with pytest.raises(InfeasiblePlacement, match="only with the ending"):
        export_file(SGLangExporter(), _placement(spec, 8), tmp_path / "map.txt", spec)
    assert not (tmp_path / "map.txt").exists()


def test_maps_that_stop_sglang_are_found(tmp_path: Path) -> None:
    spec, path = _spec("Mixtral-8x7B"), tmp_path / "map.json"
    _write(path, _rows(spec), num_layers=32)
    with pytest.raises(TypeError):
        SGLang(str(path), 32, 8, 4)
    assert "the key 'num_layers'; SGLang stops" in validate(path, spec).problems[0]
    missing = _rows(spec)
    missing[7][2] = 3
    server = SGLang(str(_write(path, missing)), 32, 8, 4)
    with pytest.raises(ZeroDivisionError):
        server.dispatch(0, 7, 2)
    assert validate(path, spec).problems == ("model layer 7 lacks expert 2; every expert needs a slot",)
    _write(path, [[*row, 0, 1] for row in _rows(spec)])
    report = validate(path, spec, Topology(devices_per_node=4))
    assert report.problems == ("10 slots do not spread evenly over 4 devices; use a number that divides them",)


def test_launch_flags_and_what_sglang_does_not_say(tmp_path: Path) -> None:
    spec = _spec("Qwen3-30B-A3B")
    one_node = export_file(SGLangExporter(), _placement(spec, 8), tmp_path / "m.json", spec)
    assert one_node.flags == (
        "--init-expert-location", str(tmp_path / "m.json"), "--tp-size", "8", "--ep-size", "8",
        "--moe-a2a-backend", "deepep", "--ep-dispatch-algorithm", "static",
    )  # fmt: skip
    alone = sglang_flags(_placement(spec, 8), tmp_path / "m.json", "none")
    assert alone[-3:] == ["none", "--ep-dispatch-algorithm", "dynamic"]  # static is refused without an all-to-all
    notes = " | ".join(one_node.notes)
    assert "leave out --enable-eplb" in notes
    assert "--moe-a2a-backend none" in notes
    assert "--nnodes" not in notes
    two = Placement(_placement(spec, 8).physical_to_logical_map, Topology(2, 4), spec)
    assert "--nnodes 2: rank r must run on node r // 4" in export_file(
        SGLangExporter(), two, tmp_path / "m.json", spec
    ).notes[-1]  # fmt: skip
