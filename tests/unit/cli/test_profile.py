"""`coterie profile` as a process would see it."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from coterie.cli.main import main
from coterie.profile.profile_file import load_profile

pytestmark = [pytest.mark.needs("torch"), pytest.mark.needs("transformers")]


@pytest.fixture
def coterie(monkeypatch, capsys):
    """Runs the command line; its exit code, stdout and stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["coterie", *map(str, arguments)])
        with pytest.raises(SystemExit) as done:
            main()
        told = capsys.readouterr()
        return int(done.value.code or 0), told.out, told.err

    return call


def test_json_table_and_update(coterie, tiny_checkpoint, tmp_path):
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    folder = tiny_checkpoint("mixtral")
    run = ("profile", folder, "--tokens", 96, "--window", 32, "--ablation-pairs", 2)
    code, out, err = coterie(*run, "--domain", "prose", "--domain", "code", "--out", first, "--json")
    result = json.loads(out)
    assert code == 0
    assert (result["tokens"], result["layers"], result["experts"], result["width"]) == (96, 3, 8, 48)
    assert 0 < result["tier_error"] < 1
    assert 0.25 < result["skew"] < 1
    assert {tuple(each["methods"]) for each in result["agreement"]} == {
        ("fisher", "weight"), ("fisher", "ablation"), ("weight", "ablation")
    }  # fmt: skip
    assert [each["tokens"] for each in result["texts"]] == [64, 32]
    assert err.startswith("warning: 96 tokens are few for tiers")
    assert err.count("\n") == 1
    made = load_profile(first)
    assert made.num_tokens == 96
    code, out, _ = coterie(*run, "--domain", "maths", "--update", first, "--out", second)
    assert code == 0
    assert "192" in out
    assert "same dominant expert: fisher, ablation" in out
    np.testing.assert_array_equal(load_profile(second).load_LE.sum(axis=1), 2 * made.load_LE.sum(axis=1))
    assert {path.name for path in tmp_path.iterdir()} == {"a.safetensors", "b.safetensors"}


def test_an_interrupted_run_says_how_to_go_on(coterie, tiny_checkpoint, tmp_path, monkeypatch):
    from coterie.calibration.collector import Collector

    out = tmp_path / "p.safetensors"
    run = ("profile", tiny_checkpoint("mixtral"), "--domain", "prose", "--tokens", 160, "--window", 16, "--out", out)
    plain, number = Collector.run, 0

    def stop_at_the_tenth(self, window):
        nonlocal number
        number += 1
        if number == 10:
            raise KeyboardInterrupt
        plain(self, window)

    with monkeypatch.context() as patch:
        patch.setattr(Collector, "run", stop_at_the_tenth)
        code, stdout, stderr = coterie(*run)
    assert (code, stdout) == (130, "")
    assert stderr == f"coterie: error: interrupted; {out}.partial holds what was done; the same command goes on\n"
    assert not out.exists()
    number = 0
    with monkeypatch.context() as patch:
        patch.setattr(Collector, "run", stop_at_the_tenth)
        assert coterie(*run)[0] == 0
    assert number == 2
    assert load_profile(out).num_tokens == 160
    assert not out.with_name("p.safetensors.partial").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "give --text FILE or --domain NAME"),
        (("--domain", "pros"), "did you mean 'prose'"),
        (("--text", "absent.txt"), "cannot read text absent.txt"),
        (("--domain", "prose", "--domain", "prose"), "given twice"),
        (("--domain", "prose", "--tokens", "63"), "63 tokens are too few for 8 experts, top-2"),
        (("--domain", "prose", "--tokens", "100000000"), "are needed; give a longer text"),
        (("--domain", "prose", "--window", "1"), "a window of 1 tokens"),
        (("--domain", "prose", "--update", "absent.safetensors"), "absent.safetensors does not exist"),
    ],
)
def test_one_clear_line(coterie, tiny_checkpoint, tmp_path, options, message):
    code, stdout, stderr = coterie("profile", tiny_checkpoint("mixtral"), *options, "--out", tmp_path / "p.safetensors")
    assert (code, stdout) == (2, "")
    assert message in stderr
    assert stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
