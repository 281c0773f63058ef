"""`coterie report` as a user sees it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coterie.cli.main import main

pytestmark = pytest.mark.needs("plotly")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], make_trace: Any) -> Run:
    """Run `coterie ...` beside t.safetensors, other.safetensors and p.json; exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    make_trace(tokens=400).save("t.safetensors")
    make_trace(layers=3).save("other.safetensors")

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["coterie", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        captured = capsys.readouterr()
        assert isinstance(stopped.value.code, int)
        return stopped.value.code, captured.out, captured.err.lstrip("\n")

    assert call("place", "t.safetensors", "--topology", "4", "--method", "cap", "--out", "p.json")[0] == 0
    return call


def test_a_page_and_what_it_says(run: Run) -> None:
    code, out, err = run("report", "t.safetensors", "--placement", "p.json", "--quick", "--out", "r.html")
    assert (code, err) == (0, "")
    assert "wrote r.html" in out
    page = Path("r.html").read_text()
    assert page.count("<h2>") == 8
    assert "ordered by their device in p." in page
    assert not [part for part in ('src="http', 'href="http') if part in page.replace("\\", "")[:5000]]


def test_as_json_with_the_default_search(run: Run) -> None:
    code, out, err = run("report", "t.safetensors", "--topology", "4", "--out", "r.html", "--json")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert list(result["placements"]) == ["linear", "eplb", "cap", "coterie"]
    assert result["bytes"] == Path("r.html").stat().st_size


def test_copies_and_their_rule_come_from_the_placement(run: Run) -> None:
    made = ["t.safetensors", "--topology", "4", "--method", "eplb", "--redundant", "4", "--dispatch", "nearest"]
    assert run("place", *made, "--out", "copies.json")[0] == 0
    code, out, err = run(
        "report", "t.safetensors", "--placement", "copies.json", "--quick", "--out", "r.html", "--json"
    )
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert (result["redundant"], result["dispatch"]) == (4, "nearest")
    assert set(result["by_rule"]) == {"linear", "eplb", "cap", "copies"}
    assert result["by_rule"]["copies"]["nearest"] == result["placements"]["copies"]
    asked = ["--placement", "p.json", "--redundant", "4", "--dispatch", "random", "--quick"]
    code, out, _ = run("report", "t.safetensors", *asked, "--out", "r.html")
    assert code == 0
    assert "here: random" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["other.safetensors", "--placement", "p.json"], "use a placement made from this model's trace"),
        (["t.safetensors", "--placement", "p.json", "--topology", "8"], "the topology is 8"),
        (["t.safetensors", "--placement", "p.json", "--placement", "p.json"], "2 placements are called 'p'"),
        (["t.safetensors", "--placement", "none.json"], "none.json"),
        (["t.safetensors", "--heldout", "1.5"], "held-out share of 1.5"),
        (["t.safetensors", "--placement", "p.json", "--redundant", "60"], "use 48 at most"),
        (["t.safetensors", "--placement", "copies.json", "--redundant", "0"], "copies has 4 copies of experts a layer"),
        (["t.safetensors", "--placement", "p.json", "--placement", "copies.json"], "the methods beside it 0"),
        (["t.safetensors", "--placement", "p.json", "--dispatch", "near"], "did you mean 'nearest'"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(run: Run, arguments: list[str], message: str) -> None:
    made = ["t.safetensors", "--topology", "4", "--method", "eplb", "--redundant", "4", "--out", "copies.json"]
    assert run("place", *made)[0] == 0
    code, out, err = run("report", *arguments, "--out", "r.html")
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert not list(Path().glob("*r.html*"))
