"""A worker's session, driven by steps as an engine would drive it: traces, counts, files, and what it says."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError
from coterie.spec import MoESpec
from coterie.topology import Topology
from coterie.trace.routing_trace import RoutingTrace
from coterie.vllm_plugin.config import PluginConfig, PruneConfig, RecordConfig
from coterie.vllm_plugin.engine import Engine

pytestmark = pytest.mark.needs("torch")

SPEC = MoESpec("toy", 2, 16, 4)


def session(folder: Path, prune: PruneConfig | None = None, tokens: int = 1000, **fields: Any) -> Any:
    from coterie.vllm_plugin.session import Session

    interval = fields.pop("interval", 3600.0)
    config = PluginConfig(
        folder / "coterie.yaml", prune, Topology.parse("4"), None, prune and folder / "counts.json",
        RecordConfig(folder, tokens), interval,
    )  # fmt: skip
    return Session(config, Engine("0.32.0", SPEC, **{"renormalises": True, "max_tokens": 64, **fields}))


class Requests:
    """Runs steps; what each token of each request chooses depends on its request and position alone."""

    def __init__(self, made: Any) -> None:
        self.session, self.seen = made, {}

    def step(self, *parts: tuple[str, int, int, int], padding: int = 0, finished: tuple[str, ...] = ()) -> None:
        """`parts`: name, first position, count, prompt length."""
        import torch

        from coterie.vllm_plugin.recording import RequestRows

        total = sum(part[2] for part in parts)
        with self.session.step(total):
            for layer in range(2):
                rows = [self.choice(name, start + i, layer) for name, start, count, _ in parts for i in range(count)]
                rows += [(np.full(4, np.nan, np.float32), np.arange(4))] * padding
                weights, ids = (np.stack(each) for each in zip(*rows, strict=True))
                self.session.route(layer, torch.tensor(weights), torch.tensor(ids, dtype=torch.int32))
            self.session.end_step(lambda: [RequestRows(*part) for part in parts], finished)

    @staticmethod
    def choice(name: str, position: int, layer: int) -> tuple[Any, Any]:
        rng = np.random.default_rng([ord(name), position, layer])
        weights = rng.random(4).astype(np.float32)
        return weights / weights.sum(), rng.permutation(16)[:4]


def test_a_trace_of_requests_that_come_and_go(tmp_path: Path) -> None:
    made = session(tmp_path)
    run = Requests(made)
    run.step(("a", 0, 5, 5), padding=3)
    run.step(("b", 2, 4, 6), ("a", 5, 1, 5))  # the engine found b's first two tokens in its cache
    run.step(("b", 6, 1, 6), finished=("a",))
    run.step(("b", 0, 8, 6))  # preempted, and computed again
    run.step(("a", 0, 2, 5))  # another request of that name
    assert not (tmp_path / "trace-rank0.safetensors").exists()
    made.close()
    made.close()
    trace = RoutingTrace.load(tmp_path / "trace-rank0.safetensors")
    assert trace.sequence_ids is not None
    assert trace.positions is not None
    assert trace.sequence_ids.tolist() == [0] * 5 + [1] * 4 + [0, 1, 1, 2, 2]
    assert trace.positions.tolist() == [0, 1, 2, 3, 4, 2, 3, 4, 5, 5, 6, 7, 0, 1]
    assert np.asarray(trace.phase).tolist() == [0] * 9 + [1, 1, 1, 0, 0]
    assert np.asarray(trace.step).tolist() == [0] * 5 + [1] * 5 + [2, 3, 4, 4]
    for layer in range(2):
        for token, (sequence, position) in enumerate(zip(trace.sequence_ids, trace.positions, strict=True)):
            weights, ids = run.choice("aba"[sequence], int(position), layer)
            np.testing.assert_array_equal(trace.expert_ids[layer, token], ids)
            assert trace.weights is not None
            np.testing.assert_allclose(trace.weights[layer, token], weights)
    assert trace.provenance["engine"] == "vllm 0.32.0"
    assert trace.kept is None


def test_recording_ends_at_its_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = session(tmp_path, tokens=7)
    run = Requests(made)
    with caplog.at_level(logging.INFO, "vllm.coterie"):
        run.step(("a", 0, 5, 5))
        run.step(("a", 5, 1, 5), ("b", 0, 4, 4))
        run.step(("a", 6, 1, 5))
    assert RoutingTrace.load(tmp_path / "trace-rank0.safetensors").num_tokens == 7
    assert [record.message for record in caplog.records] == [
        f"coterie: recorded 7 tokens to {tmp_path / 'trace-rank0.safetensors'}"
    ]
    made.close()


def test_a_pruned_engine_is_recorded_with_what_it_kept(tmp_path: Path) -> None:
    made = session(tmp_path, PruneConfig("cap", 0.4), interval=0.0, rank=2)
    Requests(made).step(("a", 0, 30, 30), padding=2)
    made.close()
    trace = RoutingTrace.load(tmp_path / "trace-rank2.safetensors")
    counts = json.loads((tmp_path / "counts-rank2.json").read_text())
    assert trace.kept is not None
    assert 0 < np.asarray(trace.kept).mean() < 1
    assert counts["pruning"]["num_tokens"] == trace.num_tokens == counts["recorded_tokens"] == 30
    assert 0.6 <= counts["pruning"]["kept_weight"] < 1
    assert trace.provenance["pruning"]["rule"] == "cap"
    assert counts["does"] == made.describe()


def test_files_are_written_while_there_is_nothing_to_do(tmp_path: Path) -> None:
    made = session(tmp_path, PruneConfig("cap", 0.4), interval=0.5)
    run = Requests(made)
    run.step(("a", 0, 5, 5))
    run.step(("a", 5, 1, 5))
    until = time.monotonic() + 60
    while not (tmp_path / "trace-rank0.safetensors").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert RoutingTrace.load(tmp_path / "trace-rank0.safetensors").num_tokens == 6
    assert json.loads((tmp_path / "counts-rank0.json").read_text())["pruning"]["num_tokens"] == 6
    made.close()


def test_serving_goes_on_when_a_file_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    made = session(folder, PruneConfig("cap", 0.4), interval=0.0)
    folder.rmdir()
    run = Requests(made)
    run.step(("a", 0, 5, 5))
    assert "cannot write" in caplog.text
    assert made.report()["pruning"]["num_tokens"] == 5
    made.close()


def test_an_impossible_decision_ends_the_recording_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import torch

    from coterie.vllm_plugin.recording import RequestRows

    made = session(tmp_path)
    with made.step(1):
        made.route(0, torch.full((1, 4), torch.nan), torch.zeros(1, 4, dtype=torch.int32))
        made.end_step(lambda: [RequestRows("a", 0, 1, 1)])
    assert "coterie: " in caplog.text
    assert made.recorder is None
    made.close()


def test_a_fault_of_the_plugins_own_ends_the_recording_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = session(tmp_path)

    def rows() -> Any:
        raise KeyError("a request that nobody told of")

    with made.step(1):
        made.end_step(rows)
    assert "serving goes on without it" in caplog.text
    assert made.recorder is None
    Requests(made).step(("a", 0, 5, 5))
    made.close()


def test_a_step_that_breaks_off_does_not_keep_the_engine_from_ending(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its layers saw different tokens, of which no means can be told; files and scratch are given up all the same."""
    import torch

    made = session(tmp_path, PruneConfig("cap", 0.4))
    recorder = made.recorder
    with pytest.raises(RuntimeError, match="out of memory"), made.step(1):  # noqa: PT012 - as an engine's forward does
        made.route(0, torch.full((1, 4), 0.25), torch.tensor([[0, 1, 2, 3]], dtype=torch.int32))
        raise RuntimeError("out of memory")
    assert not made._running
    made.close()
    assert "MoE layers saw 0 to 1 tokens" in caplog.text
    assert recorder._growing._file.closed
    made.close()


