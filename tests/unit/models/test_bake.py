"""Baked checkpoints, without torch: what is renamed, moved, left and refused, by values that tell tensors apart."""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from coterie.checkpoint import byte_copy
from coterie.checkpoint.compare_renumbered import compare_renumbered
from coterie.cli.main import main
from coterie.errors import CheckpointError, ConfigError, InfeasiblePlacement
from coterie.models.bake import bake, unbake
from coterie.models.baked import baked_placement, unbaked_trace
from coterie.placement.numbering import EXPERT_ORDER_KEY, expert_order_digest
from coterie.placement.placement import Placement
from coterie.spec import MoESpec
from coterie.topology import Topology
from coterie.trace.routing_trace import RoutingTrace

EXPERTS, HIDDEN, WIDTH, LAYERS = 12, 8, 6, 3  # two-digit numbers change the length of headers
CONFIG = {
    "model_type": "qwen3_moe", "num_experts": EXPERTS, "num_experts_per_tok": 2, "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN, "moe_intermediate_size": WIDTH, "decoder_sparse_step": 1, "mlp_only_layers": [0],
}  # fmt: skip
MOE_LAYERS = (1, 2)
MAP = np.stack([np.random.default_rng(seed).permutation(EXPERTS) for seed in MOE_LAYERS])


def values(*shape: int, seed: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 200, shape).astype(dtype)


def numbered(parts: Mapping[str, tuple[tuple[int, ...], Any]], prefix: str = "model.layers") -> dict[str, np.ndarray]:
    made = {}
    for layer in MOE_LAYERS:
        made[f"{prefix}.{layer}.mlp.gate.weight"] = values(EXPERTS, HIDDEN, seed=layer)
        for expert in range(EXPERTS):
            for part, (shape, dtype) in parts.items():
                name = f"{prefix}.{layer}.mlp.experts.{expert}.{part}"
                made[name] = values(*shape, seed=zlib.crc32(name.encode()), dtype=dtype)
    return made


PLAIN = {f"{name}.weight": ((WIDTH, HIDDEN), np.float32) for name in ("gate_proj", "up_proj", "down_proj")}
REST = {
    "model.embed_tokens.weight": values(30, HIDDEN, seed=1),
    "model.layers.0.mlp.gate_proj.weight": values(WIDTH, HIDDEN, seed=2),
    "model.layers.1.self_attn.q_proj.weight": values(HIDDEN, HIDDEN, seed=3),
    "model.layers.1.mlp.shared_expert_gate.weight": values(1, HIDDEN, seed=4),
}


def write(folder: Path, tensors: Mapping[str, np.ndarray], shards: int = 1, **config: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))  # one line, unlike what is written
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        own = {key: value for number, (key, value) in enumerate(sorted(tensors.items())) if number % shards == shard}
        save_file(own, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(own, name)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=3))
    return folder


def placement(map_LE: np.ndarray = MAP, topology: str | Topology = "4", **spec: Any) -> Placement:
    made = MoESpec("toy", **{"num_layers": len(map_LE), "num_experts": EXPERTS, "top_k": 2, **spec})
    return Placement(map_LE, Topology.parse(topology) if isinstance(topology, str) else topology, made)


def held(folder: Path) -> dict[str, np.ndarray]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def assert_baked(source: Mapping[str, np.ndarray], out: Mapping[str, np.ndarray], moved: tuple[str, ...]) -> None:
    """`out` is `source` by the definition: expert s is expert map[s], and so are slices of what ends with `moved`."""
    assert out.keys() == source.keys()
    for name, value in out.items():
        layer = next(
            (index for index, number in enumerate(MOE_LAYERS) if name.startswith(f"model.layers.{number}.")), 0
        )
        before, found, after = name.partition(".experts.")
        number, _, part = after.partition(".")
        if found and number.isdigit() and not name.startswith("mtp"):
            np.testing.assert_array_equal(value, source[f"{before}.experts.{MAP[layer][int(number)]}.{part}"])
        elif name.endswith(moved):
            along = value.reshape(EXPERTS, -1)
            np.testing.assert_array_equal(along, source[name].reshape(EXPERTS, -1)[MAP[layer]])
        else:
            np.testing.assert_array_equal(value, source[name])


