"""How long a placement holds: fitted on a few windows of a trace and measured on all of them.

Source: CAP §VIII-F, Fig. 15.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, TraceError
from coterie.placement.candidates import Setting
from coterie.placement.methods import get_method
from coterie.pruning.routed import linear_devices
from coterie.study.placement.common import MEASURES, axis_label, fit, head, means, notes

if TYPE_CHECKING:
    from coterie.report.page import Page
    from coterie.trace.routing_trace import RoutingTrace

FITTED_AT = (0.0, 0.25, 0.75)  # the paper: windows 0, 4 and 12 of 16
METHODS = ("cap", "coterie")
MOST_WINDOWS = 400
LINEAR = "linear"


def windows_of(trace: RoutingTrace, size: int, requests: bool = False) -> list[NDArray[np.int64]]:
    """Consecutive windows of equal size, as token indices; what is left at the end is in none.

    Args:
        trace: the trace.
        size: tokens of a window, or its sequences.
        requests: whether the size counts sequences, in the order they begin.

    Raises:
        ConfigError: when there are fewer than two windows, or too many to look at.
        TraceError: when sequences are to be counted and the trace has none.
    """
    if requests and trace.sequence_ids is None:
        raise TraceError("--requests counts sequences and this trace has none; leave it out to count tokens")
    total = trace.num_sequences if requests else trace.num_tokens
    count = total // size if size > 0 else 0
    what = "sequences" if requests else "tokens"
    if count < 2:
        raise ConfigError(f"--window {size} makes {count} windows of {total:,} {what}; use 1 to {total // 2:,}")
    if count > MOST_WINDOWS:
        raise ConfigError(f"--window {size} makes {count:,} windows; use at least {-(-total // MOST_WINDOWS):,} {what}")
    rank_T = _ranks(np.asarray(trace.sequence_ids)) if requests else np.arange(trace.num_tokens, dtype=np.int64)
    return [np.flatnonzero(rank_T // size == number) for number in range(count)]


def run(
    setting: Setting, name: str, window: int, *, requests: bool = False, methods: Sequence[str] = METHODS
) -> dict[str, Any]:
    """Groupings fitted on three windows, measured on every window; ready for JSON.

    `variation` is how far a grouping's worst window is from the mean of its windows, as a share of that mean, and
    `below_linear` in how many windows it costs less than linear does there. Both leave the window out that the
    grouping was fitted on.

    Args:
        setting: trace, topology, objective, seed.
        name: what to call the trace.
        window: size of a window, tokens or sequences.
        requests: whether windows are counted in sequences.
        methods: names of placement methods.

    Raises:
        ConfigError: for a window that leaves fewer than two, or an unknown method.
        TraceError: when sequences are to be counted and the trace has none.
    """
    for method in methods:
        get_method(method)  # refuses before the long work
    trace = setting.trace
    windows = windows_of(trace, window, requests)
    fitted_at = sorted({int(share * len(windows)) for share in FITTED_AT})
    linear = _measured(setting, linear_devices(trace.spec, setting.topology), windows)
    groupings: dict[str, Any] = {LINEAR: _grouping(linear, None, linear)}
    for method in methods:
        for number, at in enumerate(fitted_at):
            found = _measured(setting, fit(setting, method, windows[at]), windows)
            groupings[f"{method} w{at}"] = {"method": method, **_grouping(found, at, linear)}
            setting.progress(f"stability ({method})", number + 1, len(fitted_at))
    configuration = {"window": window, "unit": "sequences" if requests else "tokens", "methods": list(methods)}
    return {
        **head("stability", {name: trace}, setting, configuration),
        "windows": [{"first_token": int(tokens[0]), "tokens": int(tokens.size)} for tokens in windows],
        "tokens_in_no_window": trace.num_tokens - sum(int(tokens.size) for tokens in windows),
        "groupings": groupings,
    }


def _ranks(sequence_T: NDArray[Any]) -> NDArray[np.int64]:
    """For every token the place of its sequence in the order in which sequences begin, [T]."""
    _, first, inverse = np.unique(sequence_T, return_index=True, return_inverse=True)
    rank = np.empty(first.size, dtype=np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(first.size)
    ranks: NDArray[np.int64] = rank[inverse.ravel()]
    return ranks


def _measured(
    setting: Setting, device_LE: NDArray[np.int64], windows: Sequence[NDArray[np.int64]]
) -> dict[str, list[float]]:
    rows = [means(setting.trace, device_LE, setting.topology, tokens) for tokens in windows]
    return {name: [round(row[name], 6) for row in rows] for name in MEASURES}


def _grouping(found: dict[str, list[float]], fitted_at: int | None, linear: dict[str, list[float]]) -> dict[str, Any]:
    others = [number for number in range(len(found["dpt"])) if number != fitted_at]

    def variation(name: str) -> float:
        values = np.asarray(found[name])[others]
        return float(np.abs(values - values.mean()).max() / values.mean()) if values.mean() else 0.0

    below = {name: sum(found[name][at] < linear[name][at] for at in others) for name in MEASURES}
    return {
        "fitted_window": fitted_at, "other_windows": len(others), "values": found,
        "mean": {name: float(np.mean(np.asarray(found[name])[others])) for name in MEASURES},
        "variation": {name: variation(name) for name in MEASURES}, "below_linear": below,
    }  # fmt: skip


def show(page: Page, result: dict[str, Any]) -> None:
    """The sections of the page."""
    from coterie.report.page import graph_objects

    graph, unit = graph_objects(), result["configuration"]["unit"]
    size, windows = result["configuration"]["window"], result["windows"]
    page.section(
        "Stability within a workload (CAP Fig. 15)",
        "The paper (LMSYS-Chat, 16 windows of 500 requests): groupings fitted on windows 0, 4 and 12 vary over all "
        "windows by at most 2.9% in devices per token and 5.8% in load imbalance, and stay below the default placement "
        "throughout in the first.",
        f"Here {len(windows)} windows of {size} {unit}. Variation: the window farthest from the mean, as a share of "
        "it; the window that a grouping was fitted on is left out of its figures. B is a maximum, so that in a small "
        "window chance alone raises it.",
    )
    page.table(
        ["grouping", "devices", "varies by", "below linear", "B", "varies by", "peak", "varies by", "below linear"],
        [table_row(name, each) for name, each in result["groupings"].items()],
    )
    names = [name for name in MEASURES if name != "npt" or result["topology"]["num_nodes"] > 1]
    for name in names:
        figure = graph.Figure()
        for label, each in result["groupings"].items():
            figure.add_scatter(
                x=[one["first_token"] for one in windows], y=each["values"][name], name=label, mode="lines+markers",
                line={"dash": "dot", "color": "#777"} if label == LINEAR else {},
            )  # fmt: skip
        figure.update_layout(xaxis_title="first token of the window", yaxis_title=axis_label(name))
        page.figure(figure)


def table_row(name: str, each: dict[str, Any]) -> list[object]:
    """One grouping's line: means, how far the worst window is from them, and in how many windows it beats linear."""
    mean, varies, of = each["mean"], each["variation"], each["other_windows"]
    below = [
        "-" if name == LINEAR else f"{each['below_linear'][measure]} of {of}" for measure in ("dpt", "peak_traffic")
    ]
    return [
        name, mean["dpt"], f"{varies['dpt']:.1%}", below[0], mean["balance"], f"{varies['balance']:.1%}",
        mean["peak_traffic"], f"{varies['peak_traffic']:.1%}", below[1],
    ]  # fmt: skip


def remarks(result: dict[str, Any]) -> list[str]:
    """What holds for the whole page."""
    return notes(result, f"{result['tokens_in_no_window']:,} tokens at the end fill no window and are left out.")
