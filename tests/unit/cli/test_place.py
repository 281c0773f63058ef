"""`coterie compare` and `coterie place` as a user sees them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.cli.main import main
from coterie.placement.metrics import SCALARS
from coterie.placement.placement import Placement
from coterie.trace.routing_trace import RoutingTrace

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], make_trace: Any) -> Run:
    """Run `coterie ...` in a folder with t.safetensors and grouped.safetensors; exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    make_trace(tokens=400, sequences=8).save("t.safetensors")
    make_trace(tokens=400, sequences=8, groups=4).save("grouped.safetensors")

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["coterie", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        captured = capsys.readouterr()
        assert isinstance(stopped.value.code, int)
        return stopped.value.code, captured.out, captured.err.lstrip("\n")  # a bar that showed leaves a blank line

    return call


def files() -> list[str]:
    return sorted(str(path) for path in Path().rglob("*"))


def test_compare_json(run: Run) -> None:
    code, out, err = run("compare", "t.safetensors", "--topology", "2x2", "--json")
    result = json.loads(out)
    assert (code, err) == (0, "")
    assert list(result["methods"]) == ["linear", "eplb", "cap", "coterie"]
    for row in result["methods"].values():
        means = {*SCALARS, "communication"}
        assert set(row) == {*means, "traffic", "seconds", "layers", "heldout"}
        assert set(row["heldout"]) == {*means, "traffic", "layers"}
        assert {"dpt", "npt", "balance", "peak_traffic"} <= set(SCALARS)
        for part in (row, row["heldout"]):
            assert set(part["layers"]) == means
            for name in means:
                assert np.mean(part["layers"][name]) == pytest.approx(part[name], abs=1e-5)
    assert result["topology"]["num_nodes"] == 2
    about = result["trace"]
    assert (about["model"], about["layers"], about["experts"], about["top_k"]) == ("toy", 2, 16, 4)
    assert (about["fit_tokens"], about["heldout_tokens"], about["split_by"]) == (200, 200, "sequence")


def test_compare_for_people(run: Run) -> None:
    code, out, err = run("compare", "t.safetensors", "--topology", "4", "--heldout", "0.25")
    assert (code, err) == (0, "")
    rows = {line.split()[0]: line for line in out.splitlines() if line.split()}
    assert {"linear", "eplb", "cap", "coterie"} <= set(rows)
    assert "1.00x" in rows["linear"]
    assert "fitted on 300 tokens" in " ".join(out.split())


def test_compare_where_nothing_is_visited(run: Run, make_trace: Any) -> None:
    make_trace(tokens=400, kept=0.0).save("empty.safetensors")
    code, out, _ = run("compare", "empty.safetensors", "--topology", "4")
    assert code == 0
    assert "linear" in out


def test_place_writes_a_placement(run: Run) -> None:
    code, out, err = run(
        "place", "t.safetensors", "--topology", "2x2,inter=3", "--out", "p.json", "--json", "--seed", "4"
    )
    result = json.loads(out)
    assert (code, err) == (0, "")
    assert set(result) == {"out", "method", "metrics"}
    placement = Placement.load("p.json")
    assert result["out"] == "p.json"
    assert result["method"] == placement.method
    assert result["method"]["name"] == "coterie"
    assert result["method"]["seed"] == 4
    assert set(result["metrics"]) == {"fit", "heldout"}
    assert result["metrics"]["fit"]["dpt"] == placement.metrics["fit"]["dpt"]
    assert placement.topology.inter_cost == 3
    first = Path("p.json").read_bytes()
    run("place", "t.safetensors", "--topology", "2x2,inter=3", "--out", "p.json", "--seed", "4")
    assert Path("p.json").read_bytes() == first


@pytest.mark.parametrize("method", ["linear", "eplb", "cap", "cap-spectrum", "coterie"])
def test_place_by_every_method(run: Run, method: str) -> None:
    code, out, err = run("place", "t.safetensors", "--topology", "4", "--out", "p.json", "--method", method)
    assert (code, err) == (0, "")
    assert "wrote p.json" in out
    assert Placement.load("p.json").method["name"] == method


def test_place_within_a_balance_and_on_all_tokens(run: Run) -> None:
    code, out, _ = run(
        "place", "t.safetensors", "--topology", "4", "--balance", "1.5", "--heldout", "0", "--out", "p.json", "--json"
    )
    assert code == 0
    result = json.loads(out)
    assert set(result["metrics"]) == {"fit"}
    assert result["metrics"]["fit"]["balance"] <= 1.6
    assert result["method"]["balance"] == 1.5


def test_place_for_two_workloads(run: Run) -> None:
    arguments = ("place", "t.safetensors", "--also", "u.safetensors", "--topology", "4", "--out", "p.json", "--json")
    code, _, err = run(*arguments)
    assert code == 2
    assert "u.safetensors does not exist" in err
    RoutingTrace.load("t.safetensors").save("u.safetensors")
    code, out, err = run(*arguments)
    assert (code, err) == (0, "")
    assert json.loads(out)["method"]["trace"]["tokens"] == 800


def test_a_spectrum_is_a_folder_with_an_index(run: Run) -> None:
    arguments = ("place", "t.safetensors", "--topology", "4", "--out", "out")
    code, out, err = run(*arguments, "--spectrum", "5", "--json")
    result = json.loads(out)
    assert (code, err) == (0, "")
    index = json.loads(Path("out/index.json").read_text())
    assert {"out": "out", **index} == result
    assert index["kind"] == "coterie.spectrum"
    names = [entry["file"] for entry in index["placements"]]
    assert names == [f"place-{number}.json" for number in range(len(names))]
    assert 1 < len(names) <= 5
    assert sorted(path.name for path in Path("out").iterdir()) == ["index.json", *names]
    for entry in index["placements"]:
        placement = Placement.load(Path("out") / entry["file"])
        assert entry["metrics"]["heldout"]["dpt"] == placement.metrics["heldout"]["dpt"]
    balances = [entry["metrics"]["fit"]["balance"] for entry in index["placements"]]
    assert balances == sorted(balances, reverse=True)
    code, _, _ = run(*arguments, "--spectrum", "2")  # fewer than before: none of the old ones stay
    assert code == 0
    assert sorted(path.name for path in Path("out").iterdir()) == ["index.json", "place-0.json", "place-1.json"]


def test_copies(run: Run) -> None:
    code, out, err = run("place", "t.safetensors", "--topology", "4", "--redundant", "4", "--out", "p.json")
    assert (code, err) == (0, "")
    assert "dispatched by nearest" in out
    assert "a token takes the one that adds no device" in out
    assert Placement.load("p.json").num_copies == 4
    code, out, _ = run("validate", "p.json")
    assert code == 0
    assert "2 layers of 20 slots, 16 experts, 4 devices" in out
    code, out, _ = run(
        "compare", "t.safetensors", "--topology", "4", "--redundant", "4", "--dispatch", "nearest", "--json"
    )
    assert (code, json.loads(out)["redundant"], json.loads(out)["dispatch"]) == (0, 4, "nearest")
    code, out, err = run("place", "t.safetensors", "--topology", "4", "--redundant", "49", "--out", "q.json")
    assert code == 2
    assert "use 48 at most" in err
    assert not Path("q.json").exists()


def test_unequal_devices(run: Run) -> None:
    Path("m.yaml").write_text("devices_per_node: 4\nspeed_per_device: [1, 1, 1, 0.5]\n")
    code, out, err = run("place", "t.safetensors", "--topology", "m.yaml", "--out", "p.json")
    assert (code, err) == (0, "")
    assert "devices differ in speed" in out
    assert Placement.load("p.json").topology.speed_per_device == (1, 1, 1, 0.5)


def test_groups_without_freedom_are_warned_of_on_stderr(run: Run) -> None:
    code, out, err = run("place", "grouped.safetensors", "--topology", "4", "--out", "p.json", "--json")
    assert code == 0
    json.loads(out)
    assert err.startswith("warning: keeping 4 router groups whole on 4 leaves no freedom")
    code, _, err = run("place", "grouped.safetensors", "--topology", "4", "--out", "p.json", "--no-keep-groups")
    assert (code, err) == (0, "")
    assert not Placement.load("p.json").method["keep_groups"]


def test_an_importable_file_and_a_shipped_name_do_too(run: Run) -> None:
    ids = np.asarray(RoutingTrace.load("t.safetensors").expert_ids)
    np.savez("t.npz", expert_ids=ids)
    for source in ("t.npz", "t.safetensors"):
        code, _, _ = run("place", source, "--topology", "4", "--method", "eplb", "--out", f"{source}.json")
        assert code == 0
    code, out, _ = run("place", "dsv2lite-law", "--topology", "8", "--method", "linear", "--out", "law.json", "--json")
    assert code == 0
    assert json.loads(out)["method"]["trace"]["experts"] == 64


PLACE = ("place", "t.safetensors", "--topology", "4", "--out", "p.json")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("compare", "t.safetensors", "--topology", "17"), "16 experts on 17 devices leave devices empty"),
        (("compare", "t.safetensors", "--topology", "2y2"), "topology '2y2' is not understood"),
        (("compare", "t.safetensors", "--topology", "2x2,intra=3"), "unknown option 'intra'"),
        (("compare", "t.safetensors", "--topology", "four.yaml"), "four.yaml does not exist"),
        (("compare", "t.safetensors"), "topology"),
        (("compare", "missing.safetensors", "--topology", "4"), "missing.safetensors does not exist"),
        (("compare", "t.safetensors", "--topology", "4", "--heldout", "1"), "held-out share of 1"),
        (("compare", "t.safetensors", "--topology", "4", "--heldout", "nan"), "held-out share of nan"),
        (("compare", "t.safetensors", "--topology", "4", "--format", "nzp"), "did you mean 'npz'"),
        (("compare", "t.safetensors", "--topology", "4", "--keep-groups"), "toy has num_groups = 1"),
        (("compare", "broken.safetensors", "--topology", "4"), "truncated or no safetensors file"),
        ((*PLACE, "--method", "cotery"), "unknown placement method 'cotery'; did you mean 'coterie'?"),
        ((*PLACE, "--spectrum", "4", "--balance", "1.2"), "--spectrum and --balance exclude each other"),
        ((*PLACE, "--balance", "0.9"), "balance = 0.9"),
        ((*PLACE, "--balance", "inf"), "balance = inf"),
        ((*PLACE, "--balance", "nan"), "balance = nan"),
        ((*PLACE, "--balance", "1.0"), "no placement by coterie has B <= 1; the most balanced has"),
        ((*PLACE, "--balance", "much"), "--balance"),
        ((*PLACE, "--spectrum", "0"), "a spectrum of 0 points"),
        ((*PLACE, "--seed", "-1"), "--seed"),
        ((*PLACE, "--sed", "1"), "--sed"),
        (("place", "t.safetensors", "--topology", "4"), "--out"),
        (("place", "t.safetensors", "--topology", "4", "--out", "missing/p.json"), "cannot write missing/p.json"),
        (("place", "t.safetensors", "--topology", "4", "--out", "folder"), "cannot write folder: it is a folder"),
        (("place", "t.safetensors", "--topology", "4", "--spectrum", "2", "--out", "missing/out"), "missing"),
        (("place", "t.safetensors", "--topology", "4", "--spectrum", "2", "--out", "folder"), "name a new folder"),
        (("place", "t.safetensors", "--topology", "4", "--spectrum", "2", "--out", "t.safetensors"), "a new folder"),
        (("plaec", "t.safetensors"), "plaec"),
    ],
)  # fmt: skip
def test_what_a_user_can_cause_is_one_line_and_no_file(run: Run, arguments: tuple[str, ...], words: str) -> None:
    Path("folder").mkdir()
    Path("folder/mine.txt").touch()
    Path("broken.safetensors").write_bytes(Path("t.safetensors").read_bytes()[:-9])
    before = files()
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert err.startswith("coterie: error: ")
    assert err.count("\n") == 1
    assert files() == before


def test_an_interrupt_writes_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("coterie.placement.placement.Placement.to_json", interrupt)
    before = files()
    for more in ((), ("--spectrum", "2")):
        code, out, err = run(*PLACE, *more)
        assert (code, out, err) == (130, "", "coterie: error: interrupted; nothing was written\n")
        assert files() == before


def test_links_of_unequal_cost_are_paid_for(run: Run) -> None:
    Path("links.yaml").write_text("devices_per_node: 3\nlink_costs: [[0, 1, 4], [1, 0, 4], [4, 4, 0]]\n")
    code, out, _ = run("place", "t.safetensors", "--topology", "links.yaml", "--out", "p.json")
    paid = Placement.load("p.json").metrics["heldout"]["link_cost"]
    assert code == 0
    assert "cost of links, of a token and layer: 0 coterie" in out
    assert f"{paid:.3f} (heldout)" in out
    code, out, _ = run("compare", "t.safetensors", "--topology", "links.yaml")
    assert code == 0
    assert "cost of links, of a token and layer: linear " in out
