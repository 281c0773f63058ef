"""One page for a trace and its placements: what it counts, how large it is, and that a browser can read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.headless import ALL_FIGURES, find_browser, headless

from coterie.errors import ConfigError, InfeasiblePlacement
from coterie.placement.driver import place, prepare
from coterie.placement.metrics import average, measure
from coterie.report import placement_figures as figures
from coterie.report.placement_data import PlacementReport, Shown, gather
from coterie.report.placement_page import placement_page
from coterie.topology import Topology
from coterie.trace.splits import split

FOUR = Topology.parse("4")
_SEEN = """(() => {
  const all = what => [...document.querySelectorAll(what)];
  const boxes = all('.figure').map(e => e.getBoundingClientRect());
  return {
    width: window.innerWidth,
    wanted: boxes.length,
    drawn: all('.figure .plot-container').length,
    over: document.documentElement.scrollWidth - window.innerWidth,
    outside: boxes.filter(b => b.left < 0 || b.right > window.innerWidth).length,
    narrowest: Math.min(...all('.main-svg').map(e => e.clientWidth)),
    font: Math.min(...all('p, td, th, .xtick text, .ytick text').map(e => parseFloat(getComputedStyle(e).fontSize))),
  };
})()"""


@pytest.fixture
def found(make_trace: Any) -> PlacementReport:
    """A small trace with a placement of its own."""
    setting = prepare(make_trace(layers=3, tokens=800), FOUR)
    return gather(setting, {"mine": place(setting, "cap", heldout=0.2)}, quick=True)


def test_everything_is_measured_on_what_nothing_was_fitted_on(found: PlacementReport) -> None:
    assert list(found.placements) == ["linear", "eplb", "cap", "mine"]
    assert found.main == "mine"
    trace, later = found.setting.trace, split(found.setting.trace, 0.2).second
    for shown in found.placements.values():
        assert shown.means() == average(measure(trace, shown.devices, FOUR, later))
    assert found.load_LE.sum() == 3 * found.parts.num_second * trace.spec.top_k
    assert found.device_load("linear").mean() == pytest.approx(1)
    assert found.device_load("linear").max(axis=1).mean() == pytest.approx(
        found.placements["linear"].means()["balance"]
    )
    assert set(found.spectra) == {"cap-spectrum"}
    assert not any(shown.seen for shown in found.placements.values())


@pytest.mark.needs("plotly")
def test_a_placement_that_has_seen_the_measured_tokens_is_marked(make_trace: Any) -> None:
    setting = prepare(make_trace(tokens=800), FOUR)
    report = gather(setting, {"all": place(setting, "cap", heldout=0)}, quick=True)
    assert report.placements["all"].seen
    assert "(*)" in placement_page(report, "toy").html()
    other = prepare(make_trace(tokens=800, seed=1), FOUR)
    assert not gather(other, {"all": place(setting, "cap", heldout=0)}, quick=True).placements["all"].seen


def test_coteries_own_search_is_there_unless_it_is_to_be_quick(make_trace: Any) -> None:
    report = gather(prepare(make_trace(tokens=400), FOUR), {})
    assert report.main == "coterie"
    assert set(report.spectra) == {"cap-spectrum", "coterie"}


def test_what_does_not_belong_on_it_is_refused(make_trace: Any) -> None:
    setting = prepare(make_trace(tokens=400), FOUR)
    fits = place(setting, "cap")
    with pytest.raises(ConfigError, match="rename its file"):
        gather(setting, {"eplb": fits}, quick=True)
    with pytest.raises(ConfigError, match="the topology is 8"):
        gather(prepare(make_trace(tokens=400), Topology.parse("8")), {"mine": fits}, quick=True)
    with pytest.raises(InfeasiblePlacement, match="use a placement made from this model"):
        gather(prepare(make_trace(layers=3), FOUR), {"mine": fits}, quick=True)
    copied = place(prepare(setting.trace, FOUR, redundant=4), "eplb")
    for asked in (0, 8):
        with pytest.raises(InfeasiblePlacement, match=f"4 copies of experts a layer, the methods beside it {asked}"):
            gather(prepare(setting.trace, FOUR, redundant=asked), {"mine": copied}, quick=True)
    uneven = place(prepare(setting.trace, Topology(1, 4, slots_per_device=(5, 4, 4, 3))), "eplb")
    with pytest.raises(InfeasiblePlacement, match="leave --topology out"):
        gather(setting, {"mine": uneven}, quick=True)


@pytest.mark.needs("plotly")
def test_copies_are_measured_under_one_rule_and_beside_it_the_others(make_trace: Any) -> None:
    setting = prepare(make_trace(layers=3, tokens=800), FOUR, redundant=4, dispatch="nearest")
    mine, plain = place(setting, "eplb", heldout=0.2), place(prepare(setting.trace, FOUR), "cap", heldout=0.2)
    report = gather(setting, {"mine": mine, "plain": plain}, quick=True)
    assert report.placements["eplb"].means() == report.placements["mine"].means()
    later = split(setting.trace, 0.2).second
    for name, shown in report.placements.items():
        rule = {} if name == "plain" else {"random", "nearest", "fewest-devices"}
        assert set(shown.by_rule) == set(rule)
        for each, means in shown.by_rule.items():
            assert means == average(measure(setting.trace, mine.hosts() if name == "mine" else shown.devices, FOUR,
                                            later, each))  # fmt: skip
        assert report.device_load(name).mean() == pytest.approx(1)
        assert report.device_load(name).max(axis=1).mean() == pytest.approx(shown.means()["balance"])
    expert_P, device_P = report.placements["mine"].slots(1)
    assert expert_P.tolist() == mine.physical_to_logical_map[1].tolist()
    assert device_P.tolist() == mine.device_of_slot().tolist()
    assert report.spectra == {}
    html = placement_page(report, "toy").html()
    assert "under the rule nearest" in html
    assert "20 (+25.0%)" in html
    assert len(figures.coactivation(report, by_device=True).data[0].z) == 20


@pytest.mark.needs("plotly")
def test_company_is_ordered_by_device(found: PlacementReport) -> None:
    device_E = found.placements["mine"].devices[0]
    order_E = np.argsort(device_E, kind="stable")
    before, after = (figures.coactivation(found, by_device).data[0].z for by_device in (False, True))
    assert np.array_equal(np.asarray(after), np.asarray(before)[np.ix_(order_E, order_E)])
    same = device_E[order_E][:, None] == device_E[order_E][None, :]
    off = ~np.eye(len(same), dtype=bool)
    assert np.asarray(after)[same & off].mean() > np.asarray(after)[~same].mean()  # company sits on one device


@pytest.mark.needs("plotly")
def test_the_page_of_a_large_model_stays_small(make_trace: Any, tmp_path: Path) -> None:
    topology = Topology.parse("4x8")
    setting = prepare(make_trace(layers=61, tokens=250, experts=256, top_k=8), topology)
    rng = np.random.default_rng(0)
    parts = split(setting.trace, 0.2)
    slots = np.repeat(np.arange(32), 8)
    placements = {}
    for name in ("linear", "eplb", "cap", "coterie", "mine"):
        device_LE = np.stack([slots if name == "linear" else rng.permutation(slots) for _ in range(61)])
        placements[name] = Shown(device_LE, measure(setting.trace, device_LE, topology, parts.second))
    load_LE = rng.integers(1, 100, (61, 256))
    rows = [placements["mine"].means()] * 16
    report = PlacementReport(
        setting, parts, placements, "mine", {"coterie": [(1.0, 2.0)] * 12}, load_LE, list(range(16)),
        {"linear": rows, "mine": rows},
    )  # fmt: skip
    page = tmp_path / "page.html"
    placement_page(report, "large").save(page)
    assert page.stat().st_size < 6_000_000
    assert len(figures.chosen_layers(61, 256)) >= 3


@pytest.mark.needs("plotly")
@pytest.mark.needs("chromium")
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_draws_every_figure_and_nothing_runs_over_the_edge(
    found: PlacementReport, tmp_path: Path, width: int
) -> None:
    page = tmp_path / "page.html"
    placement_page(found, "toy").save(page)
    browser = find_browser()
    assert browser is not None
    with headless(browser) as running:
        opened = running.open(page, width, phone=width < 500, drawn=ALL_FIGURES)
        seen = opened.evaluate(_SEEN)
    print(f"{width} px: to be read after {opened.shown_ms:.0f} ms, drawn after {opened.drawn_ms:.0f} ms")
    assert opened.errors == []
    assert seen["width"] == width
    assert seen["drawn"] == seen["wanted"] == 11
    assert seen["over"] <= 0  # only tables scroll sideways, each in its own box
    assert seen["outside"] == 0
    assert seen["narrowest"] > (0.8 * width if width < 500 else 600)
    assert seen["font"] >= 10
