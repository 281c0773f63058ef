"""A trace and where its experts may live, on one page that needs nothing else."""

from __future__ import annotations

from importlib.metadata import version

import numpy as np

import coterie
from coterie.placement.driver import describe_trace
from coterie.profile.combinations import natural_pairs
from coterie.report import placement_figures as figures
from coterie.report.page import Page
from coterie.report.placement_data import PlacementReport

_RULE_WORDS = {
    "fewest-devices": "fewest-devices: the copy that adds no device, else no node, else the one whose device has the "
    "least to do so far",
    "nearest": "nearest: the copy whose link costs least, equally near ones in turns by home (SGLang's static)",
    "random": "random: any copy (SGLang's dynamic)",
}
_COLUMNS = ("dpt", "npt", "balance", "peak_traffic", "remote_peak_traffic")


def placement_page(report: PlacementReport, name: str) -> Page:
    """The page: costs, co-activation, loads, the spectrum, traffic, stability and skew.

    Source: CAP Figs. 3, 6, 13 and 15; CRISP Fig. 3 for the skew.

    Args:
        report: what was counted.
        name: what to call the trace.
    """
    page = Page(f"Routing of {name} and its placements", _notes(report, name))
    _costs(page, report)
    _company(page, report)
    _loads(page, report)
    page.section(
        "The spectrum from least traffic to best balance (CAP Figs. 6 and 13)",
        "Left is less communication, down is better balance; no placement has the least of both. Which point is "
        "fastest depends on the machine: coterie tune times them there.",
    )
    page.figure(figures.spectrum(report))
    page.section(
        "Traffic from device to device",
        "Copies per token and layer from the device where a token lives to those it visits. A token lives where the "
        "trace says, else its sequence's number decides.",
    )
    silent = np.flatnonzero(next(iter(report.placements.values())).traffic_GG().sum(axis=1) == 0)
    if silent.size:
        page.paragraph(
            f"No token measured here lives on device {', '.join(map(str, silent))}; a longer trace, or one that says "
            "where tokens lived, fills these rows."
        )
    page.figure(figures.traffic(report), top=figures.MENU_MARGIN, square=True)
    _stability(page, report)
    page.section(
        "Skew of combinations (CRISP Fig. 3)",
        f"How much of the use the most used {natural_pairs(report.setting.trace)} hold, a line for each layer; the "
        "further from the dotted line, the more there is to gain from knowing the company.",
    )
    page.figure(figures.skew(report))
    return page


def _notes(report: PlacementReport, name: str) -> list[str]:
    about, parts = describe_trace(report.setting.trace), report.parts
    synthetic = "SYNTHETIC routing, " if about["synthetic"] else ""
    made = f"coterie {coterie.__version__}, numpy {version('numpy')}, plotly {version('plotly')}"
    return [
        f"{name}: {synthetic}{about['model']}, {about['layers']} MoE layers of {about['experts']} experts, top-"
        f"{about['top_k']}, {about['tokens']:,} tokens in {about['sequences']:,} sequences (fingerprint "
        f"{about['fingerprint']}). Devices: {report.setting.topology}.",
        f"Fitted on the first {parts.num_first:,} tokens, by whole {parts.by}; costs, loads, spectrum and traffic are "
        f"of the {parts.num_second:,} later ones, means over layers. Counts on recorded routing: no time is measured.",
        f"Seed {report.setting.seed}; made with {made}.",
    ]


def _costs(page: Page, report: PlacementReport) -> None:
    page.section(
        "What the placements cost",
        "Devices and nodes: distinct ones a token visits. B: the largest device load over the mean. Peak: the share of "
        "the tokens that visit the busiest device; remote: from other devices. Lower is better.",
    )
    if report.setting.topology.speed_per_device is not None:
        page.paragraph(
            "Devices differ in speed: B is the longest time that one computes over the time in perfect balance, and "
            "loads are such times too."
        )
    base, rows = report.placements["linear"].means(), []
    for name, shown in report.placements.items():
        means = shown.means()
        ratios = [f"{means[key] / base[key]:.2f}x" if base[key] else "-" for key in ("dpt", "peak_traffic")]
        rows.append([name + (" (*)" if shown.seen else ""), *(means[key] for key in _COLUMNS), *ratios])
    headers = ["placement", "devices", "nodes", "B", "peak", "remote peak", "devices vs linear", "peak vs linear"]
    page.table(headers, rows)
    if any(shown.seen for shown in report.placements.values()):
        page.paragraph("(*) made from this trace with less held out: it has seen tokens that it is measured on.")
    _copies(page, report)


def _copies(page: Page, report: PlacementReport) -> None:
    """What copies cost in memory, and what each dispatch rule leaves of them."""
    experts = report.setting.trace.spec.num_experts
    copied = {name: shown for name, shown in report.placements.items() if shown.by_rule}
    if not copied:
        return
    page.section(
        "Copies of experts",
        f"All figures of this page are under the rule {report.setting.dispatch}; the others are what is left of the "
        "same placement where an engine chooses copies that way. Memory: slots over experts, of expert weights alone.",
        *(f"{words}." for words in _RULE_WORDS.values()),
    )
    rows: list[list[object]] = []
    for name, shown in copied.items():
        most = int(shown.devices.sum(axis=1).max())
        about = [f"{shown.num_slots} ({shown.num_slots / experts - 1:+.1%})", most]
        rows += [
            [name, rule, *(means[key] for key in ("dpt", "balance", "peak_traffic")), *about]
            for rule, means in shown.by_rule.items()
        ]
    page.table(["placement", "rule", "devices", "B", "peak", "slots a layer", "most on a device"], rows)


def _company(page: Page, report: PlacementReport) -> None:
    spec = report.setting.trace.spec
    shown = figures.chosen_layers(spec.num_layers, report.placements[report.main].num_slots)
    some = "" if len(shown) == spec.num_layers else f" {len(shown)} of {spec.num_layers} layers, evenly spaced."
    page.section(
        "Who is chosen together (CAP Fig. 3)",
        "Tokens that choose both of two experts, over those that choose either, on the whole trace; white lines part "
        f"the devices. First in the order of ids, as engines place them.{some}",
    )
    page.figure(figures.coactivation(report, by_device=False), top=figures.MENU_MARGIN, square=True)
    page.paragraph(
        f"The same with experts ordered by their device in {report.main}. Company inside the squares on the "
        "diagonal travels nowhere."
    )
    page.figure(figures.coactivation(report, by_device=True), top=figures.MENU_MARGIN, square=True)


def _loads(page: Page, report: PlacementReport) -> None:
    page.section("Load per expert", "Token-expert pairs of each expert over its layer's mean.")
    page.figure(figures.expert_loads(report))
    page.section(
        "Load per device, before and after",
        "The busiest device decides when a layer's experts are done; an even load would be 1 throughout. linear is "
        "before.",
    )
    page.figure(figures.device_loads(report))
    page.figure(figures.load_maps(report), top=figures.MENU_MARGIN)


def _stability(page: Page, report: PlacementReport) -> None:
    page.section(
        "Stability (CAP Fig. 15)",
        f"The same placements in {len(report.windows)} windows of consecutive tokens of the whole trace, those fitted "
        "on included; coterie study stability fits on windows instead.",
    )
    for name, label in (("dpt", "devices per token"), ("balance", "B"), ("peak_traffic", "peak traffic")):
        page.figure(figures.over_time(report, name, label))
