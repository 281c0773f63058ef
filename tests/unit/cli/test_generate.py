"""`coterie generate` on files of prompts: results in order, bad input named before the work, nothing half-written."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import coterie
from coterie.cli.main import main

pytestmark = pytest.mark.needs("transformers")


@pytest.fixture(scope="module")
def store(tiny_checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model's, with a chat template."""
    folder = tmp_path_factory.mktemp("generate")
    shutil.copytree(tiny_checkpoint("qwen3_moe"), folder / "model")
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}bot:"
    (folder / "model" / "chat_template.jinja").write_text(template)
    coterie.pack(folder / "model", folder / "store")
    return folder / "store"


@pytest.fixture
def run(store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command on the store."""

    def call(*words: Any) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["coterie", "generate", str(store), "--budget", "30%", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        streams = capsys.readouterr()
        return int(ended.value.code or 0), streams.out, streams.err

    return call


LINES = (
    {"id": "one", "prompt": "Once upon a time there was"},
    {"messages": [{"role": "user", "content": "hello"}]},
    {"id": 7, "prompt": "x"},
)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Two texts around a conversation."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return file


def test_results_come_in_order_whatever_the_batch(run: Any, prompts: Path, tmp_path: Path) -> None:
    code, out, err = run("--prompts", prompts, "--tokens", 5)
    assert code == 0
    results = [json.loads(line) for line in out.splitlines()]
    assert [each["id"] for each in results] == ["one", 2, 7]
    assert [each["prompt_tokens"] for each in results] == [26, len("user: hello\nbot:"), 1]
    assert all(1 <= each["tokens"] <= 5 and each["finish"] in ("stop", "length") for each in results)
    assert "3 prompts continued by" in err
    _, single, _ = run("--prompt", LINES[0]["prompt"], "--tokens", 5, "--json")
    assert json.loads(single)["text"] == LINES[0]["prompt"] + results[0]["text"]
    file = tmp_path / "out.jsonl"
    code, out, _ = run("--prompts", prompts, "--tokens", 5, "--batch", 3, "--out", file, "--json")
    assert code == 0
    assert [json.loads(line) for line in file.read_text().splitlines()] == results
    told = json.loads(out)
    assert (told["prompts"], told["batch"], told["sampling"]["seed"], told["out"]) == (3, 3, 0, str(file))
    assert told["tokens"] == sum(each["tokens"] for each in results)
    assert told["sampling"]["tokens"] == 5
    assert set(told["versions"]) == {"coterie", "torch", "transformers"}


def test_the_same_seed_gives_the_same_texts(run: Any, prompts: Path) -> None:
    words = ("--prompts", prompts, "--tokens", 5, "--temperature", 1.5, "--top-p", 0.9, "--batch", 2, "--seed")
    first, again, other = (run(*words, seed)[1] for seed in (1, 1, 2))
    assert first == again != other


def test_bad_input_is_one_line_before_any_work(
    run: Any, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coterie.offloading.model.load_skeleton", lambda _: pytest.fail("work began"))
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "a"}) + "\n" + json.dumps({"prompt": "b" * 510}) + "\n")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"\n')
    (tmp_path / "bare.jsonl").write_text('{"prompt": "a"}\n{"prompt": ""}\n')
    kept = tmp_path / "kept.jsonl"
    kept.write_text("earlier")
    for words, message in (
        ((), "neither --prompt nor --prompts are given; give one"),
        (("--prompt", "a", "--prompts", prompts), "both --prompt and --prompts are given"),
        (("--prompt", "a", "--out", tmp_path / "o"), "--out takes the results of --prompts"),
        (("--prompts", prompts, "--json"), "send them to --out FILE"),
        (("--prompts", tmp_path / "bad.jsonl", "--out", kept), "bad.jsonl line 2 is truncated or no JSON"),
        (("--prompts", tmp_path / "bare.jsonl"), "bare.jsonl line 2 has no tokens; give some text"),
        (("--prompts", tmp_path / "long.jsonl", "--tokens", 5), "long.jsonl line 2 has 510 tokens and 5 are to follow"),
        (("--prompts", tmp_path / "none.jsonl"), "cannot read"),
        (("--prompts", prompts, "--out", tmp_path / "no" / "o"), "choose a folder that exists and is writable"),
        (("--prompt", "a", "--temperature", -1), "a temperature of -1"),
        (("--prompt", "a", "--device", "cuda:99"), "device 'cuda:99' is not there"),
        (("--prompt", "a", "--skip-misses", 7), "--skip-misses 7 skips every expert that misses"),
        (("--prompt", "a", "--skip-misses", 3), "choose F below K = 3, e.g. 0.75"),
        (("--prompt", "a", "--picture", tmp_path / "t.png"), "ends in .png, and a page is written"),
        (("--prompt", "a", "--top-p", 0.5), "without a temperature changes nothing"),
    ):
        code, out, err = run(*words)
        assert (code, out) == (2, ""), err
        assert message in err
        assert len(err.strip().splitlines()) == 1
    assert kept.read_text() == "earlier"


def test_results_are_written_whole_or_not_at_all(
    run: Any, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    real, calls, file = os.preadv, [], tmp_path / "out.jsonl"

    def preadv(*arguments: Any) -> int:
        calls.append(1)
        if len(calls) > 60:
            raise OSError(5, "Input/output error")
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", preadv)
    code, out, err = run("--prompts", prompts, "--tokens", 9, "--out", file, "--timeline", tmp_path / "t.json")
    assert (code, out) == (2, "")
    assert "Input/output error; check the disk" in err
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]


@pytest.mark.needs("plotly")
def test_the_last_token_as_a_picture(run: Any, tmp_path: Path) -> None:
    page, trace = tmp_path / "t.html", tmp_path / "t.json"
    words = ("--prompt", "abc", "--tokens", 3, "--picture", page)
    code, _, _ = run(*words, "--timeline", trace, "--bandwidth", "50MB/s")
    assert code == 0
    text = page.read_text()
    assert "Plotly.newPlot" in text
    assert "3 MoE layers, of one token" in text
    assert "an emulated 0.05 GB/s: times are an emulation" in text
    assert {"layer", "link", "compute"} <= {each.get("cat") for each in json.loads(trace.read_text())["traceEvents"]}
    code, out, err = run("--prompt", "abc", "--picture", tmp_path / "no" / "t.html")
    assert (code, out) == (2, "")
    assert "choose a folder that exists and is writable" in err


def test_a_picture_without_plotly_is_refused_before_the_work(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    code, out, err = run("--prompt", "abc", "--picture", tmp_path / "t.html")
    assert (code, out) == (2, "")
    assert "figures need plotly; pip install 'coterie[report]'" in err
    assert not list(tmp_path.iterdir())


def test_what_was_hidden_and_what_could_be(run: Any) -> None:
    code, out, _ = run("--prompt", "abc", "--tokens", 3, "--skip-misses", 2.5)
    assert code == 0
    assert "share of the loading time that was hidden" in out
    assert "computing experts alone could hide (the rest hides too)" in out
