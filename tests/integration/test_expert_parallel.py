"""Real processes and sockets: the same tokens as one process, and what becomes of a group when a rank fails."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.placement.placement import Placement
from coterie.topology import Topology

pytestmark = [pytest.mark.needs("transformers"), pytest.mark.timeout(600)]
PROMPTS = ["Once upon a time", "The king said", "def main():", "In 1912 the city", "A", "What is 3 + 4?"]
RANK = str(Path(__file__).with_name("one_rank.py"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Group:
    """Processes that a test started, and ends."""

    def __init__(self, size: int, command: list[str], timeout: float = 60, ranks: list[int] | None = None) -> None:
        port = str(free_port())
        self.ranks = {rank: self._start(rank, size, port, command, timeout) for rank in ranks or range(size)}

    @staticmethod
    def _start(rank: int, size: int, port: str, command: list[str], timeout: float) -> subprocess.Popen[str]:
        told = {
            "RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1", "TIMEOUT": str(timeout),
        }  # fmt: skip
        return subprocess.Popen(
            [sys.executable, *command], env={**os.environ, **told}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def wait(self) -> dict[int, tuple[int, str, str]]:
        """Exit code, output and errors of every rank."""
        ended = {rank: process.communicate(timeout=300) for rank, process in self.ranks.items()}
        return {rank: (self.ranks[rank].returncode, *texts) for rank, texts in ended.items()}

    def end(self) -> None:
        for process in self.ranks.values():
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.fixture
def groups() -> Iterator[list[Group]]:
    made: list[Group] = []
    yield made
    for group in made:
        group.end()


def save_placement(model: str | Path, topology: str, path: Path, seed: int = 0) -> str:
    """A random placement of a model."""
    from coterie.models.layers import spec_of
    from coterie.models.load import build_skeleton, resolve

    spec, rng = spec_of(build_skeleton(resolve(model))), np.random.default_rng(seed)
    order = np.stack([rng.permutation(spec.num_experts) for _ in range(spec.num_layers)])
    Placement(order, Topology.parse(topology), spec).save(path)
    return str(path)


def save_with_copies(model: str | Path, topology: str, path: Path, redundant: int, rule: str) -> str:
    """Our placement with copies, from synthetic routing of the model's shape."""
    from coterie.models.layers import spec_of
    from coterie.models.load import build_skeleton, resolve
    from coterie.placement.driver import place, prepare
    from coterie.trace.routing_trace import RoutingTrace

    spec, rng = spec_of(build_skeleton(resolve(model))), np.random.default_rng(0)
    ids_LTK = np.argsort(rng.random((spec.num_layers, 800, spec.num_experts)), axis=2)[:, :, : spec.top_k]
    trace = RoutingTrace(ids_LTK.astype(np.uint8), spec)
    place(prepare(trace, Topology.parse(topology), redundant=redundant, dispatch=rule), "eplb").save(path)
    return str(path)


