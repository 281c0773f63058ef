"""Every known table of loads, and what is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError, TraceError
from coterie.trace.load_table import halves, open_loads

TABLE = np.array([[5, 0, 7, 1], [0, 0, 0, 0], [2, 2, 9, 4]])


def write(folder: Path, kind: str) -> Path:
    path = folder / f"loads.{kind}"
    if kind == "npy":
        np.save(path, TABLE)
    elif kind == "npz":
        np.savez(path, other=np.zeros(3), weight=TABLE)
    elif kind == "csv":
        np.savetxt(path, TABLE, delimiter=",", fmt="%d")
    else:
        path.write_text(json.dumps({"weight": TABLE.tolist()} if kind == "json" else TABLE.tolist()))
    return path


@pytest.mark.parametrize("kind", ["npy", "npz", "csv", "json", "txt"])
def test_eplb_tables_in_every_form(tmp_path: Path, kind: str) -> None:
    table = open_loads(write(tmp_path, kind))
    assert table.format == "eplb"
    assert table.load_LE.tolist() == TABLE[[0, 2]].tolist()  # a layer without loads is a dense one
    assert table.layer_ids == (0, 2)
    assert len(halves(table)) == 1


@pytest.mark.needs("torch")
def test_sglangs_stat(tmp_path: Path) -> None:
    import torch

    steps = np.stack([TABLE, 2 * TABLE, 4 * TABLE])
    torch.save({"rank": 0, "logical_count": torch.tensor(steps, dtype=torch.int32)}, tmp_path / "stat.pt")
    table = open_loads(tmp_path / "stat.pt")
    assert table.format == "sglang-stat"
    assert table.load_LE.tolist() == (7 * TABLE)[[0, 2]].tolist()
    earlier, later = halves(table)
    assert earlier.tolist() == TABLE[[0, 2]].tolist()
    assert later.tolist() == (6 * TABLE)[[0, 2]].tolist()


def tensorrt(folder: Path, meta: dict[str, Any] | None = None) -> Path:
    from safetensors.numpy import save_file

    (folder / "meta_info.json").write_text(json.dumps(meta or {"num_experts": 4, "num_experts_per_token": 2}))
    for rank in range(2):
        counts = {f"{step}_{layer}": TABLE[layer] * (rank + 1) for step in (100, 101) for layer in (0, 2)}
        save_file(counts, folder / f"rank{rank}.safetensors")
    return folder


def test_tensorrt_llms_ranks_are_added_up(tmp_path: Path) -> None:
    table = open_loads(tensorrt(tmp_path))
    assert (table.format, table.top_k, table.layer_ids) == ("tensorrt-llm", 2, (0, 2))
    assert table.load_SLE.shape == (2, 2, 4)
    assert table.load_SLE[0].tolist() == (3 * TABLE)[[0, 2]].tolist()


def test_tensorrt_llms_counts_under_a_load_balancer_are_of_slots(tmp_path: Path) -> None:
    """Read as experts they would be wrong without a word; with the balancer's file they are added up."""
    folder = tensorrt(tmp_path)
    balancer = tmp_path / "moe.yaml"
    balancer.write_text("num_slots: 4\ninitial_global_assignments:\n  0: [2, 0, 1, 0]\n  2: [1, 1, 0, 2]\n")
    table = open_loads(folder, expert_map=balancer)
    both = (6 * TABLE).tolist()  # two ranks, 1 + 2 times the table, and two iterations
    assert table.load_LE.tolist() == [
        [both[0][1] + both[0][3], both[0][2], both[0][0]], [both[2][2], both[2][0] + both[2][1], both[2][3]]
    ]  # fmt: skip
    for text, message in (
        ("num_slots: 4\n", "initial_global_assignments"), ("initial_global_assignments: {0: [0, 1]}\n", "2"),
        ("initial_global_assignments: {0: [0, 1], 2: [1, 0]}\n", "4 slots"), ("a: [b", "load balancer"),
    ):  # fmt: skip
        balancer.write_text(text)
        with pytest.raises(TraceError, match=message):
            open_loads(folder, expert_map=balancer)