@pytest.mark.parametrize("kernel", [True, False])
def test_shards_are_renamed_and_come_back_bit_for_bit(
    kernel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernel:
        monkeypatch.delattr(byte_copy.os, "copy_file_range", raising=False)
    tensors = {**numbered(PLAIN), **REST}
    source, out = write(tmp_path / "source", tensors, shards=7), tmp_path / "out"
    (source / "tokenizer.json").write_text("{}")
    (source / "pytorch_model.bin").write_bytes(b"other weights")
    told: list[tuple[str, int, int]] = []
    written = bake(source, placement(), out, progress=lambda *step: told.append(step))
    assert_baked(tensors, held(out), (".gate.weight",))
    assert written.left_out == ("pytorch_model.bin",)
    assert told[-1][1] == told[-1][2]
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert {name: file for name, file in index.items() if name not in load_file(out / file)} == {}
    assert json.loads((out / "config.json").read_text()) == {**json.loads((source / "config.json").read_text()),
                                                            EXPERT_ORDER_KEY: expert_order_digest(MAP)}  # fmt: skip
    np.testing.assert_array_equal(baked_placement(out).physical_to_logical_map, MAP)
    assert compare_renumbered(source, out, MAP, MOE_LAYERS).renamed > 0
    unbake(out, tmp_path / "back")
    expected = files_of(source)
    del expected["pytorch_model.bin"]
    assert files_of(tmp_path / "back") == expected


def test_a_longer_header_keeps_data_aligned_to_blocks(tmp_path: Path) -> None:
    """A shard that holds experts 0 to 9 alone is given two-digit numbers."""
    tensors = {**numbered(PLAIN), **REST}
    short = {name for name in tensors if name.split(".experts.")[-1].split(".")[0] in tuple("0123456789")}
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(CONFIG))
    parts = {"a.safetensors": short, "b.safetensors": tensors.keys() - short}
    for file, names in parts.items():
        save_file({name: tensors[name] for name in sorted(names)}, source / file)
    index = {"weight_map": {name: file for file, names in parts.items() for name in names}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    bake(source, placement(), tmp_path / "out")
    grown = (tmp_path / "out" / "a.safetensors").stat().st_size - (source / "a.safetensors").stat().st_size
    assert grown > 0
    assert grown % 4096 == 0
    assert_baked(tensors, held(tmp_path / "out"), (".gate.weight",))
    unbake(tmp_path / "out", tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(source)


QUANTISED = {
    "gptq": {f"down_proj.{name}": shape for name, shape in {
        "qweight": ((1, HIDDEN), np.int32), "qzeros": ((1, 1), np.int32), "scales": ((1, HIDDEN), np.float16),
        "g_idx": ((WIDTH,), np.int32)}.items()},
    "fp8": {"down_proj.weight": ((HIDDEN, WIDTH), np.uint8), "down_proj.weight_scale_inv": ((1, 1), np.float32)},
    "nvfp4": {"w1.weight": ((HIDDEN, 3), np.uint8), "w1.weight_scale": ((HIDDEN, 1), np.uint8),
              "w1.weight_scale_2": ((1,), np.float32), "w1.input_scale": ((1,), np.float32)},
}  # fmt: skip


@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_experts_are_renamed(kind: str, tmp_path: Path) -> None:
    tensors = {
        **numbered(QUANTISED[kind]),
        **REST,
        "model.layers.1.mlp.gate.e_score_correction_bias": values(12, seed=7),
    }
    settings = {"quant_method": kind, "dynamic": {r"-:.*experts\.[0-9]+\.up_proj": {}}, "ignore": [r"re:.*mlp\.gate$"]}
    source = write(tmp_path / "source", tensors, quantization_config=settings)
    bake(source, placement(), tmp_path / "out")
    assert_baked(tensors, held(tmp_path / "out"), (".gate.weight", "correction_bias"))


def test_mxfp4_of_gpt_oss_is_moved_slice_by_slice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large slices are copied by themselves, small ones together; both ways are taken here."""
    monkeypatch.setattr("coterie.checkpoint.renumber._SMALL_SLICE_BYTES", 50)
    shapes = {
        "experts.gate_up_proj_blocks": (EXPERTS, 2 * WIDTH, 1, 4),
        "experts.gate_up_proj_scales": (EXPERTS, 2 * WIDTH, 1),
        "experts.gate_up_proj_bias": (EXPERTS, 2 * WIDTH), "experts.down_proj_blocks": (EXPERTS, HIDDEN, 1, 4),
        "experts.down_proj_scales": (EXPERTS, HIDDEN, 1), "experts.down_proj_bias": (EXPERTS, HIDDEN),
        "router.weight": (EXPERTS, HIDDEN), "router.bias": (EXPERTS,),
    }  # fmt: skip
    config = {
        "model_type": "gpt_oss", "num_local_experts": EXPERTS, "num_experts": None, "num_hidden_layers": 2,
        "intermediate_size": WIDTH, "quantization_config": {"quant_method": "mxfp4"},
    }  # fmt: skip
    tensors = {
        f"model.layers.{layer}.mlp.{name}": values(*shape, seed=layer, dtype=np.uint8)
        for layer in (0, 1) for name, shape in shapes.items()
    }  # fmt: skip
    source = write(tmp_path / "source", tensors, **config)
    baked = bake(source, placement(), tmp_path / "out")
    out = held(tmp_path / "out")
    for name, value in tensors.items():
        np.testing.assert_array_equal(out[name], value[MAP[int(name.split(".")[2])]])
    same = compare_renumbered(source, tmp_path / "out", MAP, (0, 1))
    assert (same.renamed, same.moved) == (0, len(tensors))
    assert baked.moved == int((np.arange(EXPERTS) != MAP).sum())
    unbake(tmp_path / "out", tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(source)


def test_layers_that_predict_further_ahead_stay(tmp_path: Path) -> None:
    further = {f"model.layers.{LAYERS}.mlp.experts.{e}.up_proj.weight": values(3, seed=e) for e in range(EXPERTS)}
    mtp = {f"mtp.layers.1.mlp.experts.{e}.up_proj.weight": values(3, seed=e) for e in range(EXPERTS)}
    tensors = {**numbered(PLAIN), **REST, **further, **mtp}
    bake(write(tmp_path / "source", tensors), placement(), tmp_path / "out")
    out = held(tmp_path / "out")
    assert all(np.array_equal(out[name], tensors[name]) for name in (*further, *mtp))
    inner = {name: value for name, value in out.items() if name not in further}
    assert_baked({name: tensors[name] for name in inner}, inner, (".gate.weight",))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("model.layers.1.mlp.gate.tid2eid", (50, 2), "gate.tid2eid stands beside experts and is not understood"),
        ("model.layers.1.mlp.gate.qweight", (1, EXPERTS), "gate.qweight stands beside experts"),
        ("model.layers.2.mlp.gate.bias", (HIDDEN,), "whose first axis is not the 12 experts"),
        ("model.layers.2.mlp.experts.rotation", (EXPERTS, 2), "experts.rotation stands beside experts"),
        ("model.layers.2.mlp.experts.12.up_proj.weight", (2, 2), "of an expert that the config does not have"),
        ("model.layers.2.mlp.experts.3.up_proj.bias", (2,), "layer 2 of the checkpoint lacks up_proj.bias of expert 0"),
        ("model.layers.2.mlp.experts.gate_up_proj", (EXPERTS, 2), "holds experts twice"),
        ("model.layers.2.moe_norm.scale", (EXPERTS,), "moe_norm.scale stands beside experts"),
        ("model.layers.2.other.experts.0.up_proj", (2,), "several blocks of experts"),
        ("vision.layers.2.mlp.experts.0.up_proj", (2,), "experts under model.layers and vision.layers"),
    ],
)
def test_what_is_not_understood_is_named(name: str, shape: tuple[int, ...], message: str, tmp_path: Path) -> None:
    source = write(tmp_path / "source", {**numbered(PLAIN), **REST, name: values(*shape, seed=0)})
    with pytest.raises(CheckpointError, match=message):
        bake(source, placement(), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_absent_tensors_and_configs_that_name_experts_are_refused(tmp_path: Path) -> None:
    tensors = {**numbered(PLAIN), **REST}
    for absent, message in (
        ("model.layers.2.mlp.gate.weight", "lacks its router's weight"),
        ("model.layers.1.mlp.experts.11.up_proj.weight", "lacks up_proj.weight of expert 11"),
    ):
        source = write(tmp_path / absent, {name: value for name, value in tensors.items() if name != absent})
        with pytest.raises(CheckpointError, match=message):
            bake(source, placement(), tmp_path / "out")
    source = write(tmp_path / "dense", REST)
    with pytest.raises(CheckpointError, match="no experts under known names"):
        bake(source, placement(), tmp_path / "out")
    for number, name in enumerate(("model.layers.1.mlp.experts.3.up_proj", r"re:.*experts\.(1|2)\..*")):
        source = write(tmp_path / f"config{number}", tensors, quantization_config={"ignore": ["lm_head", name]})
        with pytest.raises(CheckpointError, match="names experts by number"):
            bake(source, placement(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_placements_that_no_default_layout_has_are_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "source", {**numbered(PLAIN), **REST})
    uneven = Topology(devices_per_node=2, slots_per_device=(5, 7))
    with pytest.raises(InfeasiblePlacement, match=r"5 to 7 slots a device for 12 experts.*place without --redundant"):
        bake(source, placement(topology=uneven), tmp_path / "out")
    with pytest.raises(InfeasiblePlacement, match="3 layers, 12 experts"):
        bake(source, placement(np.concatenate([MAP, MAP[:1]])), tmp_path / "out")
    with pytest.raises(InfeasiblePlacement, match="for other MoE layers"):
        bake(source, placement(layer_ids=(0, 2), num_model_layers=3), tmp_path / "out")
    with pytest.raises(ConfigError, match="own folder"):
        bake(source, placement(), source / "inside")
    groups = {
        "model_type": "deepseek_v3", "n_routed_experts": EXPERTS, "num_experts": None, "n_group": 4, "topk_group": 2,
        "first_k_dense_replace": 1, "mlp_only_layers": None, "decoder_sparse_step": None,
    }  # fmt: skip
    source = write(tmp_path / "grouped", {**numbered(PLAIN), **REST}, **groups)
    with pytest.raises(InfeasiblePlacement, match=r"mixes experts of router groups .* 4 groups of 3"):
        bake(source, placement(), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    size = 3
    whole = np.concatenate([group * size + np.array([2, 0, 1]) for group in (3, 1, 0, 2)])
    assert bake(source, placement(np.stack([whole, whole])), tmp_path / "out").moved > 0


def test_an_interrupted_bake_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "source", {**numbered(PLAIN), **REST}, shards=3)
    calls = []

    def interrupted(*step: Any) -> None:
        calls.append(step)
        if len(calls) % 2 == 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bake(source, placement(), tmp_path / "out", progress=interrupted)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    first = bake(source, placement(), tmp_path / "out")
    before = files_of(tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        bake(source, placement(MAP[::-1]), tmp_path / "out", progress=interrupted)
    assert files_of(tmp_path / "out") == before
    second = bake(source, placement(MAP[::-1]), tmp_path / "out")  # replaces what it wrote itself
    assert second.expert_order != first.expert_order
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_what_was_changed_since_cannot_be_undone(tmp_path: Path) -> None:
    source = write(tmp_path / "source", {**numbered(PLAIN), **REST})
    with pytest.raises(CheckpointError, match=r"is no baked checkpoint: it holds no coterie_bake\.json"):
        unbake(source, tmp_path / "back")
    out = bake(source, placement(), tmp_path / "out").out
    with pytest.raises(ConfigError, match="is baked already"):
        bake(out, placement(), tmp_path / "twice")
    weights = held(out)
    save_file(weights, out / "model.safetensors", metadata={"format": "np"})
    with pytest.raises(CheckpointError, match="was changed since the placement was baked"):
        unbake(out, tmp_path / "back")
    record = json.loads((out / "coterie_bake.json").read_text())
    (out / "coterie_bake.json").write_text(json.dumps({**record, "headers": 5}))
    with pytest.raises(CheckpointError, match="is damaged"):
        unbake(out, tmp_path / "back")
    placement(MAP[::-1]).save(out / "coterie_placement.json")
    (out / "coterie_bake.json").write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match="do not belong together"):
        unbake(out, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_comparing_names_the_tensor_that_differs(tmp_path: Path) -> None:
    source = write(tmp_path / "source", {**numbered(PLAIN), **REST})
    out = bake(source, placement(), tmp_path / "out").out
    assert compare_renumbered(source, out, MAP, MOE_LAYERS).nbytes > 0
    with pytest.raises(CheckpointError, match="is not model"):
        compare_renumbered(source, out, MAP[::-1], MOE_LAYERS)
    for name in ("model.layers.2.mlp.gate.weight", "model.layers.1.mlp.experts.4.up_proj.weight"):
        weights = held(out)
        weights[name][1, 2] += 1
        save_file(weights, out / "model.safetensors")
        with pytest.raises(CheckpointError, match=f"{name} in .* is not"):
            compare_renumbered(source, out, MAP, MOE_LAYERS)
        weights[name][1, 2] -= 1
        save_file(weights, out / "model.safetensors")
    del weights["model.embed_tokens.weight"]
    save_file(weights, out / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks model\.embed_tokens\.weight"):
        compare_renumbered(source, out, MAP, MOE_LAYERS)


def test_traces_of_a_baked_model_get_the_published_ids(tmp_path: Path) -> None:
    source = write(tmp_path / "source", {**numbered(PLAIN), **REST})
    out = bake(source, placement(), tmp_path / "out").out
    ids = np.stack([np.arange(EXPERTS).reshape(6, 2)] * 2).astype(np.uint8)
    trace = RoutingTrace(ids, placement().spec, provenance={"source": "engine"})
    back = unbaked_trace(trace, out)
    np.testing.assert_array_equal(back.expert_ids.reshape(2, EXPERTS), MAP)
    with pytest.raises(ConfigError, match="as published again"):
        unbaked_trace(back, out)
    other = RoutingTrace(ids, placement().spec, provenance={EXPERT_ORDER_KEY: "0123"})
    with pytest.raises(ConfigError, match="the trace numbers experts by 0123"):
        unbaked_trace(other, out)


def run(monkeypatch: Any, capsys: Any, *arguments: Any) -> tuple[Any, str, str]:
    monkeypatch.setattr(sys, "argv", ["coterie", *map(str, arguments)])
    with pytest.raises(SystemExit) as exited:
        main()
    captured = capsys.readouterr()
    return exited.value.code, captured.out, captured.err


def test_the_command(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    source, file, out = write(tmp_path / "source", {**numbered(PLAIN), **REST}), tmp_path / "p.json", tmp_path / "out"
    placement().save(file)
    code, shown, err = run(monkeypatch, capsys, "bake", source, "--placement", file, "--out", out, "--verify")
    assert (code, err) == (0, "")
    assert f"experts renumbered, order {expert_order_digest(MAP)}" in shown
    assert "verified: 78 tensors" in shown
    assert "over 4 ranks and the default (linear) layout, 3 experts each" in shown
    code, shown, err = run(monkeypatch, capsys, "bake", out, "--undo", "--out", tmp_path / "back", "--verify", "--json")
    assert (code, err) == (0, "")
    result = json.loads(shown)
    assert (result["expert_order"], result["tensors"]["tensors"], result["outputs"]) == (None, 78, None)
    assert files_of(tmp_path / "back") == files_of(source)
    for arguments, message in (
        ((source,), "baking needs a placement; give --placement"),
        ((out, "--undo", "--placement", file), "leave --placement and --reorder out"),
        ((source, "--undo"), "is no baked checkpoint"),
        ((out, "--placement", file), "is baked already"),
    ):
        code, shown, err = run(monkeypatch, capsys, "bake", *arguments, "--out", tmp_path / "new")
        assert (code, shown, err.count("\n")) == (2, "", 1)
        assert message in err
    assert not (tmp_path / "new").exists()


def test_a_placement_made_of_a_baked_models_trace_says_so(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """From the recording through import and place to the refusal to bake the original with it."""
    source = write(tmp_path / "source", {**numbered(PLAIN), **REST})
    out = bake(source, placement(), tmp_path / "out").out
    rng = np.random.default_rng(1)
    ids = np.array([[rng.permutation(EXPERTS)[:2] for _ in range(200)] for _ in MOE_LAYERS], dtype=np.uint8)
    RoutingTrace(ids, placement().spec, sequence_ids=np.arange(200) // 10).save(tmp_path / "raw.safetensors")
    raw, made = tmp_path / "raw.safetensors", tmp_path / "p.json"
    for options, fails in ((("--model", out), True), (("--unbake", out), False)):
        trace = tmp_path / "trace.safetensors"
        assert run(monkeypatch, capsys, "trace", "import", raw, "--out", trace, *options)[0] == 0
        assert run(monkeypatch, capsys, "place", trace, "--topology", "4", "--method", "cap", "--out", made)[0] == 0
        code, _, err = run(monkeypatch, capsys, "bake", source, "--placement", made, "--out", tmp_path / "new")
        assert (code, "the placement numbers experts by the baked placement" in err) == (
            (2, True) if fails else (0, False)
        )
        export = ("export", made, "--to", "json", "--out", tmp_path / "engine.json", "--model")
        for folder, is_own in ((source, not fails), (out, fails)):
            code, _, err = run(monkeypatch, capsys, *export, folder)
            assert (code, "numbers experts" in err) == ((0, False) if is_own else (2, True))
