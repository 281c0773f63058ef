"""The plugin in a real vLLM (its CPU build, in an environment of its own): what Transformers does, token for token.

Engines run in subprocesses (`vllm_run.py`), a few for all tests; what is expected of them is computed here.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.placement.placement import Placement
from coterie.pruning.destinations import Priced
from coterie.spec import MoESpec
from coterie.topology import Topology
from coterie.trace.routing_trace import RoutingTrace

pytestmark = [pytest.mark.needs("transformers"), pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("COTERIE_VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
TOKENS = 24
P = 0.3


@dataclass(frozen=True)
class Case:
    """What one engine is asked, and where its files are."""

    model: str
    config: dict[str, Any] | None = None
    engine: dict[str, Any] | None = None


@pytest.fixture(scope="module")
def python() -> Path:
    if not PYTHON.is_file():
        reason = f"needs {PYTHON}: make vllm-env"
        if os.environ.get("COTERIE_REQUIRE_ALL") == "1":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    return PYTHON


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Token ids of real text, of different lengths."""
    from coterie import data
    from coterie.models.load import load_tokenizer

    ids = load_tokenizer("tiny-qwen3-moe")(data.text("encyclopedic")[:4000])["input_ids"]
    lengths, starts = (17, 40, 23, 61, 9, 33), (0, 100, 200, 300, 400, 500)
    return [ids[start : start + length] for start, length in zip(starts, lengths, strict=True)]


@pytest.fixture(scope="module")
def placement() -> Placement:
    """tiny-qwen3-moe's experts on four devices at random, another way in each layer."""
    spec = MoESpec("tiny-qwen3-moe", 4, 64, 8)
    rng = np.random.default_rng(7)
    return Placement(np.stack([rng.permutation(64) for _ in range(4)]), Topology.parse("4"), spec)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, placement: Placement) -> Path:
    """Where all files are: a baked checkpoint, a placement, prices."""
    from coterie.models.bake import bake
    from coterie.models.load import resolve

    made = tmp_path_factory.mktemp("vllm")
    bake(resolve("tiny-qwen3-moe"), placement, made / "baked")
    placement.save(made / "placement.json")
    save_grouped(made / "grouped")
    rule = {"rule": "priced", "floor": 0.5, "theta": thetas().tolist()}
    (made / "prices.json").write_text(json.dumps({"rule": rule}))
    return made


def save_grouped(target: Path) -> None:
    """A random model with a dense layer, groups of experts, sigmoid scores, their correction and a scaling factor."""
    import torch
    import transformers

    from coterie.models.backend import quiet
    from coterie.models.load import resolve

    config = transformers.AutoConfig.for_model(
        "glm4_moe", vocab_size=4096, hidden_size=128, intermediate_size=64, moe_intermediate_size=32, head_dim=32,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, first_k_dense_replace=1, n_shared_experts=1,
        n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2, norm_topk_prob=True,
        routed_scaling_factor=1.5, initializer_range=0.2, max_position_embeddings=512,
    )  # fmt: skip
    with quiet(), torch.random.fork_rng():
        torch.manual_seed(3)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                torch.nn.init.normal_(buffer, std=0.3)
        model.save_pretrained(target)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve("tiny-qwen3-moe") / name, target)


def thetas() -> np.ndarray:
    return np.linspace(0.05, 0.12, 16).reshape(4, 4)


def environment(python: Path) -> dict[str, str]:
    """As it is here, with nothing of here; caches stay beside the engine."""
    return {
        **os.environ, "PYTHONPATH": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(python.parents[1] / "cache"),
    }  # fmt: skip


