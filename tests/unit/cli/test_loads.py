"""`coterie loads` as a user sees it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from coterie.cli.main import main
from coterie.placement.placement import Placement

Run = Callable[..., tuple[int, str, str]]
CONFIG = {
    "model_type": "mixtral", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_local_experts": 16, "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `coterie ...` beside loads.npy [3, 16] and config.json; exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    np.save("loads.npy", np.arange(48).reshape(3, 16) + 1)
    np.save("few.npy", np.ones((2, 16)))
    Path("loads.csv").write_text("1,2\n3,4\n")
    Path("config.json").write_text(json.dumps(CONFIG))

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["coterie", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        captured = capsys.readouterr()
        assert isinstance(stopped.value.code, int)
        return stopped.value.code, captured.out, captured.err.lstrip("\n")

    return call


def test_it_places_by_load_and_says_what_loads_cannot(run: Run) -> None:
    code, out, err = run("loads", "loads.npy", "--topology", "4", "--model", "config.json", "--out", "p.json")
    assert code == 0
    assert "3 layers of 16 experts" in out
    assert "loads alone say nothing of devices per token" in err
    placement = Placement.load("p.json")
    assert placement.method["from"] == "loads alone"
    assert run("export", "p.json", "--to", "json", "--out", "e.json")[0] == 0


def test_as_json(run: Run) -> None:
    code, out, err = run("loads", "loads.npy", "--topology", "4", "--json")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert result["balance"]["eplb"]["fit"] < result["balance"]["linear"]["fit"]
    first = np.arange(1, 17).reshape(4, 4).sum(axis=1)
    assert result["balance"]["linear"]["fit"] >= 1
    assert result["expert_imbalance"] > 1
    assert first.max() / first.mean() > result["balance"]["linear"]["fit"]  # the mean over layers; the first is worst
    assert result["co_activation"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["loads", "none.npy"], "does not exist"),
        (["loads", "loads.npy", "--topology", "4", "--out", "p.json"], "give its config.json as --model"),
        (["loads", "few.npy", "--topology", "4", "--model", "config.json"], "loads are of 2 layers"),
        (["loads", "loads.npy", "--topology", "32"], "16 experts on 32 devices"),
        (["place", "loads.csv", "--topology", "4", "--out", "p.json"], "read by coterie loads"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(run: Run, arguments: list[str], message: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert not Path("p.json").exists()
