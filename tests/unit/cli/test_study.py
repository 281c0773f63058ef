"""`coterie study widths` as a user sees it, on a tiny random model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coterie import data
from coterie.cli.main import main

pytestmark = [pytest.mark.needs("torch"), pytest.mark.needs("transformers"), pytest.mark.needs("plotly")]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny_checkpoint: Any) -> Run:
    """Study the tiny Mixtral, or what `model` names, on little text; exit code, stdout, stderr."""
    from coterie.study.widths import context

    texts = {name: data.text(name)[:3000] for name in ("chat", "code", "maths")}
    monkeypatch.setattr(data, "text_names", lambda: sorted(texts))
    monkeypatch.setattr(data, "text", texts.__getitem__)
    monkeypatch.setattr(context, "QUICK", context.StudySize(32, 400, 6, 3))

    def call(*arguments: object, model: str | None = None) -> tuple[int, str, str]:
        folder = model or str(tiny_checkpoint("mixtral"))
        monkeypatch.setattr("sys.argv", ["coterie", "study", "widths", folder, *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
        told = capsys.readouterr()
        assert isinstance(stopped.value.code, int)
        return stopped.value.code, told.out, told.err

    return call


def test_everything_is_on_one_page_and_in_one_object(run: Run, tmp_path: Path) -> None:
    code, out, err = run("--out", tmp_path / "study", "--quick", "--json")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert result == json.loads((tmp_path / "study" / "study.json").read_text())
    assert result["full_perplexity"] > 1
    assert set(result["curves"]) == {
        "value", "value-learnt", "value-priced", "crisp", "symmetric", "uniform", "by-weight", "skip", "drop",
    }  # fmt: skip
    for points in result["curves"].values():
        for point in points:
            assert {"bytes", "perplexity_increase", "kl", "interval_95"} <= point.keys()
            assert 0 < point["bytes"] <= 1
            assert point["interval_95"][0] <= point["perplexity_increase"] <= point["interval_95"][1]
    paper = result["curves"]["crisp"][0]
    assert result["at_crisp_loss"]["crisp_bytes"] == paper["bytes"]
    assert result["at_crisp_loss"]["perplexity_increase"] == paper["perplexity_increase"]
    assert 0 < result["at_crisp_loss"]["value_bytes"] <= 1
    assert result["at_crisp_loss"]["value_policy"] == "value-learnt"
    assert 0 < result["at_crisp_loss"]["value_by_importance"]["value_bytes"] <= 1
    assert result["policies"]["learnt"]["kl_after"] <= result["policies"]["learnt"]["kl_before"]
    page = (tmp_path / "study" / "index.html").read_text()
    assert page.count("<h2>") == len(result["seconds"])
    assert f"{result['model']['parameters'] / 1e6:.1f} million parameters" in page
    assert not [part for part in ('src="http', 'href="http') if part in page.replace("\\", "")[:5000]]


def test_the_same_seed_gives_the_same_figures(run: Run, tmp_path: Path) -> None:
    results = []
    for seed in (0, 0, 1):
        code, out, _ = run("--out", tmp_path, "--quick", "--json", "--only", "ordering", "--seed", seed)
        assert code == 0
        results.append(json.loads(out))
        del results[-1]["seconds"]
    assert results[0] == results[1]
    assert results[0]["ordering"]["random"] != results[2]["ordering"]["random"]


def test_people_get_the_main_tables(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("--out", tmp_path, "--quick", "--only", "policies", "--only", "iso_memory")
    assert code == 0
    assert "million parameters" in out
    assert "times the bytes" in out
    assert "index.html" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--only", "orderings"), "unknown study 'orderings'; did you mean 'ordering'?"),
        (("--dtype", "int8"), "dtype 'int8' is no floating-point type"),
        (("--quick", "--seed", "-1"), "seed"),
    ],
)
def test_options_that_cannot_be(run: Run, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = run("--out", tmp_path / "out", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


def test_no_such_model_and_no_such_folder(run: Run, tmp_path: Path) -> None:
    code, _, err = run("--out", tmp_path / "out", model="no-such-model")
    assert code == 2
    assert "no model 'no-such-model'" in err
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("in the way")
    code, _, err = run("--out", tmp_path / "file" / "out")
    assert code == 2
    assert "choose another with --out" in err
