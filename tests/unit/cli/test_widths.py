"""`coterie widths` as a user sees it, and a plan in `coterie eval`."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coterie.cli.main import main
from coterie.errors import TraceError
from coterie.pruning.width_plan_file import load_plan

Run = Callable[..., tuple[int, str, str]]
TEXT = "A text of some length, to be read in windows; naïve but long enough. " * 8


@pytest.fixture
def profile(make_profile: Any) -> Any:
    return make_profile(3, 8, 2, 48)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], profile: Any) -> Run:
    """Run a command in an empty folder, where reading p.safetensors gives the profile; exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def load_profile(path: Path) -> Any:
        if str(path) != "p.safetensors":
            raise TraceError(f"{path} does not exist or is no file; check the path")
        return profile

    monkeypatch.setitem(sys.modules, "coterie.profile.profile_file", SimpleNamespace(load_profile=load_profile))

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["coterie", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
        told = capsys.readouterr()
        assert isinstance(stopped.value.code, int)
        return stopped.value.code, told.out, told.err

    return call


MAKE = ("widths", "p.safetensors", "--out", "w.safetensors")


def test_json_tells_what_the_file_holds(run: Run) -> None:
    code, out, err = run(*MAKE, "--bytes", "60%", "--json")
    assert (code, err) == (0, "")
    result, plan = json.loads(out), load_plan("w.safetensors")
    assert {name: result[name] for name in plan.settings} == plan.settings
    assert (result["policy"], result["width"], result["step"], result["asked"]) == ("value", 48, 3, {"bytes": 0.6})
    assert result["expected_bytes"] == pytest.approx(0.6, abs=0.001)
    assert result["metadata_bytes"] == 3 * 8 * 16 * 4 + 8


def test_options_reach_the_plan(run: Run) -> None:
    wide = ("--role-widths", "1,1 0.75,0.75 0.5,0.25")
    code, out, _ = run(
        *MAKE, "--policy", "crisp", "--alpha", "50%", "--beta", 0.8, *wide, "--variant", "mean_abs", "--json"
    )
    result = json.loads(out)
    assert code == 0
    assert (result["alpha"], result["beta"], result["variant"]) == (0.5, 0.8, "mean_abs")
    assert result["widths"]["cold"] == {"dominant": 24, "auxiliary": 12}
    _, out, _ = run(*MAKE, "--threshold", 0.1, "--prices", "1,1.5,2", "--step", 16, "--json")
    assert json.loads(out)["prices"] == {"hot": 1, "warm": 1.5, "cold": 2}
    _, out, _ = run(*MAKE, "--policy", "by-weight", "--threshold", 1, "--gamma", 2, "--json")
    assert json.loads(out)["gamma"] == 2
    _, out, _ = run(*MAKE, "--policy", "crisp", "--warm-aux", 0.25, "--cold-aux", 0.25, "--json")
    assert json.loads(out)["widths"]["warm"] == json.loads(out)["widths"]["cold"] == {"dominant": 48, "auxiliary": 12}


def test_tables_for_people(run: Run) -> None:
    code, out, _ = run(*MAKE, "--policy", "crisp")
    assert code == 0
    for words in ("policy crisp", "share of full expert bytes", "combinations", "48 / 24", "48 / 0", "fisher 100.0%"):
        assert words in out
    code, out, _ = run(*MAKE, "--policy", "skip", "--threshold", 0.5)
    assert "policy skip, threshold 0.5" in out
    assert "tier" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policy", "valeu", "--bytes", 0.5), "unknown width policy 'valeu'; did you mean 'value'?"),
        ((), "how strong should the policy value be"),
        (("--bytes", 2), "fraction '2' is not within 0 and 1"),
        (("--bytes", 0.5, "--threshold", 1), "exclude each other"),
        (("--bytes", 0.2, "--policy", "crisp"), "cannot be met: this policy reads at least"),
        (("--bytes", 0.5, "--prices", "1,x,2"), "--prices '1,x,2' is no list of numbers"),
        (("--policy", "crisp", "--role-widths", "1,1 1"), "widths 1, 1, 1 are not"),
        (("--bytes", 0.5, "--max-ppl-increase", "1%"), "leave --threshold and --bytes out"),
        (("--bytes", 0.5, "--domain", "prose"), "--domain belongs to --max-ppl-increase"),
        (("--bytes", 0.5, "--model", "m"), "--model belongs to --max-ppl-increase"),
        (("--bytes", 0.5, "--tokens", 10), "--tokens belongs to --max-ppl-increase"),
    ],
)
def test_bad_input_is_one_line(run: Run, arguments: tuple[object, ...], message: str) -> None:
    code, out, err = run(*MAKE, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert not list(Path().iterdir())


def test_files_that_are_not_there(run: Run) -> None:
    code, _, err = run("widths", "none.safetensors", "--bytes", 0.5, "--out", "w.safetensors")
    assert code == 2
    assert "none.safetensors does not exist" in err
    code, _, err = run("widths", "p.safetensors", "--bytes", 0.5, "--out", "no/w.safetensors")
    assert code == 2
    assert "cannot write no/w.safetensors" in err


# ---- with a model ---------------------------------------------------------------------------------------------------


@pytest.fixture
def of_mixtral(tiny_checkpoint: Any, profile: Any) -> Any:
    """The folder of a tiny Mixtral, of which the profile says it is."""
    from coterie.models.identity import identity_of
    from coterie.models.load import load_model

    folder = tiny_checkpoint("mixtral")
    object.__setattr__(profile, "identity", identity_of(load_model(folder)))
    return folder


@pytest.mark.needs("transformers")
def test_a_plan_in_eval(run: Run, of_mixtral: Path, tiny_checkpoint: Any) -> None:
    Path("text.txt").write_text(TEXT, encoding="utf-8")
    on_text = ("--text", "text.txt", "--window", 32, "--widths", "w.safetensors")
    assert run(*MAKE, "--policy", "skip", "--threshold", 0.7)[0] == 0
    code, out, err = run("eval", of_mixtral, *on_text, "--json")
    assert code == 0, err
    result = json.loads(out)
    (change,) = result["changes"]
    assert result["kl"] > 0
    assert (change["name"], change["policy"], change["threshold"]) == ("widths", "skip", 0.7)
    assert 0 < change["measured"]["share"] < 1
    code, out, _ = run("eval", of_mixtral, *on_text, "--prune", 0.3, "--topology", 2)
    assert code == 0
    assert "pruning, rule cap" in out
    assert "widths, policy skip" in out
    assert "on the texts: 0." in out
    for model, message in (("olmoe", "the model has 3 of 8, top-3"), ("phimoe", "the width plan is of the model toy")):
        code, _, err = run("eval", tiny_checkpoint(model), *on_text)
        assert code == 2
        assert message in err
    Path("w.safetensors").write_bytes(b"x")
    code, _, err = run("eval", of_mixtral, *on_text)
    assert code == 2
    assert "w.safetensors is truncated or no safetensors file" in err


@pytest.mark.needs("transformers")
def test_a_perplexity_allowance(run: Run, of_mixtral: Path, profile: Any, tiny_checkpoint: Any) -> None:
    Path("text.txt").write_text(TEXT, encoding="utf-8")
    skip = (*MAKE, "--policy", "skip", "--max-ppl-increase", "20%")
    code, _, err = run(*skip)
    assert code == 2
    assert "the profile does not say on which text it was made; give --text FILE" in err
    source = {"name": "text.txt", "sha256": hashlib.sha256(TEXT.encode()).hexdigest()[:16], "tokens": 100}
    object.__setattr__(profile, "provenance", {"texts": [source]})
    code, _, err = run(*skip)
    assert code == 2
    assert "names its model 'toy', which is no folder here and no shipped model; say where it is with --model" in err
    code, out, err = run(*skip, "--model", of_mixtral, "--tokens", 200, "--json")
    assert code == 0, err
    result = json.loads(out)
    assert result["allowance"]["increase"] <= 0.2
    assert (result["allowance"]["tokens"], result["allowance"]["texts"]) == (199, ["text.txt"])
    assert load_plan("w.safetensors").settings["threshold"] == result["threshold"]
    code, out, _ = run(*skip, "--model", of_mixtral, "--domain", "prose", "--tokens", 100)
    assert code == 0
    assert "at full width, +" in out or "at full width, -" in out
    code, _, err = run(*skip, "--model", tiny_checkpoint("phimoe"))
    assert code == 2
    assert "with identity" in err
    Path("text.txt").write_text(TEXT + ".", encoding="utf-8")
    code, _, err = run(*skip, "--model", of_mixtral)
    assert code == 2
    assert "text text.txt is not the one that was profiled" in err


def test_no_torch_without_an_allowance(tmp_path: Path) -> None:
    """A plan is made where there is no torch at all."""
    import subprocess
    import textwrap

    code = textwrap.dedent("""
        import sys, types
        import numpy as np
        from coterie.profile.model_profile import ModelProfile
        from coterie.spec import MoESpec
        ids = np.tile(np.array([[0, 1], [1, 2]]), (1, 9, 1))
        pairs = np.array([[[0, 9, 0], [9, 0, 9], [0, 9, 0]]])
        some = ModelProfile(
            MoESpec("toy", 1, 3, 2), "id", 32, 18, np.array([[9, 18, 9]]), pairs, {"rms": np.ones((1, 3, 32), "f4")},
            {"weight": np.ones((1, 3, 3), "f4")}, ids, np.full((1, 18, 2), 0.5, "f4"),
        )
        reader = types.SimpleNamespace(load_profile=lambda path: some)
        sys.modules["coterie.profile.profile_file"] = reader
        from coterie.cli.main import main
        sys.argv = ["coterie", "widths", "p", "--policy", "crisp", "--out", sys.argv[1]]
        try:
            main()
        except SystemExit as stopped:
            assert not stopped.code
        assert "torch" not in sys.modules and "numba" not in sys.modules
    """)
    out = tmp_path / "w.safetensors"
    done = subprocess.run([sys.executable, "-c", code, str(out)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert load_plan(out).policy == "crisp"
