"""Whether a placement made for one workload serves another: fitted on the column, measured on the row.

Source: CAP §VIII-F, Tables III and IV.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from coterie.errors import ConfigError
from coterie.placement.candidates import Setting
from coterie.placement.methods import get_method
from coterie.placement.mixture import prepare_mixture
from coterie.placement.numbering import EXPERT_ORDER_KEY, require_same_numbering
from coterie.pruning.routed import linear_devices
from coterie.study.placement.common import MEASURES, axis_label, fit, head, means, notes
from coterie.trace.mixture import require_same_model
from coterie.trace.routing_trace import ALL_TOKENS, RoutingTrace
from coterie.trace.splits import split

if TYPE_CHECKING:
    from coterie.report.page import Page

METHODS = ("eplb", "cap", "coterie")
MIXTURE = "mixture"
LINEAR = "linear"


def run(
    setting: Setting, traces: Mapping[str, RoutingTrace], *, heldout: float = 0.5, methods: Sequence[str] = METHODS
) -> dict[str, Any]:
    """Every method fitted on the earlier sequences of every trace and of all together, measured on the later ones.

    Args:
        setting: topology, objective and seed; its trace is not looked at.
        traces: by name, of one model, at least two.
        heldout: share of the tokens of each, the latest sequences, that only measure.
        methods: names of placement methods.

    Raises:
        ConfigError: for fewer than two traces, one that is called "mixture", or different numberings of experts.
        TraceError: when the traces are of different models.
    """
    for method in methods:
        get_method(method)  # refuses before the long work
    names, held = list(traces), list(traces.values())
    if len(held) < 2:
        raise ConfigError(f"{len(held)} trace given; a transfer study needs at least two, of one model")
    if MIXTURE in traces:
        raise ConfigError(f"a trace is called {MIXTURE!r}, which is the name of all of them together; rename it")
    for name, trace in traces.items():
        require_same_model(held[0], trace)
        require_same_numbering(
            trace.provenance.get(EXPERT_ORDER_KEY), f"trace {name}", held[0].provenance.get(EXPERT_ORDER_KEY), names[0]
        )
    parts = {name: split(trace, heldout) for name, trace in traces.items()}
    mixed = prepare_mixture(held, setting.topology, [part.first for part in parts.values()], seed=setting.seed)
    sources = [(name, replace(setting, trace=traces[name]), parts[name].first) for name in names]
    sources.append((MIXTURE, replace(setting, trace=mixed.trace, domain_T=mixed.domain_T), ALL_TOKENS))
    linear = linear_devices(held[0].spec, setting.topology)
    measured = {
        LINEAR: {name: means(traces[name], linear, setting.topology, parts[name].second) for name in names}
    }  # fmt: skip
    found: dict[str, Any] = {}
    for method in methods:
        found[method] = {target: {} for target in names}
        for number, (source, where, tokens) in enumerate(sources):
            device_LE = fit(where, method, tokens)
            for target in names:
                found[method][target][source] = means(
                    traces[target], device_LE, setting.topology, parts[target].second
                )  # fmt: skip
            setting.progress(f"transfer ({method})", number + 1, len(sources))
    counts = {name: {"fit_tokens": part.num_first, "heldout_tokens": part.num_second} for name, part in parts.items()}
    return {
        **head("transfer", traces, setting, {"heldout": heldout, "methods": list(methods)}),
        "tokens": {**counts, MIXTURE: {"fit_tokens": mixed.trace.num_tokens}},
        "linear": measured[LINEAR],
        "methods": found,
        "claims": {method: claims(found, measured[LINEAR], method) for method in methods if method != "eplb"},
    }


def claims(found: Mapping[str, Any], linear: Mapping[str, Any], method: str) -> dict[str, Any]:
    """Peak traffic of a method's placements where they were not made, over what else one could use there.

    `worst_pair` has, over all pairs of different traces, the largest ratio to linear, to EPLB from the same source
    (what one has without knowing the target) and to EPLB fitted on the target itself; `mixture_over_matched` the
    mixture's peak over that of the placement fitted on the target's own earlier part.
    """
    worst: dict[str, dict[str, Any]] = {}
    for target, row in found[method].items():
        for source in set(row) - {target, MIXTURE}:
            rivals = {"linear": linear[target]}
            if "eplb" in found:
                rivals |= {"eplb": found["eplb"][target][source], "eplb_of_target": found["eplb"][target][target]}
            for rival, values in rivals.items():
                ratio = _ratio(row[source], values)
                if ratio > worst.get(rival, {"ratio": -1.0})["ratio"]:
                    worst[rival] = {"ratio": ratio, "fitted_on": source, "measured_on": target}
    known = [each["ratio"] for rival, each in worst.items() if rival != "eplb_of_target"]
    return {
        "worst_pair": worst,
        "below_linear_and_eplb_in_every_pair": max(known) < 1,
        "mixture_over_matched": {target: _ratio(row[MIXTURE], row[target]) for target, row in found[method].items()},
    }  # fmt: skip


def _ratio(mine: Mapping[str, float], other: Mapping[str, float]) -> float:
    return mine["peak_traffic"] / other["peak_traffic"] if other["peak_traffic"] else 1.0


def columns(result: Mapping[str, Any]) -> list[str]:
    """What stands above a table of `rows`."""
    return ["measured on", *result["traces"], MIXTURE, *(["EPLB, own"] if "eplb" in result["methods"] else []), LINEAR]


def rows(result: Mapping[str, Any], method: str, measure: str) -> list[list[object]]:
    """A table of one metric: a line for each target, a column for each source; then EPLB fitted there, and linear."""
    lines = []
    for target, row in result["methods"][method].items():
        own = [result["methods"]["eplb"][target][target][measure]] if "eplb" in result["methods"] else []
        fitted = [row[source][measure] for source in (*result["traces"], MIXTURE)]
        lines.append([target, *fitted, *own, result["linear"][target][measure]])
    return lines


def show(page: Page, result: dict[str, Any]) -> None:
    """The sections of the page."""
    from coterie.report.page import graph_objects

    page.section(
        "Transfer between workloads (CAP Tables III and IV)",
        "The paper (Qwen3-30B-A3B; HumanEval, LMSYS-Chat, Arxiv): groupings from one workload have 4.25 to 4.49 "
        "devices per token on the others, 4.14 to 4.34 on their own, the default placement 5.33 to 5.35; load "
        "imbalance is 1.50 to 1.92 on the others, of the default 1.33 to 1.60.",
        "Rows: where it is measured, on later sequences. Columns: whose earlier sequences it was fitted on; the "
        "mixture is all of them, interleaved, and so has more tokens. Fitted on it, the search averages the busiest "
        "device over the workloads, so that none is traded for another. EPLB, own: fitted on the row's own trace.",
    )
    graph, names = graph_objects(), list(result["traces"])
    for method in result["methods"]:
        page.section(f"Fitted by {method}", *_verdict(result["claims"].get(method)))
        for measure in ("dpt", "balance", "peak_traffic"):
            page.paragraph(f"{MEASURES[measure]}:")
            page.table(columns(result), rows(result, method, measure))
    figure = graph.Figure()
    for method, table in result["methods"].items():
        for source in (*names, MIXTURE):
            values = [table[target][source]["peak_traffic"] for target in names]
            figure.add_bar(x=names, y=values, name=f"{method}, from {source}")
    figure.add_bar(x=names, y=[result["linear"][name]["peak_traffic"] for name in names], name=LINEAR)
    figure.update_layout(barmode="group", xaxis_title="measured on", yaxis_title=axis_label("peak_traffic"))
    page.section("Peak traffic, side by side")
    page.figure(figure)


def _verdict(found: dict[str, Any] | None) -> list[str]:
    return [] if found is None else [verdict(found)]


def verdict(found: dict[str, Any]) -> str:
    """`claims` in words."""
    names = {"linear": "linear's", "eplb": "EPLB's of the same source", "eplb_of_target": "EPLB's of the target itself"}
    pairs = ", ".join(
        f"{each['ratio']:.3f}x {names[rival]} ({each['fitted_on']} on {each['measured_on']})"
        for rival, each in found["worst_pair"].items()
    )
    mixture = ", ".join(f"{target} {ratio:.3f}x" for target, ratio in found["mixture_over_matched"].items())
    return f"peak traffic on another workload, at the worst: {pairs}; of the mixture over the matched one: {mixture}"


def remarks(result: dict[str, Any]) -> list[str]:
    """What holds for the whole page."""
    counted = ", ".join(f"{name} {each['fit_tokens']:,}" for name, each in result["tokens"].items())
    return notes(result, f"Tokens fitted on: {counted}.")
