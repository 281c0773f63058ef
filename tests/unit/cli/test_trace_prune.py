"""`coterie trace prune` as a user sees it: one line or one object, and a file or none."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from coterie.cli.main import main
from coterie.placement.placement import Placement
from coterie.spec import MoESpec
from coterie.topology import Topology
from coterie.trace.routing_trace import RoutingTrace

Run = Callable[..., tuple[int, str, str]]
SPEC = MoESpec("toy", 2, 8, 3)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `coterie trace prune` in a folder with trace.safetensors; exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(3)
    ids = np.argsort(generator.random((2, 90, 8)), axis=2)[:, :, :3].astype(np.uint8)
    numbers = (np.arange(90) // 10).astype(np.int32)
    weights = generator.dirichlet(np.ones(3), (2, 90)).astype(np.float32)
    RoutingTrace(ids, SPEC, weights=weights, sequence_ids=numbers).save("trace.safetensors")
    RoutingTrace(ids, SPEC, sequence_ids=numbers).save("bare.safetensors")
    opener = ModuleType("coterie.trace.open")
    opener.open_trace = lambda path, progress: RoutingTrace.load(path)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "coterie.trace.open", opener)

    def call(*arguments: str, trace: str = "trace.safetensors") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["coterie", "trace", "prune", trace, "--out", "out.safetensors", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        captured = capsys.readouterr()
        assert isinstance(stopped.value.code, int)
        return stopped.value.code, captured.out, captured.err

    return call


def test_json_is_one_object_and_the_trace_is_pruned(run: Run) -> None:
    code, out, _ = run("--topology", "4", "--rule", "priced", "-p", "20%", "--heldout", "0.3", "--json")
    result = json.loads(out)
    assert code == 0
    assert set(result) == {"rule", "split_by", "fit", "heldout", "topology", "placement", "out"}
    assert result["rule"]["rule"] == "priced"
    assert result["fit"]["num_tokens"] == 60
    assert result["heldout"]["remote_peak_traffic"] < result["heldout"]["unpruned_remote_peak_traffic"]
    kept = RoutingTrace.load("out.safetensors").kept
    assert kept is not None
    assert 0 < kept.mean() < 1


def test_people_get_a_table(run: Run) -> None:
    code, out, _ = run("--topology", "4", "-p", "0.3")
    assert code == 0
    assert "rule cap (p = 0.3), topology 4, placement linear" in out
    assert "held out" in out
    assert "wrote out.safetensors" in out


def test_a_placement_brings_its_topology(run: Run) -> None:
    generator = np.random.default_rng(5)
    devices = np.stack([generator.permutation(np.repeat(np.arange(4), 2)) for _ in range(2)])
    Placement.from_devices(devices, Topology.parse("2x2,inter=3"), SPEC).save("placement.json")
    code, out, _ = run("--placement", "placement.json", "--peak", "0.4", "--rule", "priced", "--json")
    assert code == 0
    result = json.loads(out)
    assert result["topology"]["inter_cost"] == 3
    assert result["placement"] == "placement.json"
    assert result["fit"]["remote_peak_traffic"] <= 0.4
    code, out, _ = run("--placement", "placement.json", "--topology", "2x2,inter=7", "-p", "0.2", "--json")
    assert json.loads(out)["topology"]["inter_cost"] == 7
    code, _, err = run("--placement", "placement.json", "--topology", "4", "-p", "0.2")
    assert code == 2
    assert "1 nodes of 4 devices" in err


def test_a_placement_of_another_model_is_refused(run: Run) -> None:
    spec = MoESpec("other", 3, 8, 3)
    Placement.from_devices(np.tile(np.arange(4).repeat(2), (3, 1)), Topology.parse("4"), spec).save("other.json")
    code, _, err = run("--placement", "other.json", "-p", "0.2")
    assert code == 2
    assert "the placement is for other" in err
    assert not Path("out.safetensors").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--topology", "4"], "neither given"),
        (["--topology", "4", "-p", "0.2", "--peak", "0.3"], "both given"),
        (["--topology", "4", "-p", "2"], "'2' is not within 0 and 1"),
        (["--topology", "4", "-p", "0.2", "--rule", "pried"], "did you mean 'priced'?"),
        (["--topology", "4y", "-p", "0.2"], "topology '4y' is not understood"),
        (["--topology", "9", "-p", "0.2"], "8 experts on 9 devices"),
        (["-p", "0.2"], "give --topology"),
        (["--topology", "4", "-p", "0.2", "--heldout", "1"], "held-out share of 1"),
        (["--topology", "4", "-p", "0.2", "--floor", "0.5"], "floor belongs to the rule priced"),
        (["--topology", "4", "--peak", "0.01"], "rule cap cannot bring"),
        (["--placement", "missing.json", "-p", "0.2"], "missing.json does not exist"),
    ],
)
def test_what_a_user_can_cause_is_one_line_and_no_file(run: Run, arguments: list[str], words: str) -> None:
    code, out, err = run(*arguments)
    assert code == 2
    assert out == ""
    assert words in err
    assert err.startswith("coterie: error: ")
    assert err.count("\n") == 1
    assert not Path("out.safetensors").exists()


def test_a_trace_without_weights_is_refused(run: Run) -> None:
    code, _, err = run("--topology", "4", "-p", "0.2", trace="bare.safetensors")
    assert code == 2
    assert "pruning needs routing weights and this trace has none" in err


def test_emptied_tokens_are_mentioned(run: Run) -> None:
    code, _, err = run("--topology", "4", "--peak", "0", "--rule", "priced")
    assert code == 0
    assert "keep no expert" in err