def single_process(model: str | Path, tokens: int) -> list[list[int]]:
    """The new tokens of every prompt, generated one by one by the whole model."""
    import torch

    from coterie.models.load import load_model, load_tokenizer

    whole, tokenizer = load_model(model, "float32"), load_tokenizer(model)
    result = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        with torch.inference_mode():
            out = whole.generate(**ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
        result.append(out[0, ids["input_ids"].shape[1] :].tolist())
    return result


def test_four_processes_generate_the_tokens_of_one(tmp_path: Path, tiny_checkpoint: Any, groups: list[Group]) -> None:
    models = ["tiny-mixtral", "tiny-qwen3-moe", str(tiny_checkpoint("deepseek_v2"))]
    jobs = [
        [model, save_placement(model, topology, tmp_path / f"{number}.json"), PROMPTS, 24, two_hop]
        for number, (model, topology, two_hop) in enumerate(
            [(model, "4", False) for model in models] + [(models[1], "2x2", True)]
        )
    ]
    groups.append(Group(4, [RANK, "generate", json.dumps(jobs)]))
    ended = groups[0].wait()
    assert {rank: code for rank, (code, *_) in ended.items()} == dict.fromkeys(range(4), 0), ended
    results = json.loads(ended[0][1])
    for model, result in zip([*models, models[1]], results, strict=True):
        assert result["ids"] == single_process(model, 24)
        assert result["sent"] > 0


def test_processes_with_copies_generate_the_tokens_of_one(tmp_path: Path, groups: list[Group]) -> None:
    cases = [
        ("tiny-mixtral", "3", 4, "fewest-devices", False), ("tiny-qwen3-moe", "3", 12, "random", False),
        ("tiny-qwen3-moe", "3x1", 12, "fewest-devices", True), ("tiny-qwen3-moe", "3", 12, "nearest", False),
    ]  # fmt: skip
    jobs = [
        [model, save_with_copies(model, topology, tmp_path / f"{number}.json", redundant, rule), PROMPTS, 24, two_hop]
        for number, (model, topology, redundant, rule, two_hop) in enumerate(cases)
    ]
    groups.append(Group(3, [RANK, "generate", json.dumps(jobs)]))
    ended = groups[0].wait()
    assert {rank: code for rank, (code, *_) in ended.items()} == dict.fromkeys(range(3), 0), ended
    whole = {model: single_process(model, 24) for model in ("tiny-mixtral", "tiny-qwen3-moe")}
    for (model, *_), result in zip(cases, json.loads(ended[0][1]), strict=True):
        assert result["ids"] == whole[model]
        assert result["sent"] > 0


def test_pruning_with_copies_is_refused_in_one_line(tmp_path: Path, groups: list[Group]) -> None:
    placement = save_with_copies("tiny-mixtral", "2", tmp_path / "p.json", 2, "nearest")
    command = ["-m", "coterie", "generate-ep", "tiny-mixtral", "--placement", placement, "--prompt", "A"]
    groups.append(Group(2, [*command, "--prune", "0.2"]))
    ended = groups[0].wait()
    assert [code for code, *_ in ended.values()] == [2, 2]
    assert "some have copies, which pruning does not take; place without --redundant" in ended[0][2]
    assert ended[0][2].count("\n") == 1


@pytest.mark.parametrize("seconds", ["0", "1"])
def test_a_rank_that_waits_for_another_one_names_who_failed(seconds: str, groups: list[Group]) -> None:
    """Whether rank 0 is in the exchange when rank 1 dies, or comes to it later: rank 2 does not blame rank 0."""
    groups.append(Group(3, [RANK, "chain", seconds], timeout=20))
    said = f"rank 1 (process {groups[0].ranks[1].pid}) ended"
    for rank, (code, _, errors) in groups[0].wait().items():
        assert rank == 1 or (code == 2 and said in errors), errors


@pytest.mark.parametrize(
    ("what", "said"),
    [(signal.SIGKILL, "rank 1 (process {}) ended"), (signal.SIGSTOP, "rank 1 (process {}) is stopped")],
)
def test_a_rank_that_dies_or_stalls_ends_the_others_with_a_clear_error(
    what: signal.Signals, said: str, tmp_path: Path, groups: list[Group]
) -> None:
    groups.append(Group(3, [RANK, "stay", save_placement("tiny-mixtral", "3", tmp_path / "p.json")], timeout=20))
    ranks = groups[0].ranks
    for process in ranks.values():
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    time.sleep(0.5)  # into the generation
    os.kill(ranks[1].pid, what)
    for rank in (0, 2):
        _, errors = ranks[rank].communicate(timeout=90)
        assert ranks[rank].returncode == 2
        assert errors.count("\n") == 1, errors
        assert said.format(ranks[1].pid) in errors


def test_torchrun_and_pruning(tmp_path: Path) -> None:
    placement = save_placement("tiny-qwen3-moe", "2", tmp_path / "p.json")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()),
         "-m", "coterie", "generate-ep", "tiny-qwen3-moe", "--placement", placement, "--prompt", "The king",
         "--prompt", "Once upon a time", "--tokens", "12", "--json", "--prune", "0.3"],
        capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [each["rank"] for each in result["prompts"]] == [0, 1]
    assert result["ranks"] == 2
    assert sum(result["expert_bytes"]) == result["all_expert_bytes"]
    assert result["dispatch_bytes"] == result["combine_bytes"] > 0
    assert result["kept_weight"] < 1
    assert result["prune"] == {"rule": "cap", "p": 0.3}


def test_what_cannot_work_is_one_line_from_rank_0_and_exit_code_2_everywhere(
    tmp_path: Path, groups: list[Group]
) -> None:
    placement = save_placement("tiny-mixtral", "4", tmp_path / "p.json")
    command = ["-m", "coterie", "generate-ep", "tiny-mixtral", "--placement", placement, "--prompt", "A"]
    groups.append(Group(2, command))
    ended = groups[0].wait()
    assert [code for code, *_ in ended.values()] == [2, 2]
    assert ended[0][2].startswith("coterie: error: 2 ranks, but the placement is for 4 devices")
    assert ended[0][2].count("\n") == 1
    assert ended[1][1:] == ("", "")
