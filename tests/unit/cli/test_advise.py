"""`coterie advise` as a user sees it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coterie.cli.main import main
from coterie.placement.placement import Placement
from coterie.topology import Topology

Run = Callable[..., tuple[int, str, str]]
CONFIG = {
    "model_type": "mixtral", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 12,
    "num_local_experts": 16, "num_experts_per_tok": 4, "dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], make_trace: Any) -> Run:
    """Run `coterie advise ...` beside t.safetensors, config.json and four.yaml; exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    make_trace(layers=12, tokens=3000, sequences=60).save("t.safetensors")
    make_trace(layers=3).save("other.safetensors")
    Path("config.json").write_text(json.dumps(CONFIG))
    Topology(1, 4, intra_bandwidth_bytes_per_s=1e9, compute_pair_s=1e-7).save("four.yaml")

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["coterie", "advise", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        captured = capsys.readouterr()
        assert isinstance(stopped.value.code, int)
        return stopped.value.code, captured.out, captured.err.lstrip("\n")

    return call


def test_for_people_with_times_and_memory(run: Run) -> None:
    code, out, err = run(
        "t.safetensors", "--topology", "four.yaml", "--engine", "sglang", "--model", "config.json",
        "--redundant", "4", "--out", "p.json",
    )  # fmt: skip
    assert code == 0
    assert "predicted from the topology's measured numbers" in err
    assert "4 redundant slots a layer are 25.0% more expert memory, at most 1 a layer on a device, 0.00 GB there" in out
    assert "copies: chosen as sglang does (nearest), " in out
    assert "coterie export p.json --to sglang" in out
    assert "--init-expert-location" in out
    advised = Placement.load("p.json").method["advised"]
    assert advised != "linear"
    assert f"use {advised}, by predicted time of a step:" in out


def test_as_json_without_calibration(run: Run) -> None:
    code, out, err = run("t.safetensors", "--topology", "4", "--engine", "vllm", "--json")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert result["gain"] is True
    assert result["commands"][0].startswith("coterie bake MODEL --placement placement.json")
    assert result["memory"]["expert_bytes"] is None
    assert {"trace", "topology", "seed", "coterie", "validation", "expected"} <= set(result)


def test_no_gain_is_said_plainly_and_gives_no_commands(run: Run) -> None:
    code, out, _ = run("t.safetensors", "--topology", "1", "--engine", "vllm")
    assert code == 0
    assert "no gain here: on one device nothing travels" in out
    assert "coterie bake" not in out


def test_a_backend_that_is_not_known_is_said_so(run: Run) -> None:
    code, _, err = run("t.safetensors", "--topology", "1", "--engine", "vllm", "--backend", "depep")
    assert code == 0
    assert "vllm is not known to have a backend 'depep' (known: deepep_high_throughput, " in err


def test_copies_that_the_engine_needs_are_written_and_exported(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(
        "t.safetensors", "--topology", "3", "--engine", "sglang", "--redundant", "2", "--out", "p.json", "--model",
        "config.json",
    )  # fmt: skip
    assert code == 0
    assert "2 copies make them even" in out
    assert "used, since sglang loads no placement here without them" in out
    monkeypatch.setattr(
        sys, "argv", ["coterie", "export", "p.json", "--to", "sglang", "--out", "e.json", "--model", "config.json"]
    )
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 0, capsys.readouterr().err


def test_a_place_to_write_to_comes_before_the_work(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie.report.advice.advise", lambda *_: pytest.fail("it worked first"))
    code, _, err = run("t.safetensors", "--topology", "4", "--engine", "vllm", "--out", "none/p.json")
    assert code == 2
    assert "cannot write none" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["t.safetensors", "--topology", "4", "--engine", "vlm"], "did you mean 'vllm'"),
        (["other.safetensors", "--topology", "4", "--engine", "vllm", "--model", "config.json"], "give its own"),
        (["t.safetensors", "--topology", "64", "--engine", "vllm"], "16 experts on 64 devices"),
        (["t.safetensors", "--topology", "3", "--engine", "sglang"], "--redundant 2 would make them even"),
        (["none.safetensors", "--topology", "4", "--engine", "vllm"], "does not exist"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(run: Run, arguments: list[str], message: str) -> None:
    code, out, err = run(*arguments, "--out", "p.json")
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert not Path("p.json").exists()
