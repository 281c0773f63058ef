"""`coterie trace synthesize` writes a trace or says in one line why not."""

import json
import sys

import pytest

from coterie.cli import main
from coterie.trace.routing_trace import RoutingTrace


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    def call(**changed):
        options = {"layers": 2, "experts": 16, "top-k": 4, "tokens": 50, "out": tmp_path / "t.safetensors", **changed}
        arguments = [text for name, value in options.items() for text in (f"--{name}", str(value)) if value is not None]
        arguments = [text for text in arguments if text != "True"]
        monkeypatch.setattr(sys, "argv", ["coterie", "trace", "synthesize", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main.main()
        captured = capsys.readouterr()
        return stopped.value.code, captured.out, captured.err

    return call


def test_writes_a_trace_that_says_synthetic(run, tmp_path):
    code, out, _ = run(seed=3, like="gpt-oss")
    assert code == 0
    assert "synthetic routing, gptoss-like, seed 3" in out
    trace = RoutingTrace.load(tmp_path / "t.safetensors")
    assert trace.expert_ids.shape == (2, 50, 4)
    assert trace.provenance["synthetic"] is True
    assert trace.provenance["seed"] == 3


def test_json_is_one_object(run):
    code, out, _ = run(json=True)
    assert code == 0
    assert json.loads(out)["tokens"] == 50


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"top-k": 17}, "top_k = 17 is more than num_experts = 16"),
        ({"tokens": 0}, "num_tokens = 0"),
        ({"layers": -1}, "num_layers = -1"),
        ({"experts": 70_000}, "65536"),
        ({"like": "deepsek"}, "did you mean 'deepseek'"),
        ({"sequence-tokens": 0}, "sequence_tokens = 0"),
        ({"out": "/nowhere/at/all.safetensors"}, "cannot write /nowhere/at/all.safetensors"),
    ],
)
def test_bad_numbers_are_one_line_and_write_nothing(run, tmp_path, changed, message):
    code, out, err = run(**changed)
    assert code == 2
    assert out == ""
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