def test_other_files_beside_tensorrt_llms_ranks_are_left_alone(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    folder = tensorrt(tmp_path)
    save_file({"100_0": np.zeros((5, 2), dtype=np.int32)}, folder / "rank0_raw.safetensors")
    assert open_loads(folder).provenance["ranks"] == 2


def test_vllm_ascends_slots_become_experts(tmp_path: Path) -> None:
    slots = [[[0, 1, 2], [2, 3, 0]], [[3, 2, 1], [0, 1, 2]]]  # [layers, ranks, slots]
    layers = [
        {"layer_id": number, "device_count": 2, "device_list": [
            {"device_id": rank, "device_expert": held} for rank, held in enumerate(ranks)]}
        for number, ranks in enumerate(slots)
    ]  # fmt: skip
    (tmp_path / "map.json").write_text(json.dumps({"moe_layer_count": 2, "layer_list": layers}))
    load = np.array([[[1, 2, 3], [4, 5, 6]], [[10, 20, 30], [40, 50, 60]]])  # [layers, ranks, slots]
    expected = np.array([[1 + 6, 2, 3 + 4, 5], [40, 30 + 50, 20 + 60, 10]])
    for held, total in ((load, expected), (np.stack([load, 0 * load, 3 * load]), 4 * expected)):  # with iterations
        np.save(tmp_path / "moe_load.npy", held)
        table = open_loads(tmp_path / "moe_load.npy", expert_map=tmp_path / "map.json")
        assert table.format == "vllm-ascend"
        assert table.load_LE.tolist() == total.tolist()
    assert len(table.load_SLE) == 2  # an iteration without load was none
    with pytest.raises(TraceError, match="give the expert map"):
        open_loads(tmp_path / "moe_load.npy", "vllm-ascend")
    with pytest.raises(TraceError, match="give the --expert-map"):
        open_loads(tmp_path / "moe_load.npy")
    np.save(tmp_path / "few.npy", load[:1])
    with pytest.raises(TraceError, match="is \\[layers, ranks, slots of a rank\\]"):
        open_loads(tmp_path / "few.npy", expert_map=tmp_path / "map.json")


def test_vllm_ascends_ranks_may_stand_first(tmp_path: Path) -> None:
    """As one stacks what every rank saved; with as many ranks as layers the engine's own order is meant."""
    held = [{"device_expert": [0, 1]}, {"device_expert": [2, 3]}]
    (tmp_path / "map.json").write_text(json.dumps({"layer_list": [{"device_list": held}] * 3}))
    np.save(tmp_path / "moe_load.npy", np.arange(1, 13).reshape(2, 3, 2))
    table = open_loads(tmp_path / "moe_load.npy", expert_map=tmp_path / "map.json")
    assert table.load_LE.tolist() == [[1, 2, 7, 8], [3, 4, 9, 10], [5, 6, 11, 12]]


def test_sglangs_unused_steps_do_not_count_as_held_out(tmp_path: Path) -> None:
    """The ring holds 1,000 steps unless told otherwise; after a few requests most of them are zeros."""
    ring = np.zeros((1000, *TABLE.shape), dtype=np.int32)
    ring[:4] = [TABLE, 2 * TABLE, 3 * TABLE, 4 * TABLE]
    np.savez(tmp_path / "stat.npz", logical_count=ring)
    earlier, later = halves(open_loads(tmp_path / "stat.npz"))
    assert earlier.tolist() == (3 * TABLE)[[0, 2]].tolist()
    assert later.tolist() == (7 * TABLE)[[0, 2]].tolist()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[1, -2]]", "negative"),
        ("[[1, NaN]]", "not a number"),
        ("[[0, 0]]", "all loads are 0"),
        ("[1, 2]", "is \\[layers, experts\\]"),
        ("[[1], [2]]", "of 1 experts"),
        ("[[1, 2], [3]]", "no table of numbers"),
        ('[["a", "b"]]', "loads are numbers"),
        ('{"some": 1, "other": 2}', "name it one of"),
        ("[[1, 2", "truncated or no JSON"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "loads.json"
    path.write_text(text)
    with pytest.raises(TraceError, match=message):
        open_loads(path)


def test_damaged_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="does not exist"):
        open_loads(tmp_path / "none.npy")
    whole = write(tmp_path, "npy").read_bytes()
    (tmp_path / "cut.npy").write_bytes(whole[:-9])
    with pytest.raises(TraceError, match="damaged"):
        open_loads(tmp_path / "cut.npy")
    np.save(tmp_path / "objects.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(TraceError, match="damaged"):
        open_loads(tmp_path / "objects.npy")
    with pytest.raises(TraceError, match="no statistics of TensorRT-LLM"):
        open_loads(tmp_path)
    with pytest.raises(ConfigError, match="did you mean 'eplb'"):
        open_loads(tmp_path / "cut.npy", "eplbb")
    with pytest.raises(ConfigError, match="leave one of them out"):
        open_loads(tmp_path / "cut.npy", "eplb", tmp_path / "map.json")


def test_statistics_that_contradict_themselves_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="says 8 experts"):
        open_loads(tensorrt(tmp_path, {"num_experts": 8}))
    (tmp_path / "rank1.safetensors").write_bytes(b"\x00" * 20)
    with pytest.raises(TraceError, match=r"rank1.safetensors is damaged"):
        open_loads(tmp_path)