def launch(python: Path, folder: Path, name: str, cases: dict[str, Case], prompts: Any, **env: str) -> dict[str, Any]:
    """Run cases one after the other in one process; each case's result, by name."""
    from coterie.models.load import resolve

    jobs, first = [], ""
    for key, case in cases.items():
        model = folder / case.model if (folder / case.model).is_dir() else resolve(case.model)
        file = None
        if case.config is not None:
            file = folder / f"{key}.yaml"
            file.write_text(json.dumps(case.config))  # JSON is YAML
            first = first or str(file)
        jobs.append({
            "model": str(model), "config": file and str(file), "prompts": prompts, "tokens": TOKENS,
            "engine": case.engine or {},
        })  # fmt: skip
    (folder / f"{name}.json").write_text(json.dumps(jobs))
    sockets = folder / "rpc"
    sockets.mkdir(exist_ok=True)
    given = {
        **environment(python), "COTERIE_CONFIG": first, "VLLM_RPC_BASE_PATH": str(sockets),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **env,
    }  # fmt: skip
    results = folder / f"{name}.results.json"
    command = [python, Path(__file__).with_name("vllm_run.py"), folder / f"{name}.json", results]
    ran = subprocess.run(command, env=given, capture_output=True, text=True, timeout=800, check=False)
    log = ran.stdout + ran.stderr
    assert ran.returncode == 0, log[-4000:]
    return {**dict(zip(cases, json.loads(results.read_text()), strict=True)), "log": log}


@pytest.fixture(scope="module")
def plain(python: Path, folder: Path, prompts: Any) -> dict[str, Any]:
    """Without the plugin."""
    return launch(python, folder, "plain", {"original": Case("tiny-qwen3-moe"), "baked": Case("baked")}, prompts)


@pytest.fixture(scope="module")
def served(python: Path, folder: Path, prompts: Any) -> dict[str, Any]:
    """With the plugin, in every way that one process can test."""
    cap = {"rule": "cap", "p": P}
    (folder / "traces").mkdir()
    cases = {
        "nothing": Case(
            "tiny-qwen3-moe", {"prune": {"p": 0}, "devices": 8, "record": {"folder": "traces"}, "report": "none.json"}
        ),
        "cap": Case("tiny-qwen3-moe", {"prune": cap, "devices": 8, "report": "cap.json", "interval": 0}),
        "costs": Case(
            "tiny-qwen3-moe", {"prune": {"rule": "priced", "prices": "prices.json"}, "devices": "2x2,inter=3"}
        ),
        "baked": Case("baked", {"prune": cap, "devices": 4}),
        "placed": Case("tiny-qwen3-moe", {"prune": {**cap, "renormalise": False}, "placement": "placement.json"}),
        "mixtral": Case("tiny-mixtral", {"prune": {"rule": "naive", "p": 0.45}, "devices": 4}),
        "grouped": Case("grouped", {"prune": {**cap, "p": 0.4}, "devices": 4}),
        "wrong": Case("tiny-mixtral", {"prune": cap, "placement": "placement.json"}),
        "numbered": Case("baked", {"prune": cap, "placement": "placement.json"}),
    }
    return launch(python, folder, "served", cases, prompts)


@pytest.fixture(scope="module")
def models(folder: Path) -> Callable[[str], Any]:
    from coterie.models.load import load_model

    loaded: dict[str, Any] = {}

    def load(name: str) -> Any:
        import torch

        if name not in loaded:
            source = folder / name
            loaded[name] = load_model(source if source.is_dir() else name, dtype=torch.float32)
            loaded[name].generation_config.eos_token_id = None
        return loaded[name]

    return load


