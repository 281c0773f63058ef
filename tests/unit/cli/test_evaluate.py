"""`coterie eval` as a user sees it: tables or one object, and one line for whatever is wrong."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coterie.cli.main import main

pytestmark = pytest.mark.needs("transformers")
Run = Callable[..., tuple[int, str, str]]
TEXT = "A text of some length, to be read in windows; naïve but long enough. " * 8


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny_checkpoint: Any
) -> Run:
    """Run `coterie eval` on a tiny Mixtral in a folder with text.txt; exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT, encoding="utf-8")

    def call(*arguments: object, model: object = None) -> tuple[int, str, str]:
        name = tiny_checkpoint("mixtral") if model is None else model
        monkeypatch.setattr(sys, "argv", ["coterie", "eval", *map(str, (name, *arguments))])
        with pytest.raises(SystemExit) as stopped:
            main()
        told = capsys.readouterr()
        assert isinstance(stopped.value.code, int)
        return stopped.value.code, told.out, told.err

    return call


ON_TEXT = ("--text", "text.txt", "--window", 32)


def test_json_has_perplexity_over_all_texts_and_by_domain(run: Run) -> None:
    code, out, _ = run(*ON_TEXT, "--domain", "prose", "--tokens", 120, "--json")
    result = json.loads(out)
    assert code == 0
    assert set(result["domains"]) == {"text.txt", "prose"}
    assert {"kl", "tasks", "reference_perplexity"}.isdisjoint(result)
    assert all(part["tokens"] == 119 for part in result["domains"].values())  # no start token: the first is context
    bits = math.log2(result["perplexity"]) * result["tokens"] / result["bytes"]
    assert result["bits_per_byte"] == pytest.approx(bits)
    assert (result["window"], result["stride"], result["seed"], result["changes"]) == (32, 16, 0, [])
    assert result["configuration"] == {"dtype": "float32", "tokens": 120, "batch": None}
    assert set(result["versions"]) == {"coterie", "torch", "transformers"}


def test_a_reference_and_a_change_bring_distances(run: Run, tiny_checkpoint: Any) -> None:
    code, out, _ = run(*ON_TEXT, "--prune", "30%", "--topology", 4, "--json")
    pruned = json.loads(out)
    assert code == 0
    assert pruned["kl"] > 0
    assert pruned["changes"][0]["measured"]["kept_weight"] < 1
    assert json.loads(run(*ON_TEXT, "--json")[1])["perplexity"] == pruned["reference_perplexity"]
    same = json.loads(run(*ON_TEXT, "--reference", tiny_checkpoint("mixtral"), "--json")[1])
    assert (same["kl"], same["top1_agreement"]) == (0, 1)
    assert same["reference_perplexity"] == same["perplexity"] == pruned["reference_perplexity"]
    other = json.loads(run(*ON_TEXT, "--reference", tiny_checkpoint("olmoe"), "--dtype", "bfloat16", "--json")[1])
    assert other["kl"] > pruned["kl"]
    assert other["configuration"]["dtype"] == "bfloat16"


@pytest.mark.parametrize("family", ["deepseek", "gpt_oss", "granitemoe", "qwen3_moe"])
def test_other_families(run: Run, tiny_checkpoint: Any, family: str) -> None:
    arguments = ("--text", "text.txt", "--window", 32, "--prune", 0, "--topology", 2, "--renormalise", "--json")
    code, out, err = run(*arguments, model=tiny_checkpoint(family))
    assert code == 0, err
    assert json.loads(out)["kl"] == pytest.approx(0, abs=1e-9)


def test_tables_for_people(run: Run) -> None:
    code, out, _ = run(*ON_TEXT, "--prune", 0.3, "--topology", 4)
    assert code == 0
    assert "pruning, rule cap (p 0.3)" in out
    assert "KL mean" in out
    assert "reference: the unchanged model" in out


