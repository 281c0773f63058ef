"""The plugin's file: what it may say, and that everything else is refused in one line that names the remedy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError, InfeasiblePlacement
from coterie.placement.placement import Placement
from coterie.spec import MoESpec
from coterie.topology import Topology
from coterie.vllm_plugin.config import configured, read_config


def write(folder: Path, text: str) -> Path:
    path = folder / "coterie.yaml"
    path.write_text(text)
    return path


def test_everything_a_file_may_say(tmp_path: Path) -> None:
    prices = {"rule": {"rule": "priced", "floor": 0.5, "theta": [[0.1, 0.2], [0.3, 0.4]]}, "fit": {}}
    (tmp_path / "prices.json").write_text(json.dumps(prices))
    path = write(
        tmp_path,
        "prune: {rule: priced, prices: prices.json, renormalise: false}\ndevices: 2x4,inter=3\n"
        "report: counts.json\nrecord: {folder: ., tokens: 500}\ninterval: 2\n",
    )
    config = read_config(path)
    assert config.prune is not None
    assert config.record is not None
    assert (config.prune.rule, config.prune.thetas, config.prune.floor) == ("priced", ((0.1, 0.2), (0.3, 0.4)), 0.5)
    assert config.prune.renormalise is False
    assert config.devices == Topology.parse("2x4,inter=3")
    assert (config.report, config.record.folder) == (tmp_path / "counts.json", tmp_path)
    assert (config.record.tokens, config.interval) == (500, 2.0)
    assert read_config(write(tmp_path, "prune: {p: 30%}\ndevices: 8\n")).prune == read_config(
        write(tmp_path, "prune: {rule: cap, p: 0.3}")
    ).prune  # fmt: skip


def test_a_placement_beside_the_file(tmp_path: Path) -> None:
    placement = Placement(np.arange(8)[None], Topology.parse("4"), MoESpec("toy", 1, 8, 2))
    placement.save(tmp_path / "placement.json")
    found = read_config(write(tmp_path, "prune: {p: 0.2}\nplacement: placement.json\n")).placement
    assert found is not None
    assert found.topology == placement.topology


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prune: [", "is no YAML"),
        ("- 3", "holds no keys"),
        ("{}", "asks for nothing"),
        ("report: counts.json", "asks for nothing"),
        ("prunes: {p: 0.2}", "did you mean 'prune'"),
        ("prune: {p: 0.2, renormalize: true}", "did you mean 'renormalise'"),
        ("prune: {rule: capp, p: 0.2}", "did you mean 'cap'"),
        ("prune: {p: 1}", r"p = 1 is not within 0 and 1 \(1 excluded\)"),
        ("prune: {p: 1.5}", "p = 1.5 .* number from 0 to 1"),
        ("prune: {p: 130%}", "'130%' is not within 0 and 1"),
        ("prune: {p: true}", "p = True"),
        ("prune: {rule: naive}", "takes p"),
        ("prune: {rule: cap, p: 0.2, prices: x.json}", "takes p, e.g. 0.2, and no prices"),
        ("prune: {rule: priced, p: 0.2}", "takes prices"),
        ("prune: {rule: priced, prices: none.json}", "none.json does not exist"),
        ("prune: {rule: priced, prices: other.json}", "other.json holds no prices"),
        ("prune: {rule: priced, prices: floor.json}", "floor.json: a floor of 2 is not within 0 and 1"),
        ("prune: {p: 0.2, renormalise: 1}", "true or false"),
        ("prune: {p: 0.2}\ndevices: 0", "at least 1"),
        ("prune: {p: 0.2}\ndevices: [8]", "a number, or a topology"),
        ("prune: {p: 0.2}\ndevices: two", "is not understood"),
        ("prune: {p: 0.2}\nplacement: none.json", "none.json does not exist"),
        ("prune: {p: 0.2}\nplacement: 3", "is the name of a file"),
        ("prune: {p: 0.2}\nreport: none/counts.json", "is no file in a folder that exists"),
        ("prune: {p: 0.2}\ninterval: -1", "from 0 to 86400"),
        ("record: {tokens: 5}", "needs a folder"),
        ("record: {folder: none}", "needs a folder that exists"),
        ("record: {folder: ., tokens: 0}", "tokens = 0"),
        ("record: {folder: ., tokens: 1.9}", "tokens = 1.9 .* whole number"),
        ("record: {folder: .}\nreport: counts.json", "which are for prune"),
    ],
)
def test_what_cannot_be(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"rule": {"rule": "cap", "p": 0.3}}')
    (tmp_path / "floor.json").write_text('{"rule": {"rule": "priced", "floor": 2, "theta": [[0.1, 0.2]]}}')
    with pytest.raises((ConfigError, InfeasiblePlacement), match=said) as raised:
        read_config(write(tmp_path, text))
    assert "\n" not in str(raised.value)


def test_a_placement_and_devices_contradict(tmp_path: Path) -> None:
    Placement(np.arange(8)[None], Topology.parse("4"), MoESpec("toy", 1, 8, 2)).save(tmp_path / "p.json")
    with pytest.raises(ConfigError, match="brings its own devices"):
        read_config(write(tmp_path, "prune: {p: 0.2}\ndevices: 4\nplacement: p.json"))


def test_only_the_environment_makes_it_active(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COTERIE_CONFIG", raising=False)
    assert configured() is None
    monkeypatch.setenv("COTERIE_CONFIG", "")
    assert configured() is None
    monkeypatch.setenv("COTERIE_CONFIG", str(tmp_path / "none.yaml"))
    with pytest.raises(ConfigError, match="does not exist"):
        configured()


LOADED = "print(sorted({'torch', 'numba', 'transformers', 'numpy', 'yaml'} & set(sys.modules)))"


@pytest.mark.parametrize(
    ("code", "loaded"),
    [
        ("from coterie.vllm_plugin.plugin import register; register()", []),
        ("import coterie.vllm_plugin.config, yaml", ["numpy", "yaml"]),
    ],
)
def test_nothing_heavy_is_imported_before_it_is_needed(code: str, loaded: list[str]) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", f"import os, sys; os.environ.pop('COTERIE_CONFIG', None); {code}; {LOADED}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert ran.stdout.strip() == str(loaded)


@pytest.mark.needs("torch")
def test_numba_is_never_imported() -> None:
    code = f"import sys, coterie.vllm_plugin.session; {LOADED}"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "['numpy', 'torch']"


def fake_vllm(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    module: Any = type(sys)("vllm")
    module.__version__ = version
    monkeypatch.setitem(sys.modules, "vllm", module)


@pytest.mark.parametrize("version", ["0.31.0", "0.33.0", "1.0", "dev"])
def test_other_versions_are_refused_with_the_range(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coterie.errors import BackendUnavailable
    from coterie.vllm_plugin.plugin import register

    monkeypatch.setenv("COTERIE_CONFIG", str(write(tmp_path, "prune: {p: 0.2}")))
    fake_vllm(monkeypatch, version)
    with pytest.raises(BackendUnavailable, match=rf"vLLM {version} is installed, the plugin knows >=0.32,<0.33"):
        register()