def generate(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy continuations by Transformers, one prompt at a time."""
    import torch

    made = []
    for ids in prompts:
        out = model.generate(torch.tensor([ids]), max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
        made.append(out[0, len(ids) :].tolist())
    return made


def test_baked_and_original_give_the_tokens_of_transformers(plain: Any, models: Any, prompts: Any) -> None:
    expected = generate(models("tiny-qwen3-moe"), prompts)
    assert plain["original"]["tokens"] == expected
    assert plain["baked"]["tokens"] == expected
    for one, other in zip(plain["original"]["logprobs"], plain["baked"]["logprobs"], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    assert "coterie:" not in plain["log"]


def test_p_zero_changes_nothing_and_says_what_it_does(plain: Any, served: Any, folder: Path) -> None:
    assert served["nothing"]["tokens"] == plain["original"]["tokens"]
    assert served["nothing"]["logprobs"] == plain["original"]["logprobs"]
    (report,) = served["nothing"]["report"]
    assert report["pruning"]["kept_weight"] == pytest.approx(1)
    assert report["pruning"]["num_tokens"] == report["recorded_tokens"]
    assert f"coterie: {report['does']}" in served["log"]
    assert "no traffic is saved" in report["does"]


def pruned(model: Any, prompts: Any, **how: Any) -> tuple[list[list[int]], dict[str, Any]]:
    import coterie

    with coterie.prune_destinations(model, homes=None, **how) as pruner:
        tokens = generate(model, prompts)
    return tokens, pruner.stats().to_json()


@pytest.mark.parametrize("case", ["cap", "costs", "baked", "placed", "mixtral", "grouped"])
def test_pruned_engines_give_the_tokens_of_pruned_transformers(
    case: str, served: Any, plain: Any, models: Any, prompts: Any, placement: Placement
) -> None:
    model = models({"mixtral": "tiny-mixtral", "grouped": "grouped"}.get(case, "tiny-qwen3-moe"))
    how: dict[str, Any] = {
        "cap": {"p": P, "topology": "8"},
        "costs": {"rule": Priced(thetas(), 0.5), "topology": "2x2,inter=3"},
        "baked": {"p": P, "placement": placement},  # numbered in order, the experts lie as they were placed
        "placed": {"p": P, "placement": placement, "renormalise": False},
        "mixtral": {"p": 0.45, "rule": "naive", "topology": "4"},
        "grouped": {"p": 0.4, "topology": "4"},
    }[case]
    tokens, stats = pruned(model, prompts, **how)
    assert "error" not in served[case], served[case]
    assert served[case]["tokens"] == tokens
    assert tokens != plain["original"]["tokens"]
    (report,) = served[case]["report"]
    counted = report["pruning"]
    assert counted["num_tokens"] == stats["num_tokens"]
    for name, values in stats["layers"].items():
        np.testing.assert_allclose(counted["layers"][name], values, atol=1e-6, err_msg=name)
    assert counted["kept_weight"] < 1


def test_the_counts_are_in_a_file_too(served: Any, folder: Path) -> None:
    (report,) = served["cap"]["report"]
    assert json.loads((folder / "cap-rank0.json").read_text()) == report


def test_the_recorded_trace_is_what_transformers_decides(served: Any, folder: Path, models: Any, prompts: Any) -> None:
    import coterie

    assert "error" not in served["nothing"], served["nothing"]
    trace = RoutingTrace.load(folder / "traces" / "trace-rank0.safetensors")
    with coterie.record(models("tiny-qwen3-moe")) as recorder:
        generate(models("tiny-qwen3-moe"), prompts)
    expected = recorder.trace()
    assert (trace.spec.num_layers, trace.spec.num_experts, trace.spec.top_k) == (4, 64, 8)
    mine, theirs = decisions(trace), decisions(expected)
    np.testing.assert_array_equal(mine[0], theirs[0])
    np.testing.assert_allclose(mine[1], theirs[1], atol=1e-5)
    order = np.lexsort((trace.positions, trace.sequence_ids))
    other = np.lexsort((expected.positions, expected.sequence_ids))
    for name in ("sequence_ids", "positions", "phase"):
        np.testing.assert_array_equal(getattr(trace, name)[order], getattr(expected, name)[other])


def decisions(trace: RoutingTrace) -> tuple[np.ndarray, np.ndarray]:
    """Ids and weights, tokens by sequence and position, each token's experts by number."""
    order = np.lexsort((trace.positions, trace.sequence_ids))
    ids, weights = np.asarray(trace.expert_ids)[:, order], np.asarray(trace.weights)[:, order]
    slots = np.argsort(ids, axis=2)
    return np.take_along_axis(ids, slots, 2), np.take_along_axis(weights, slots, 2)


def test_what_does_not_belong_to_the_model_is_refused_in_one_line(served: Any) -> None:
    for case, said in (
        ("wrong", "use a placement made from this model's trace"),
        ("numbered", "numbers experts as published"),
    ):
        assert said in served[case]["message"], served[case]
        assert sum("coterie: " in line and said in line for line in served["log"].splitlines()) == 1


def test_every_rank_of_several_processes_writes_its_file(python: Path, folder: Path, prompts: Any, served: Any) -> None:
    config = {"prune": {"p": P}, "devices": 8, "report": "tp.json", "record": {"folder": ".", "tokens": 50}}
    cases = {"tp": Case("tiny-qwen3-moe", config, {"tensor_parallel_size": 2})}
    several = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    result = launch(python, folder, "tp", cases, prompts, **several)
    assert result["tp"]["tokens"] == served["cap"]["tokens"]
    first, second = (json.loads((folder / f"tp-rank{rank}.json").read_text()) for rank in (0, 1))
    assert first["pruning"] == second["pruning"]
    assert first["pruning"]["kept_weight"] == pytest.approx(served["cap"]["report"][0]["pruning"]["kept_weight"])
    assert RoutingTrace.load(folder / "trace-rank0.safetensors").num_tokens == 50
    assert not (folder / "trace-rank1.safetensors").exists()
    assert sum("coterie: prunes" in line for line in result["log"].splitlines()) == 1


REFUSALS = """
import json
from types import SimpleNamespace as Some
from coterie.vllm_plugin.adapters import v0_32 as adapter

def said(refuse, *arguments):
    try:
        refuse(*arguments)
    except adapter.ConfigError as error:
        return str(error)

def engine(speculative=None, **parallel):
    plain = dict(enable_eplb=False, pipeline_parallel_size=1, prefill_context_parallel_size=1, use_ubatching=False,
                 enable_expert_parallel=True, expert_placement_strategy="linear")
    return Some(parallel_config=Some(**{**plain, **parallel}), speculative_config=speculative)

def layer(monolithic=False, shared=0):
    return Some(is_monolithic=monolithic, layer_name="model.layers.0.mlp.experts", _quant_method=Some(), router=None,
                expert_map_manager=Some(num_fused_shared_experts=shared))

print(json.dumps([
    said(adapter._refuse_engine, engine(), True),
    said(adapter._refuse_engine, engine(speculative=Some()), False),
    said(adapter._refuse_layer, layer()),
    said(adapter._refuse_engine, engine(enable_eplb=True), False),
    said(adapter._refuse_engine, engine(pipeline_parallel_size=2), False),
    said(adapter._refuse_engine, engine(prefill_context_parallel_size=2), False),
    said(adapter._refuse_engine, engine(use_ubatching=True), False),
    said(adapter._refuse_engine, engine(expert_placement_strategy="round_robin"), False),
    said(adapter._refuse_engine, engine(speculative=Some()), True),
    said(adapter._refuse_layer, layer(monolithic=True)),
    said(adapter._refuse_layer, layer(shared=1)),
]))
"""


def test_ways_to_serve_that_cannot_work_are_refused(python: Path) -> None:
    """Most of them need GPUs, so the engine is stood in for; that its attributes are named so, the other tests show."""
    ran = subprocess.run([python, "-c", REFUSALS], env=environment(python), capture_output=True, text=True, check=True)
    said = json.loads(ran.stdout.splitlines()[-1])
    assert said[:3] == [None, None, None]
    words = (
        "--enable-eplb", "--pipeline-parallel-size", "context parallelism", "--enable-dbo", "round_robin; use linear",
        "speculative", "--moe-backend", "shared or zero experts",
    )  # fmt: skip
    for sentence, word in zip(said[3:], words, strict=True):
        assert word in sentence
        assert "\n" not in sentence


INVERSE = """
from coterie.vllm_plugin.adapters import v0_32 as adapter
names = ("load_model", "execute_model", "shutdown")
before = [getattr(adapter.Worker, name) for name in names]
adapter.install()
adapter.install()
wrapped = [getattr(adapter.Worker, name) for name in names]
assert all(now is not then and now.__wrapped__ is then for now, then in zip(wrapped, before)), "wrapped once"
assert hasattr(adapter.Worker, "coterie_report")
adapter.uninstall()
adapter.uninstall()
assert [getattr(adapter.Worker, name) for name in names] == before
assert not hasattr(adapter.Worker, "coterie_report")
print("as before")
"""


def test_hooking_in_has_an_inverse(python: Path) -> None:
    ran = subprocess.run([python, "-c", INVERSE], env=environment(python), capture_output=True, text=True, check=False)
    assert ran.stdout.splitlines()[-1:] == ["as before"], ran.stderr


def test_a_file_that_cannot_be_used_ends_the_start(python: Path, tmp_path: Path) -> None:
    (tmp_path / "coterie.yaml").write_text("prune: {rule: cap, p: 2}")
    given = {**environment(python), "COTERIE_CONFIG": str(tmp_path / "coterie.yaml")}
    command = [python, "-c", "import vllm; vllm.LLM('nothing')"]
    ran = subprocess.run(command, env=given, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1].startswith("coterie.errors.ConfigError: p = 2 in ")
