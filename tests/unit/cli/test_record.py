"""`coterie record` as a process would see it."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from coterie.cli.main import main
from coterie.trace.routing_trace import RoutingTrace

pytestmark = [pytest.mark.needs("torch"), pytest.mark.needs("transformers")]


@pytest.fixture
def coterie(monkeypatch, capsys, tmp_path):
    """Runs the command line; its exit code, stdout and stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["coterie", *map(str, arguments)])
        with pytest.raises(SystemExit) as done:
            main()
        told = capsys.readouterr()
        return int(done.value.code or 0), told.out, told.err

    return call


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("A text of some length, to be read in windows. " * 20, encoding="utf-8")
    return file


def test_json_is_one_object(coterie, tiny_checkpoint, text, tmp_path):
    out = tmp_path / "t.safetensors"
    folder = tiny_checkpoint("mixtral")
    code, stdout, _ = coterie(
        "record", folder, "--text", text, "--tokens", 100, "--length", 16, "--batch", 3, "--out", out, "--json"
    )
    result = json.loads(stdout)
    assert code == 0
    assert (result["tokens"], result["sequences"], result["phases"]) == (100, 7, {"prefill": 100, "decode": 0})
    assert (result["layers"], result["experts"], result["top_k"]) == (3, 8, 2)
    trace = RoutingTrace.load(out)
    assert trace.num_tokens == 100
    assert trace.provenance["source"] == "text.txt"


def test_generate(coterie, tiny_checkpoint, tmp_path):
    out = tmp_path / "t.safetensors"
    arguments = ("--domain", "prose", "--tokens", 40, "--length", 20, "--generate", "--seed", 3, "--out", out)
    code, stdout, _ = coterie("record", tiny_checkpoint("mixtral"), *arguments)
    assert code == 0
    assert "tokens" in stdout
    trace = RoutingTrace.load(out)
    assert trace.num_tokens >= 40
    assert (trace.phase == 1).any()
    assert trace.provenance["run"]["seed"] == 3
    assert coterie("trace", "info", out)[0] == 0


def test_pruned_routing_is_what_offline_pruning_keeps(coterie, tiny_checkpoint, text, tmp_path):
    """In the first layer, where nothing upstream has changed yet, pruning the trace gives the same."""
    plain, live, offline = (tmp_path / f"{name}.safetensors" for name in ("plain", "live", "offline"))
    folder = tiny_checkpoint("qwen3_moe")
    run = ("record", folder, "--text", text, "--tokens", 120, "--length", 16, "--batch", 3)
    assert coterie(*run, "--out", plain)[0] == 0
    code, stdout, _ = coterie(*run, "--out", live, "--prune", "0.3", "--topology", "4", "--json")
    assert code == 0
    pruning = json.loads(stdout)["pruning"]
    assert (pruning["rule"], pruning["p"], pruning["topology"]["devices_per_node"]) == ("cap", 0.3, 4)
    assert coterie("trace", "prune", plain, "--topology", "4", "-p", "0.3", "--out", offline)[0] == 0
    recorded, expected = RoutingTrace.load(live), RoutingTrace.load(offline)
    assert recorded.kept is not None
    assert 0.3 < recorded.kept.mean() < 1
    np.testing.assert_array_equal(recorded.expert_ids[0], expected.expert_ids[0])
    np.testing.assert_array_equal(recorded.kept[0], expected.kept[0])
    assert recorded.provenance["pruning"]["rule"] == "cap"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--domain", "prose", "--prune", "0.2"), "pruning needs devices"),
        (("--domain", "prose", "--topology", "8"), "belongs to pruning"),
        ((), "either --text FILE or --domain"),
        (("--domain", "pros"), "did you mean 'prose'"),
        (("--text", "absent.txt"), "absent.txt does not exist"),
        (("--domain", "prose", "--length", "1"), "length = 1"),
        (("--domain", "prose", "--tokens", "100000000"), "the text has"),
    ],
)
def test_one_clear_line(coterie, tiny_checkpoint, tmp_path, options, message):
    code, stdout, stderr = coterie("record", tiny_checkpoint("mixtral"), *options, "--out", tmp_path / "t.safetensors")
    assert (code, stdout) == (2, "")
    assert message in stderr
    assert stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_an_absent_folder_is_told_before_the_model_is_read(coterie, tmp_path):
    code, _, stderr = coterie("record", "no-model", "--domain", "prose", "--out", tmp_path / "absent" / "t.safetensors")
    assert code == 2
    assert "is no folder" in stderr