def test_the_log_line_tells_of_homes_ids_and_traffic(tmp_path: Path) -> None:
    from coterie.vllm_plugin.session import Session

    spread = {"expert_ranks": 4, "expert_rank": 3, "all_to_all": True, "backend": "deepep_low_latency"}
    config = PluginConfig(tmp_path / "coterie.yaml", PruneConfig("cap", 0.25))
    made = Session(config, Engine("0.32.0", SPEC, renormalises=False, **spread))  # type: ignore[arg-type]
    assert made.describe() == (
        "prunes destinations by cap (p = 0.25) over devices 4, experts in order; tokens are at home on device 3; "
        "dropped experts get id -1, kept weights are not rescaled; deepep_low_latency sends nothing to a dropped "
        "device (id -1)"
    )
    made.close()


def test_one_of_the_ranks_that_see_the_same_tokens_records(tmp_path: Path) -> None:
    first, second = (session(tmp_path, attention_ranks=2, rank=rank) for rank in (2, 3))
    assert first.recorder is not None
    assert second.recorder is None
    assert "on another rank" in second.describe()
    for fields in ({"gathers_first": True}, {"shards": 2, "attention_ranks": 2}):
        with pytest.raises(ConfigError, match="--enable-return-routed-experts"):
            session(tmp_path, **fields)
    first.close()
    second.close()