@pytest.mark.needs("lm_eval")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_tasks(run: Run) -> None:
    code, out, _ = run("--tasks", "arc_easy", "--limit", 12, "--prune", 0.5, "--topology", 4, "--json")
    result = json.loads(out)
    assert code == 0
    assert "perplexity" not in result
    task = result["tasks"]["arc_easy"]
    assert (task["n"], task["available"], task["limit"], task["chance"]) == (12, 50, 12, 0.25)
    assert task["loglikelihood"] != task["reference"]["loglikelihood"]
    assert "lm_eval" in result["versions"]
    code, out, _ = run("--tasks", "arc_easy", "--limit", 12)
    assert code == 0
    assert "arc_easy" in out
    assert ("no better than chance" in out) == json.loads(run("--tasks", "arc_easy", "--limit", 12, "--json")[1])[
        "tasks"
    ]["arc_easy"]["at_chance"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--text", "text.txt", "--tokens", 20, "--window", 32),
            "'text.txt' has 20 tokens, fewer than the window of 32",
        ),
        (("--text", "text.txt", "--window", 513), "window of 513 tokens is more than the 512 that the model reads"),
        (("--text", "none.txt"), "cannot read text none.txt"),
        (("--domain", "pros"), "unknown shipped text 'pros'; did you mean 'prose'?"),
        (("--tasks", "arc_eazy"), "unknown task 'arc_eazy'; did you mean 'arc_easy'?"),
        (("--tasks", "piqa"), "task piqa needs its file; give --task-data DIR"),
        (("--tasks", "piqa", "--task-data", "."), "has no file for task piqa"),
        (("--tasks", ","), "names none"),
        (("--limit", 3), "--limit belongs to --tasks"),
        (("--rule", "naive"), "--rule belongs to pruning"),
        (("--prune", 0.2), "pruning needs devices"),
        (("--prune", 0.2, "--topology", 2, "--placement", "p.json"), "p.json does not exist"),
        (("--prune", 0.2, "--placement", "p.json"), "p.json does not exist"),
        (("--peak", 0.2, "--topology", 2, "--fit", "t.safetensors"), "--fit t.safetensors does not exist"),
        (("--prune", 2, "--topology", 2), "fraction '2' is not within 0 and 1"),
        (("--prune", 0.2, "--rule", "cup", "--topology", 2), "unknown pruning rule 'cup'; did you mean 'cap'?"),
        (("--prune", 0.2, "--rule", "priced", "--topology", 2), "the rule priced is fitted on a trace"),
        (("--dtype", "float33"), "dtype 'float33'"),
    ],
)
def test_bad_input_is_one_line(run: Run, arguments: tuple[object, ...], message: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_a_missing_tokenizer_and_another_vocabulary(run: Run, tiny_checkpoint: Any, tmp_path: Path) -> None:
    import shutil

    bare, other = tmp_path / "bare", tmp_path / "other"
    for folder in (bare, other):
        shutil.copytree(tiny_checkpoint("mixtral"), folder)
    for file in bare.glob("tokenizer*"):
        file.unlink()
    code, _, err = run(*ON_TEXT, model=bare)
    assert code == 2
    assert "holds no tokenizer" in err
    tokens = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokens["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokens))
    code, _, err = run(*ON_TEXT, "--reference", other)
    assert code == 2
    assert "the reference has another vocabulary: 2 of" in err


def test_rounded_experts_are_told_and_measured(run: Run) -> None:
    code, out, _ = run(*ON_TEXT, "--bits", 8, "--dtype", "float32", "--json")
    result = json.loads(out)
    assert code == 0
    assert result["changes"] == [{"name": "rounding", "bits": 8}]
    assert 0 < result["kl"] < 1e-2
    code, out, err = run(*ON_TEXT, "--bits", 4)
    assert (code, out) == (2, "")
    assert "experts in 4 bits are not supported; give 8" in err
    assert err.count("\n") == 1


def test_people_are_told_of_rounding(run: Run) -> None:
    code, out, _ = run(*ON_TEXT, "--bits", 8)
    assert code == 0
    assert "rounding: the experts' weights in 8 bits" in out
    assert "KL mean" in out
