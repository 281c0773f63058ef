"""`coterie study stability`, `transfer`, `pruning` and `tokens` as a user sees them."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.cli.main import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], make_trace: Any) -> Run:
    """Run `coterie study ...` in a folder with a, b and other.safetensors; exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    weights = np.random.default_rng(0).random((2, 400, 4))
    make_trace(tokens=400, sequences=8, weights=weights).save("a.safetensors")
    make_trace(tokens=400, sequences=8, seed=1).save("b.safetensors")
    make_trace(experts=8, tokens=400, sequences=8).save("other.safetensors")

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["coterie", "study", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        captured = capsys.readouterr()
        assert isinstance(stopped.value.code, int)
        return stopped.value.code, captured.out, captured.err.lstrip("\n")

    return call


STUDIES = [
    ("stability", ["a.safetensors", "--window", "100"], ["cap w0", "coterie w3"]),
    ("transfer", ["a.safetensors", "b.safetensors"], ["mixture", "peak traffic on another workload"]),
    ("pruning", ["a.safetensors", "--method", "cap"], ["popularity decile", "priced"]),
    ("tokens", ["a.safetensors", "--method", "cap"], ["cap, 200 tokens", "cap: 200 earlier tokens are too few"]),
]


@pytest.mark.needs("plotly")
@pytest.mark.parametrize(("name", "arguments", "said"), STUDIES)
def test_a_table_a_page_and_the_figures(run: Run, name: str, arguments: list[str], said: list[str]) -> None:
    code, out, err = run(name, *arguments, "--topology", "4", "--out", "out")
    assert (code, err) == (0, "")
    for words in said:
        assert words in out
    page, result = Path("out/index.html").read_text(), json.loads(Path("out/study.json").read_text())
    assert result["study"] == name
    assert {"traces", "topology", "seed", "versions", "configuration"} <= set(result)
    assert "Plotly.newPlot" in page
    assert "no time is measured" in page
    code, out, err = run(name, *arguments, "--topology", "4", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == result  # the same seed, the same figures


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["stability", "a.safetensors", "--window", "300"], "use 1 to 200"),
        (["stability", "a.safetensors", "--window", "100", "--method", "capp"], "unknown placement method"),
        (["transfer", "a.safetensors"], "at least two"),
        (["transfer", "a.safetensors", "a.safetensors"], "2 traces are called 'a'"),
        (["pruning", "b.safetensors"], "needs routing weights"),
        (["transfer", "a.safetensors", "other.safetensors"], "give traces of one model"),
        (["tokens", "a.safetensors", "--heldout", "1.5"], "1.5"),
        (["pruning", "none.safetensors"], "does not exist"),
        (["pruning", "a.safetensors", "--topology", "64"], "16 experts on 64 devices"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(run: Run, arguments: list[str], message: str) -> None:
    before = sorted(Path().iterdir())
    Path("kept").mkdir()
    for out_options in ([], ["--out", "new/out"], ["--out", "kept"]):
        if out_options and importlib.util.find_spec("plotly") is None:
            break  # refused for want of it
        code, out, err = run(*arguments, *out_options)
        assert (code, out) == (2, "")
        assert message in err
        assert err.count("\n") == 1
    Path("kept").rmdir()  # what was there stays, and is empty
    assert sorted(Path().iterdir()) == before
