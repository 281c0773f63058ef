"""`coterie export` and `coterie validate` as a user meets them: exit codes, one line on stderr, one JSON object."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from coterie.cli.main import main
from coterie.placement.placement import Placement
from coterie.spec import MoESpec
from coterie.topology import Topology

CONFIG = {
    "model_type": "deepseek_v2", "num_hidden_layers": 4, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "topk_method": "greedy", "hidden_size": 16,
}  # fmt: skip


class Shell:
    """Runs the command line in this process, in a folder with a placement and a config."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
        self._monkeypatch, self._capsys = monkeypatch, capsys
        monkeypatch.chdir(folder)
        rows = np.stack([np.random.default_rng(seed).permutation(8) for seed in range(3)])
        Placement(rows, Topology(1, 4), MoESpec("tiny", 3, 8, 2)).save("placement.json")
        Path("config.json").write_text(json.dumps(CONFIG))

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        self._monkeypatch.setattr(sys, "argv", ["coterie", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = self._capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, out, err

    def fails(self, *arguments: str) -> str:
        """The one line on stderr of a command that must fail without writing anything."""
        before = sorted(Path().rglob("*"))
        code, out, err = self(*arguments)
        assert (code, out) == (2, "")
        assert err.startswith("coterie: error: ")
        assert err.count("\n") == 1
        assert sorted(Path().rglob("*")) == before
        return err


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(tmp_path, monkeypatch, capsys)


def test_vllm_takes_no_file(shell: Shell) -> None:
    err = shell.fails("export", "placement.json", "--to", "vllm", "--out", "m.json")
    assert "vLLM takes no placement file" in err
    assert "coterie bake MODEL" in err


@pytest.mark.parametrize("engine", ["sglang", "vllm-ascend", "tensorrt-llm", "json"])
def test_export_then_validate(shell: Shell, engine: str) -> None:
    code, out, err = shell("export", "placement.json", "--to", engine, "--model", "config.json", "--out", "m.json")
    assert (code, err) == (0, "")
    assert f"wrote m.json for {engine}: 3 MoE layers, 8 experts, 4 devices" in out
    assert "note: " in out
    assert ("start with: " in out) is (engine != "json")
    code, out, err = shell("validate", "m.json", "--model", ".", "--topology", "4")
    assert (code, err) == (0, "")
    assert f"m.json is a sound {engine} file" in out


def test_json_is_one_object(shell: Shell) -> None:
    _, out, _ = shell("export", "placement.json", "--to", "sglang", "--model", ".", "--out", "m.json", "--json")
    result = json.loads(out)
    assert result["flags"][:2] == ["--init-expert-location", "m.json"]
    assert result["model"]["layer_ids"] == [1, 2, 3]
    assert result["devices"] == 4
    assert result["notes"]
    _, out, _ = shell("validate", "m.json", "--json")
    assert json.loads(out) | {"notes": []} == {
        "file": "m.json", "format": "sglang", "valid": True, "layers": 4, "slots": 8, "experts": 8, "devices": None,
        "problems": [], "notes": [],
    }  # fmt: skip


def test_an_invalid_file_is_one_line_and_exit_2(shell: Shell) -> None:
    Path("m.json").write_text(json.dumps({"physical_to_logical_map": [[0, 1, 2, 9], [0, 1, 2, 3]]}))
    assert "m.json: model layer 0 holds expert 9" in shell.fails("validate", "m.json")
    assert "(and 1 more; --json lists them)" in shell.fails("validate", "m.json")
    code, out, err = shell("validate", "m.json", "--json")
    assert code == 2
    assert err.count("\n") == 1
    assert len(json.loads(out)["problems"]) == 2
    assert json.loads(out)["valid"] is False


def test_bad_input_is_one_line_and_writes_nothing(shell: Shell) -> None:
    Path("other.json").write_text(json.dumps(CONFIG | {"n_routed_experts": 16}))
    Path("dense.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2}))
    Path("broken.json").write_text('{"kind": "coterie.placement"')
    to_sglang = ("--to", "sglang", "--out", "m.json")
    assert "give --model config.json" in shell.fails("export", "placement.json", *to_sglang)
    assert "is for tiny (3 layers, 8 experts" in shell.fails(
        "export", "placement.json", *to_sglang, "--model", "other.json"
    )
    assert "dense has no MoE layers" in shell.fails("export", "placement.json", *to_sglang, "--model", "dense.json")
    assert "broken.json is truncated" in shell.fails("export", "broken.json", *to_sglang)
    assert "broken.json is truncated" in shell.fails("validate", "broken.json")
    assert "gone.json does not exist" in shell.fails("export", "gone.json", *to_sglang)
    assert "gone.json does not exist" in shell.fails("validate", "gone.json")
    assert "did you mean 'sglang'" in shell.fails("export", "placement.json", "--to", "sglnag", "--out", "m.json")
    assert "would overwrite an input" in shell.fails(
        "export", "placement.json", "--to", "json", "--out", "placement.json"
    )
    assert "with the ending .json" in shell.fails(
        "export", "placement.json", "--to", "sglang", "--model", ".", "--out", "m.yaml"
    )
    assert "topology" in shell.fails("validate", "placement.json", "--topology", "8y8")
    assert "--to" in shell.fails("export", "placement.json", "--out", "m.json")


def test_the_verbs_cost_nothing_until_they_run() -> None:
    code = "import sys, coterie.cli.main; print(sorted({'numpy', 'numba', 'yaml', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
