"""`coterie trace import` as a user meets it."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from coterie.cli.main import main
from coterie.trace.routing_trace import RoutingTrace


@pytest.fixture
def run(monkeypatch, capsys):
    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["coterie", "trace", "import", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        captured = capsys.readouterr()
        return int(stopped.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture
def source(tmp_path):
    ids = np.argsort(np.random.default_rng(0).random((3, 40, 8)), axis=2)[:, :, :2].astype(np.uint8)
    ids[:, 10:13] = 0
    np.savez(tmp_path / "t.npz", expert_ids=ids)
    return str(tmp_path / "t.npz")


def test_says_what_it_wrote_dropped_and_inferred(run, source, tmp_path):
    out = str(tmp_path / "t.safetensors")
    code, stdout, stderr = run(source, "--out", out)
    assert code == 0
    assert "37 tokens, 3 MoE layers, 8 experts, top-2, without routing weights" in stdout
    assert "dropped: 0 rows of warm-up, 3 rows of padding" in stdout
    assert "inferred num experts: largest id + 1 = 8" in stderr
    assert RoutingTrace.load(out).num_tokens == 37


def test_json_is_one_object(run, source, tmp_path):
    code, stdout, stderr = run(source, "--out", str(tmp_path / "t.safetensors"), "--json", "--experts", "16")
    assert (code, stderr) == (0, "")
    result = json.loads(stdout)
    assert (result["tokens"], result["experts"], result["dropped"]) == (37, 16, {"warm_up": 0, "padding": 3})
    assert "num_experts" not in result["inferred"]


def test_a_shipped_trace_by_name(run, tmp_path):
    code, stdout, _ = run("dsv2lite-law", "--out", str(tmp_path / "t.safetensors"))
    assert code == 0
    assert (
        "DeepSeek-V2-Lite, 8,327 tokens in 33 sequences, 26 MoE layers, 64 experts, top-6, with routing weights"
        in stdout
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.npz"], "nowhere.npz does not exist"),
        (["{source}", "--format", "jsn"], "unknown trace format 'jsn'; did you mean 'jsonl'"),
        (["{source}", "--experts", "4"], "ids run from 0 to 3"),
        (["{source}", "--experts", "0"], "Invalid value for '--experts'"),
    ],
)
def test_mistakes_are_one_line_and_write_nothing(run, source, tmp_path, arguments, message):
    out = tmp_path / "t.safetensors"
    code, stdout, stderr = run(*(argument.format(source=source) for argument in arguments), "--out", str(out))
    assert (code, stdout) == (2, "")
    assert stderr.count("\n") == 1
    assert message in stderr
    assert not out.exists()
