"""`coterie bench offload` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coterie.cli.main import main

pytestmark = pytest.mark.needs("transformers")


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", ["coterie", "bench", "offload", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def own_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import coterie

    out = tmp_path_factory.mktemp("own") / "store"
    coterie.pack("tiny-qwen3-moe", out)
    return out


def test_your_own_store_reads_real_text(
    own_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    arguments = [str(own_store), "--budgets", "20%,50%", "--tokens", "4", "--bandwidth", "real", "--out", str(tmp_path)]
    assert run([*arguments, "--json"], monkeypatch) == 0
    found = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "offload.json").read_text()) == found
    names = ["full", "moe-offload-lru", "moe-offload-lru-layer", "lossless in wholes", "lossless", "lossless + ahead"]
    assert [(row["budget"], row["system"]) for row in found["rows"]] == [
        (budget, name) for budget in ("20%", "50%") for name in names
    ]
    assert found["emulated_bandwidth"] is None
    assert not found["bench_model"]["random_weights"]
    assert found["full_perplexity"] > 1
    assert all(row["perplexity_increase"] == 0 for row in found["rows"])


def test_a_trace_is_replayed_and_shown(
    make_trace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from coterie.bench.offload import run as bench
    from coterie.bench.offload.bench_model import BenchShape

    monkeypatch.setattr(bench, "bench_shape", lambda spec: BenchShape(2, 8, 2, 128, 64))
    trace = tmp_path / "trace.safetensors"
    make_trace(layers=2, tokens=80, experts=8, top_k=2).save(trace)
    arguments = [
        "--replay",
        str(trace),
        "--budgets",
        "30%",
        "--tokens",
        "4",
        "--systems",
        "full,moe-offload-lru-layer,lossless",
    ]
    assert run([*arguments, "--studies", "schedules,batches,scheduling"], monkeypatch) == 0
    shown = capsys.readouterr().out
    assert "random weights, decisions replayed" in shown
    assert "an emulation of 1 GB/s" in shown
    for text in ("30% of the experts in memory", "lossless", "asked 1.25", "widest-first", "coordination"):
        assert text in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budgets", ","], "--budgets ',' names none"),
        (["--budgets", "x%"], "not a number"),
        (["--bandwidth", "fast"], "not a number with a unit"),
        (["--model", "tiny-mixtral", "--replay", "gptoss20b-decode"], "give one"),
        (["--widths", "plan"], "--widths is for your own STORE"),
        (["nowhere", "--model", "tiny-mixtral"], "leave --replay, --model, --keep and --studies out"),
        (["nowhere"], "is no expert store"),
        (["--replay", "gptoss20b-decode", "--budgets", "0.1%"], "the smallest that works here is 0.52%"),
        (["--replay", "gptoss20b-decode", "--studies", "lenghts"], "did you mean 'lengths'"),
        (["--replay", "gptoss20b-decode", "--systems", "crisp"], "unknown system 'crisp'"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert run(arguments, monkeypatch) == 2
    told = capsys.readouterr().err
    assert message in told
    assert len(told.strip().splitlines()) == 1
