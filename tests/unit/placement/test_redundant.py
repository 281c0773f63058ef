"""`--redundant`: from a trace to a placement with copies, to engines' files and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.engines.base import export_file
from coterie.engines.registry import EXPORTERS
from coterie.engines.validate import validate
from coterie.errors import ConfigError, InfeasiblePlacement
from coterie.placement.driver import compare, place, prepare, spectrum
from coterie.placement.placement import Placement
from coterie.spec import MoESpec
from coterie.topology import Topology
from coterie.trace.routing_trace import RoutingTrace

SPEC = MoESpec("toy", 2, 4, 2, num_model_layers=3, layer_ids=(1, 2))
TWO = Topology.parse("2")
MAP = np.array([[0, 1, 2, 3, 0, 1], [2, 1, 0, 3, 2, 0]])


@pytest.fixture(scope="module")
def trace(make_trace: Any) -> RoutingTrace:
    made: RoutingTrace = make_trace(tokens=1200, experts=24, sequences=24)
    return made


def test_a_placement_with_copies_comes_back_from_its_file(tmp_path: Path) -> None:
    placement = Placement(MAP, TWO, SPEC)
    assert placement.num_copies == 2
    assert placement.slots_per_device.tolist() == [3, 3]
    hosts = placement.hosts()
    assert hosts[0].tolist() == [[True, True], [True, True], [True, False], [False, True]]
    placement.save(tmp_path / "p.json")
    again = Placement.load(tmp_path / "p.json")
    np.testing.assert_array_equal(again.physical_to_logical_map, MAP)
    np.testing.assert_array_equal(Placement.from_hosts(hosts, TWO, SPEC).hosts(), hosts)


def test_without_copies_hosts_are_the_devices() -> None:
    placement = Placement(MAP[:, :4], TWO, SPEC)
    np.testing.assert_array_equal(placement.hosts().argmax(axis=2), placement.device_of_expert())


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ([0, 1, 0, 3, 2, 1], "layer 1 holds expert 0 more than once on device 0"),
        ([0, 1, 2, 0, 1, 2], "layer 1 holds expert 3 nowhere"),
        ([0, 1, 4, 3, 2, 1], "layer 1 holds expert 4; experts run from 0 to 3"),
    ],
)
def test_copies_that_cannot_be_are_refused(row: list[int], words: str) -> None:
    with pytest.raises(InfeasiblePlacement, match=words):
        Placement(np.array([MAP[0], row]), TWO, SPEC)


def test_what_takes_one_device_an_expert_says_so() -> None:
    with pytest.raises(InfeasiblePlacement, match="6 slots for 4 experts, so some have copies"):
        Placement(MAP, TWO, SPEC).device_of_expert()


@pytest.mark.parametrize("name", EXPORTERS)
def test_engines_files_carry_copies(tmp_path: Path, name: str) -> None:
    path = tmp_path / "out.json"
    exported = export_file(EXPORTERS[name], Placement(MAP, TWO, SPEC), path)  # reads it back and compares
    report = validate(path, SPEC, TWO)
    assert (report.format, report.problems, report.num_slots) == (name, (), 6)
    assert "6 slots for 4 experts: 2 hold a second copy" in report.notes
    rule = {"sglang": "nearest", "vllm-ascend": "random", "tensorrt-llm": "random"}.get(name)
    said = [note for note in exported.notes if "place with --dispatch" in note]
    assert [note.rpartition(" ")[2] for note in said] == ([rule] if rule else [])  # no engine reads the plain map
    if name == "sglang":
        assert exported.flags[:2] == ("--ep-num-redundant-experts", "2")


@pytest.mark.parametrize(("rule", "algorithm"), [("nearest", "static"), ("random", "dynamic")])
def test_sglang_is_told_the_rule_that_copies_were_placed_for(tmp_path: Path, rule: str, algorithm: str) -> None:
    placement = Placement(MAP, TWO, SPEC, {"dispatch": rule})
    exported = export_file(EXPORTERS["sglang"], placement, tmp_path / "out.json")
    assert exported.flags[-2:] == ("--ep-dispatch-algorithm", algorithm)
    assert not any("--dispatch" in note for note in exported.notes)


def test_engines_that_want_even_ranks_refuse_uneven_copies(tmp_path: Path) -> None:
    uneven = Placement(np.array([[0, 1, 2, 3, 0], [2, 1, 3, 0, 2]]), TWO, SPEC)
    for name, exporter in EXPORTERS.items():
        if exporter.even_ranks:
            with pytest.raises(InfeasiblePlacement, match="this placement gives 2 to 3"):
                export_file(exporter, uneven, tmp_path / f"{name}.json")
        else:
            export_file(exporter, uneven, tmp_path / f"{name}.json")
            assert validate(tmp_path / f"{name}.json", SPEC, TWO).valid


@pytest.mark.parametrize("method", ["linear", "eplb", "cap", "coterie"])
def test_placing_with_copies(trace: RoutingTrace, method: str) -> None:
    placement = place(prepare(trace, TWO, redundant=4), method)
    assert placement.num_copies == 4
    assert placement.method["redundant"] == 4
    for part in ("fit", "heldout"):
        assert placement.metrics[part]["dispatch"] == "fewest-devices"
        assert set(placement.metrics[part]["by_rule"]) == {"nearest", "random"}
        assert placement.metrics[part]["dpt"] <= placement.metrics[part]["by_rule"]["random"]["dpt"]
    again = place(prepare(trace, TWO, redundant=4), method)
    np.testing.assert_array_equal(placement.physical_to_logical_map, again.physical_to_logical_map)


def test_copies_lower_what_is_visited(make_trace: Any) -> None:
    four, trace = Topology.parse("4"), make_trace(tokens=6000, experts=32, top_k=6, sequences=60)
    rows = compare(prepare(trace, four, redundant=8))["methods"]
    plain = compare(prepare(trace, four))["methods"]
    assert rows["coterie"]["heldout"]["peak_traffic"] < 0.95 * plain["coterie"]["heldout"]["peak_traffic"]
    assert rows["coterie"]["heldout"]["peak_traffic"] < 0.95 * rows["eplb"]["heldout"]["peak_traffic"]


@pytest.mark.parametrize("rule", ["nearest", "random"])
def test_placing_for_a_rule_of_engines(make_trace: Any, rule: str) -> None:
    """Fitted for the rule that is measured, copies do better by it than fitted for another."""
    four, trace = Topology.parse("4"), make_trace(tokens=6000, experts=32, top_k=6, sequences=60)
    for_it = place(prepare(trace, four, redundant=8, dispatch=rule))
    for_other = place(prepare(trace, four, redundant=8))
    assert for_it.method["dispatch"] == for_it.metrics["heldout"]["dispatch"] == rule
    assert set(for_it.metrics["heldout"]["by_rule"]) == {"fewest-devices", "nearest", "random"} - {rule}
    other = for_other.metrics["heldout"]["by_rule"][rule]
    assert for_it.metrics["heldout"]["dpt"] < 0.97 * other["dpt"]
    with pytest.raises(ConfigError, match="did you mean 'nearest'"):
        prepare(trace, four, redundant=8, dispatch="nearst")


def test_a_spectrum_and_a_balance_with_copies(trace: RoutingTrace) -> None:
    setting = prepare(trace, TWO, redundant=2)
    points = spectrum(setting, 3)
    balances = [point.metrics["fit"]["balance"] for point in points]
    assert balances == sorted(balances, reverse=True)
    assert all(point.num_copies == 2 for point in points)
    assert place(setting, balance=1.2).metrics["fit"]["balance"] <= 1.2


def test_copies_that_do_not_fit_are_refused(trace: RoutingTrace, make_trace: Any) -> None:
    with pytest.raises(ConfigError, match="a device holds each of 24 experts once at most: use 24 at most"):
        prepare(trace, TWO, redundant=26)
    with pytest.raises(ConfigError, match="slots for copies are at least 0"):
        prepare(trace, TWO, redundant=-1)
    grouped = make_trace(groups=4)
    with pytest.raises(ConfigError, match="--keep-groups and --redundant exclude each other"):
        prepare(grouped, TWO, redundant=2, keep_groups=True)
    assert not prepare(grouped, TWO, redundant=2).keep_groups
    with pytest.raises(InfeasiblePlacement, match="the topology has 24 slots for 26 experts"):
        prepare(trace, Topology(1, 2, slots_per_device=(12, 12)), redundant=2)
