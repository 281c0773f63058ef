"""`coterie generate-ep`, as the only rank of a group."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.cli.main import main
from coterie.placement.placement import Placement
from coterie.spec import MoESpec
from coterie.topology import Topology

pytestmark = [pytest.mark.needs("torch"), pytest.mark.needs("transformers")]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command line as rank 0 of 1; its exit code, stdout and stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        told = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for name, value in {**told, "TORCH_CPP_LOG_LEVEL": "FATAL"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["coterie", "generate-ep", *map(str, arguments)])
        with pytest.raises(SystemExit) as done:
            main()
        said = capsys.readouterr()
        return int(done.value.code or 0), said.out, said.err

    return call


@pytest.fixture
def placement(tmp_path: Path) -> Callable[..., Path]:
    def make(topology: str = "1", experts: int = 8, layers: int = 3, top_k: int = 3) -> Path:
        file = tmp_path / f"{topology}-{experts}.json"
        order = np.tile(np.arange(experts), (layers, 1))
        Placement(order, Topology.parse(topology), MoESpec("toy", layers, experts, top_k)).save(file)
        return file

    return make


def test_json(run: Run, placement: Any, tiny_checkpoint: Any, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("first\n\nsecond\n", encoding="utf-8")
    code, out, _ = run(
        tiny_checkpoint("olmoe"), "--placement", placement(), "--prompts", prompts, "--prompt", "zeroth", "--tokens", 3,
        "--prune", "20%", "--rule", "naive", "--json",
    )  # fmt: skip
    assert code == 0
    result = json.loads(out)
    assert [each["text"][:5] for each in result["prompts"]] == ["zerot", "first", "secon"]
    assert result["dispatch_bytes"] == result["combine_bytes"] == 0
    assert result["prune"] == {"rule": "naive", "p": 0.2}
    assert result["versions"].keys() == {"coterie", "torch", "transformers"}
    assert 0 < result["kept_weight"] < 1
    assert result["dtype"] == "float32"  # what ran, though --dtype was not given


def test_for_people(run: Run, placement: Any, tiny_checkpoint: Any) -> None:
    code, out, err = run(tiny_checkpoint("olmoe"), "--placement", placement(), "--prompt", "abc", "--tokens", 2)
    assert code == 0
    assert "[1, rank 0] abc" in out
    assert "1 ranks, float32" in out
    assert "not how fast a cluster would be" in err


def test_priced_is_fitted_on_a_trace(
    run: Run, placement: Any, tiny_checkpoint: Any, make_trace: Any, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    trace = make_trace(3, 600, 8, 3, weights=rng.random((3, 600, 3)).astype(np.float32))
    trace.save(tmp_path / "t.safetensors")
    code, out, err = run(
        tiny_checkpoint("olmoe"), "--placement", placement(), "--prompt", "abc", "--tokens", 2, "--prune", 0.2,
        "--rule", "priced", "--fit", tmp_path / "t.safetensors", "--json",
    )  # fmt: skip
    assert code == 0, err
    assert json.loads(out)["prune"]["rule"] == "priced"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--prompt", "a", "--prune", "1.5"), "1.5"),
        (("--prompt", "a", "--prune", "-0.1"), "-0.1"),
        (("--prompt", "a", "--prune", "0.2", "--rule", "capp"), "did you mean 'cap'?"),
        (("--prompt", "a", "--prune", "0.2", "--rule", "priced"), "--fit"),
        (("--prompt", "a", "--rule", "naive"), "belong to pruning"),
        (("--prompt", "a", "--dtype", "int8"), "no floating-point type"),
        (("--prompt", "a", "--timeout", "0"), "timeout = 0"),
        (("--prompt", "a", "--dispatch", "nearst"), "did you mean 'nearest'?"),
        (("--prompt", "a", "--dispatch", "nearest"), "has no copies of experts to choose from"),
        ((), "there is no prompt"),
    ],
)
def test_bad_options_are_one_line(
    options: tuple[str, ...], said: str, run: Run, placement: Any, tiny_checkpoint: Any
) -> None:
    code, out, err = run(tiny_checkpoint("olmoe"), "--placement", placement(), *options)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert said in err


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ({"topology": "2"}, "1 ranks, but the placement is for 2 devices"),
        ({"experts": 16}, "the placement is for toy (3 layers, 16 experts, top-3)"),
    ],
)
def test_bad_placements_are_one_line(
    shape: dict[str, Any], said: str, run: Run, placement: Any, tiny_checkpoint: Any
) -> None:
    code, out, err = run(tiny_checkpoint("olmoe"), "--placement", placement(**shape), "--prompt", "a")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert said in err


def test_without_a_launcher(run: Run, placement: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["coterie", "generate-ep", "m", "--placement", str(placement()), "--prompt", "a"])
    with pytest.raises(SystemExit) as done:
        main()
    assert done.value.code == 2
    assert "torchrun --nproc-per-node" in capsys.readouterr().err
