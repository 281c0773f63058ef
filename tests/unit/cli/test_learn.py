"""`coterie learn` as a process would see it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coterie.calibration.learning_state import LearningState
from coterie.cli.main import main
from coterie.profile.profile_file import load_profile

pytestmark = [pytest.mark.needs("torch"), pytest.mark.needs("transformers")]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: Any, capsys: Any) -> Run:
    """Runs the command line in an empty folder; its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["coterie", *map(str, arguments)])
        with pytest.raises(SystemExit) as done:
            main()
        told = capsys.readouterr()
        return int(done.value.code or 0), told.out, told.err

    return call


@pytest.fixture
def learn(run: Run, tiny_checkpoint: Any) -> tuple[object, ...]:
    """The beginning of a command, on a profile of a tiny Mixtral."""
    folder = tiny_checkpoint("mixtral")
    made = run("profile", folder, "--tokens", 320, "--window", 32, "--domain", "prose", "--out", "p.safetensors")
    assert made[0] == 0, made[2]
    return ("learn", "p.safetensors", "--model", folder, "--window", 32, "--out", "l.safetensors")


def test_json_table_and_a_plan(run: Run, learn: tuple[object, ...]) -> None:
    code, out, err = run(*learn, "--tokens", 320, "--steps", 21, "--bytes", "40%", "--json")
    assert (code, err) == (0, "")
    result, made = json.loads(out), load_profile("l.safetensors")
    assert {name: result[name] for name in made.provenance["learnt"]} == made.provenance["learnt"]
    assert (result["bytes"], result["steps"], result["tokens_learnt"], result["tokens_aside"]) == (0.4, 21, 256, 64)
    assert result["texts"][0]["name"] == "prose (shipped)"
    assert [step for step, _ in result["tried"]] == [0, 20, 21]
    assert not Path("l.safetensors.partial").exists()
    code, out, _ = run("widths", "l.safetensors", "--bytes", 0.5, "--out", "w.safetensors", "--json")
    assert code == 0
    assert json.loads(out)["variant"] == json.loads(out)["layers"] == "learnt"
    code, out, _ = run(*learn, "--steps", 1, "--domain", "prose", "--domain", "code", "--tokens", 320)
    assert code == 0
    for words in ("put aside to judge by", "256; 64", "KL from the full model"):
        assert words in out


def test_an_interrupted_run_says_what_is_kept(run: Run, learn: tuple[object, ...], monkeypatch: Any) -> None:
    descend = LearningState.descend

    def interrupted(self: LearningState, *arguments: Any) -> None:
        if self.step == 20:
            raise KeyboardInterrupt
        descend(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(LearningState, "descend", interrupted)
        code, _, err = run(*learn, "--tokens", 320, "--steps", 22)
    assert code == 130
    assert "l.safetensors.partial holds what was done" in err
    assert not Path("l.safetensors").exists()
    code, _, err = run(*learn, "--tokens", 320, "--steps", 23)
    assert code == 2
    assert "is of another run (steps was 22 and is 23)" in err
    assert run(*learn, "--tokens", 320, "--steps", 22)[0] == 0
    assert not Path("l.safetensors.partial").exists()


def test_bad_input_is_one_line(run: Run, learn: tuple[object, ...], tiny_checkpoint: Any) -> None:
    Path("short.txt").write_text("A short text.", encoding="utf-8")
    for arguments, message in (
        (("--bytes", "100%"), "a byte share of 1 is not within 0 and 1"),
        (("--steps", 0), "0 steps of learning"),
        (("--tokens", 20), "20 tokens are too few to learn from"),
        (("--text", "short.txt"), "too few to learn from"),
        (("--model", tiny_checkpoint("phimoe")), "profile this model"),
        (("--text", "none.txt"), "none.txt"),
    ):
        code, out, err = run(*learn, *arguments)
        assert (code, out) == (2, "")
        assert message in err
        assert len(err.strip().splitlines()) == 1
        assert not list(Path().glob("l.safetensors*"))
