"""CAP's pipeline: its order, what is not done twice, and what a failing group says. Ranks are made up here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie import data
from coterie.errors import CheckpointError, ConfigError, CoterieError, InfeasiblePlacement, RankError
from coterie.models.run_text import TextRun
from coterie.parallel import pipeline
from coterie.parallel.pipeline import REPORT, RESULT, SPECTRUM, TRACE, CapSetting, run_cap, start_ranks
from coterie.placement.placement import Placement
from coterie.topology import Topology
from coterie.trace.routing_trace import RoutingTrace

pytestmark = pytest.mark.needs("transformers")


def option(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The verbs that were started on ranks; each writes what the real one would."""
    calls: list[list[str]] = []

    def fake(count: int, arguments: list[str]) -> str:
        assert count == 4
        calls.append(list(arguments))
        if arguments[0] == "calibrate":
            topology = Topology.parse(option(arguments, "--topology"))
            Topology.from_json(
                {**topology.to_json(), "intra_bandwidth_bytes_per_s": 1e9, "compute_pair_s": 1e-6}
            ).save(option(arguments, "--out"))  # fmt: skip
        else:
            Topology.parse(option(arguments, "--topology"))
            picked = Placement.load(Path(option(arguments, "--candidates")) / "place-0.json")
            picked.save(option(arguments, "--out"))
            Path(option(arguments, "--report")).write_text(json.dumps({"pick": "coterie-0", "seed": 0}))
        return ""

    monkeypatch.setattr(pipeline, "start_ranks", fake)
    return calls


def setting(p: float = 0.2, **changes: Any) -> CapSetting:
    run = TextRun(tokens=600, length=100, batch=2)
    return CapSetting(**{"model": "tiny-mixtral", "topology": "4", "p": p, "run": run, "points": 2, **changes})


def test_four_steps_in_order_done_once(tmp_path: Path, started: list[list[str]]) -> None:
    text = data.text("prose")
    done = run_cap(tmp_path, setting(), text, "prose")
    assert [step.name for step in done] == ["1-record", "2-place", "3-spectrum", "4-calibrate", "4-tune"]
    assert [call[0] for call in started] == ["calibrate", "tune"]
    trace = RoutingTrace.load(tmp_path / TRACE)
    assert trace.kept is not None  # pruned while it was recorded
    assert not np.asarray(trace.kept).all()
    assert trace.provenance["pruning"]["p"] == 0.2
    assert Placement.load(tmp_path / RESULT).topology.num_devices == 4
    assert all(step.reused for step in run_cap(tmp_path, setting(), text, "prose"))
    assert len(started) == 2
    (tmp_path / RESULT).unlink()
    run_cap(tmp_path, setting(), text, "prose")
    assert (tmp_path / RESULT).read_text() == (tmp_path / SPECTRUM / "place-0.json").read_text()
    again = run_cap(tmp_path, setting(points=1), text, "prose")
    assert next(step.name for step in again if not step.reused) == "3-spectrum"
    assert again[-1].output == tmp_path / REPORT


def test_copies_reach_every_step(tmp_path: Path, started: list[list[str]]) -> None:
    text = data.text("prose")
    run_cap(tmp_path, setting(redundant=4, dispatch="nearest"), text, "prose")
    assert started[-1][-4:] == ["--redundant", "4", "--dispatch", "nearest"]
    for name in ("start.json", f"{SPECTRUM}/place-0.json"):
        placed = Placement.load(tmp_path / name)
        assert (placed.num_copies, placed.method["dispatch"]) == (4, "nearest")
    again = run_cap(tmp_path, setting(), text, "prose")
    assert next(step.name for step in again if not step.reused) == "2-place"
    assert started[-1][-1] != "nearest"


def test_a_calibrated_topology_is_taken_as_it_is(tmp_path: Path, started: list[list[str]]) -> None:
    Topology(1, 4, intra_bandwidth_bytes_per_s=1e9, compute_pair_s=1e-6).save(tmp_path / "t.yaml")
    folder = tmp_path / "out"
    run_cap(folder, setting(p=0.0, topology=str(tmp_path / "t.yaml")), data.text("prose"), "prose")
    assert [call[0] for call in started] == ["tune"]
    assert RoutingTrace.load(folder / TRACE).kept is None  # p = 0 prunes nothing


def test_p_is_checked_before_anything_runs(tmp_path: Path, started: list[list[str]]) -> None:
    with pytest.raises(ConfigError, match="p = 1 is not within 0 and 1"):
        run_cap(tmp_path / "out", setting(p=1.0), "text", "text")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"redundant": 1000}, ConfigError, "use 24 at most"),
        ({"redundant": 2, "dispatch": "nearst"}, ConfigError, "did you mean 'nearest'"),
        ({"dispatch": "nearst"}, ConfigError, "did you mean 'nearest'"),
        ({"redundant": 2, "method": "cap-spectrum"}, ConfigError, "cap-spectrum places every expert once"),
        ({"method": "coteri"}, ConfigError, "did you mean 'coterie'"),
        ({"topology": "64"}, InfeasiblePlacement, "8 experts on 64 devices"),
        ({"model": "none"}, CheckpointError, "no model 'none'"),
    ],
)
def test_what_cannot_be_placed_is_refused_before_anything_runs(
    changes: dict[str, Any], error: type[CoterieError], words: str, tmp_path: Path, started: list[list[str]]
) -> None:
    with pytest.raises(error, match=words):
        run_cap(tmp_path / "out", setting(**changes), data.text("prose"), "prose")
    assert not (tmp_path / "out").exists()
    assert not started


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--dispatch", "nearst"], "did you mean 'nearest'"),
        (["--redundant", "2", "--method", "cap-spectrum"], "cap-spectrum places every expert once"),
    ],
)
def test_tune_checks_the_rule_and_the_method_before_it_places(tmp_path: Path, options: list[str], words: str) -> None:
    out = tmp_path / "p.json"
    told = ["--trace", str(tmp_path / "none.safetensors"), "--model", "tiny-mixtral", "--topology", "2"]
    with pytest.raises(RankError, match=f"tune on 1 processes failed: .*{words}"):
        start_ranks(1, ["tune", *told, "--out", str(out), *options])
    assert not out.exists()


def test_ranks_that_fail_say_why(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"calibrate on 1 processes failed: .*t\.txt: a topology is a YAML file"):
        start_ranks(1, ["calibrate", "--out", str(tmp_path / "t.txt")])
