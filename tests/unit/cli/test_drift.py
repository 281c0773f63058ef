"""`coterie drift` as a user sees it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coterie.cli.main import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], make_trace: Any) -> Run:
    """Run `coterie ...` beside old.safetensors, new.safetensors and p.json, placed from the old one."""
    monkeypatch.chdir(tmp_path)
    make_trace(layers=6, tokens=2000).save("old.safetensors")
    make_trace(layers=6, tokens=2000, seed=5).save("new.safetensors")
    make_trace(layers=3).save("other.safetensors")

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["coterie", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        captured = capsys.readouterr()
        assert isinstance(stopped.value.code, int)
        return stopped.value.code, captured.out, captured.err.lstrip("\n")

    assert call("place", "old.safetensors", "--topology", "4", "--method", "cap", "--out", "p.json")[0] == 0
    return call


def test_for_people(run: Run) -> None:
    code, out, err = run("drift", "p.json", "new.safetensors")
    assert (code, err) == (0, "")
    assert "redo it: a fresh placement costs" in out
    assert "then (held out, as its file says)" in out
    code, out, err = run("drift", "p.json", "old.safetensors")
    assert code == 0
    assert "keep it: " in out
    assert "made from this very trace" in out


def test_as_json(run: Run) -> None:
    code, out, err = run("drift", "p.json", "new.safetensors", "--json")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert result["redo"] is True
    assert {"gain", "standard_error", "reason", "topology", "seed", "coterie", "objective"} <= set(result)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["p.json", "none.safetensors"], "does not exist"),
        (["none.json", "new.safetensors"], "none.json"),
        (["p.json", "other.safetensors"], "the new trace is of"),
        (["p.json", "new.safetensors", "--worth", "much"], "much"),
        (["p.json", "new.safetensors", "--method", "capp"], "did you mean 'cap'"),
    ],
)
def test_bad_input_is_one_line(run: Run, arguments: list[str], message: str) -> None:
    code, out, err = run("drift", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
