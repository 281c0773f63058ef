"""`coterie model info`: what it prints, and one line for what it cannot do."""

from __future__ import annotations

import json
import sys

import pytest

from coterie.cli.main import main


def run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["coterie", "model", "info", *map(str, arguments)])
    with pytest.raises(SystemExit) as exited:
        main()
    captured = capsys.readouterr()
    return exited.value.code, captured.out, captured.err


@pytest.mark.needs("transformers")
def test_people_and_programs_read_the_same_figures(monkeypatch, capsys, tiny_checkpoint):
    folder = tiny_checkpoint("deepseek_v3", "bfloat16")
    code, out, err = run(monkeypatch, capsys, folder, "--json")
    assert (code, err) == (0, "")
    info = json.loads(out)
    code, out, err = run(monkeypatch, capsys, folder)
    assert (code, err) == (0, "")
    assert "2 MoE layers of 3, hidden size 32" in out
    assert "8 experts of 24 neurons, top-3, from 2 of 4 groups, 1 shared" in out
    assert "experts in bfloat16; bytes from the files" in out
    for what in ("expert", "experts", "rest", "total"):
        assert f" {info[f'{what}_bytes']:,} " in out


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "llama", "num_hidden_layers": 2}, "has no MoE layers"),
        ({"model_type": "mixtral", "num_local_experts": 8}, "lacks num_experts_per_tok"),
        (None, "no model 'nothing-here'"),
    ],
)
def test_what_cannot_be_told_is_one_line_and_exit_2(config, message, monkeypatch, capsys, tmp_path):
    file = tmp_path / "config.json"
    if config:
        file.write_text(json.dumps(config))
    code, out, err = run(monkeypatch, capsys, file if config else "nothing-here")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("coterie: error: ")
    assert message in err
