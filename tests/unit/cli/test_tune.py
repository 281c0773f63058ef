"""`coterie calibrate`, `tune` and `cap` where they cannot work: one line, exit code 2, nothing written."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from coterie.cli.main import main

pytestmark = pytest.mark.needs("transformers")

TUNE = ["tune", "--trace", "dsv2lite-law", "--model", "tiny-mixtral", "--topology", "8", "--out", "p.json"]
CAP = ["cap", "tiny-mixtral", "--topology", "8", "--domain", "prose", "--out", "new"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["calibrate", "--out", "t.yaml"], "RANK is not set: this runs in several processes; start it with torchrun"),
        (TUNE, "RANK is not set"),
        ([*CAP, "-p", "1"], "p = 1 is not within 0 and 1 (1 excluded)"),
        ([*CAP, "--dispatch", "nearst"], "did you mean 'nearest'"),
        ([*CAP, "--redundant", "1000"], "use 56 at most"),
        ([*CAP, "--redundant", "2", "--method", "cap-spectrum"], "cap-spectrum places every expert once"),
        ([*CAP, "-p", "200%"], "fraction '200%' is not within 0 and 1"),
        ([*CAP[:3], "none.yaml", *CAP[4:]], "none.yaml does not exist"),
        ([*CAP[:4], "--out", "new"], "give either --text FILE or --domain"),
        (["bench", "parallel", "--thresholds", "1"], "p is the share of weight to drop, below 1"),
        (["bench", "parallel", "--classes", "A,D"], "no emulated machine 'D'; choose from A, B, C"),
    ],
)
def test_what_cannot_be_is_one_line(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("coterie.bench.parallel.network.unavailable", lambda: None)
    monkeypatch.setattr(sys, "argv", ["coterie", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    captured = capsys.readouterr()
    assert stopped.value.code == 2
    assert captured.err.startswith("coterie: error: ")
    assert words in captured.err
    assert captured.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
