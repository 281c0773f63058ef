"""How many tokens a placement takes until more of them change little.

Source: CAP §VIII-G, where groupings are stable after about 8,000 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from coterie.placement.candidates import Setting
from coterie.placement.methods import get_method
from coterie.pruning.routed import linear_devices
from coterie.study.placement.common import MEASURES, axis_label, fit, head, means, notes
from coterie.trace.splits import split

if TYPE_CHECKING:
    from coterie.report.page import Page

METHODS = ("cap", "coterie")
FEWEST = 250
NEAR = 0.02
_JUDGED = ("dpt", "peak_traffic")


def run(setting: Setting, name: str, *, heldout: float = 0.5, methods: Sequence[str] = METHODS) -> dict[str, Any]:
    """Placements from more and more of the earlier tokens, measured on the same later ones; ready for JSON.

    `stable_from` is the least number of tokens from which on devices per token and peak traffic stay within 2% of those
    that all the earlier tokens give; the last number means that it is not known to have settled.

    Args:
        setting: trace, topology, objective, seed.
        name: what to call the trace.
        heldout: share of the tokens, the latest sequences, that only measure.
        methods: names of placement methods.

    Raises:
        ConfigError: for an unknown method.
    """
    for method in methods:
        get_method(method)  # refuses before the long work
    trace, parts = setting.trace, split(setting.trace, heldout)
    earlier = np.arange(trace.num_tokens, dtype=np.int64)[parts.first]
    counts = sorted({*doublings(earlier.size), earlier.size})
    found: dict[str, Any] = {}
    for method in methods:
        rows = []
        for number, count in enumerate(counts):
            device_LE = fit(setting, method, earlier[:count])
            rows.append({"tokens": count, **means(trace, device_LE, setting.topology, parts.second)})
            setting.progress(f"tokens ({method})", number + 1, len(counts))
        found[method] = {"points": rows, "stable_from": stable_from(rows)}
    linear = means(trace, linear_devices(trace.spec, setting.topology), setting.topology, parts.second)
    configuration = {"heldout": heldout, "methods": list(methods), "heldout_tokens": parts.num_second, "near": NEAR}
    return {**head("tokens", {name: trace}, setting, configuration), "linear": linear, "methods": found}


def doublings(most: int) -> list[int]:
    """250, 500, 1,000, ... below `most`."""
    counts = []
    count = FEWEST
    while count < most:
        counts.append(count)
        count *= 2
    return counts


def stable_from(rows: Sequence[dict[str, Any]]) -> int:
    """The least count from which on every row is near the last one; see `run`."""
    last = rows[-1]
    stable = int(last["tokens"])
    for row in reversed(rows):
        if any(abs(row[name] - last[name]) > NEAR * last[name] for name in _JUDGED):
            break
        stable = int(row["tokens"])
    return stable


def settled(name: str, found: dict[str, Any]) -> str:
    """`stable_from` of a method in words."""
    most = found["points"][-1]["tokens"]
    if len(found["points"]) == 1:
        return f"{name}: {most:,} earlier tokens are too few to tell from when on more change little"
    if found["stable_from"] == most:
        return f"{name}: not settled, over {NEAR:.0%} away until all {most:,} earlier tokens are used"
    return f"{name}: within {NEAR:.0%} of the figures of all {most:,} earlier tokens from {found['stable_from']:,} on"


def rows(result: dict[str, Any]) -> list[list[object]]:
    """A line for each method and count, then linear."""
    lines: list[list[object]] = [
        [f"{method}, {row['tokens']:,} tokens", *(row[name] for name in MEASURES)]
        for method, each in result["methods"].items()
        for row in each["points"]
    ]
    return [*lines, ["linear", *(result["linear"][name] for name in MEASURES)]]


def show(page: Page, result: dict[str, Any]) -> None:
    """The sections of the page."""
    from coterie.report.page import graph_objects

    found = "; ".join(settled(method, each) for method, each in result["methods"].items())
    page.section(
        "Tokens until a placement is stable (CAP §VIII-G)",
        "The paper: routing statistics and groupings are stable after about 8,000 tokens.",
        "Fitted on the first tokens of the earlier sequences, measured on the same later ones. In devices per token "
        f"and peak traffic, {found}.",
    )
    page.table(["fitted on", *MEASURES.values()], rows(result))
    graph = graph_objects()
    for name in ("dpt", "balance", "peak_traffic"):
        figure = graph.Figure()
        for method, each in result["methods"].items():
            figure.add_scatter(
                x=[row["tokens"] for row in each["points"]], y=[row[name] for row in each["points"]], name=method,
                mode="lines+markers",
            )  # fmt: skip
        figure.add_hline(y=result["linear"][name], line_dash="dot", annotation_text="linear")
        figure.update_layout(xaxis={"title": "tokens fitted on", "type": "log"}, yaxis_title=axis_label(name))
        page.figure(figure)


def remarks(result: dict[str, Any]) -> list[str]:
    """What holds for the whole page."""
    return notes(result, f"Measured on {result['configuration']['heldout_tokens']:,} later tokens.")
