"""The figures of a trace and its placements: heat maps small enough to stand by the dozen in one page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from coterie.profile.coactivation import coactivation_counts, jaccard
from coterie.profile.combinations import combination_counts, natural_pairs
from coterie.report.page import graph_objects
from coterie.report.placement_data import PlacementReport

MENU_MARGIN = 90
_MOST_CELLS = 400_000  # bytes of co-activation in the page, before base64
_DEPTH = 250
_SCALE = "Viridis"
_SKEW_POINTS = 33
_MOST_BARS = 16  # devices; more are lines
_GREY = "#777"
_COLOURS = ("#3366cc", "#e2711d", "#2a9d5c", "#9c4dcc", "#c2255c", "#0b7285", "#8d6e00", "#5c4033")


def chosen_layers(num_layers: int, num_slots: int) -> list[int]:
    """MoE layers whose co-activation is shown, evenly spaced: all, or as many as the page has room for."""
    count = max(1, min(num_layers, _MOST_CELLS // (2 * num_slots * num_slots)))
    return sorted({round(at) for at in np.linspace(0, num_layers - 1, count)})


def colour(report: PlacementReport, name: str) -> str:
    """The colour of a placement, the same in every figure; linear is grey."""
    others = [other for other in report.placements if other != "linear"]
    return _COLOURS[others.index(name) % len(_COLOURS)] if name in others else _GREY


def coactivation(report: PlacementReport, by_device: bool) -> Any:
    """Co-activation p_ij of every pair (CAP Fig. 3), a layer at a time; by slots of linear, or of the main placement.

    An expert with copies stands in every slot that holds it.
    """
    trace, experts = report.setting.trace, report.setting.trace.spec.num_experts
    shown = report.placements[report.main if by_device else "linear"]
    maps: dict[str, Any] = {}
    for layer in chosen_layers(trace.num_layers, shown.num_slots):
        routing = trace.layer(layer)
        p_EE = jaccard(coactivation_counts(routing.expert_ids_TK, routing.kept_TK, experts))
        expert_P, device_P = shown.slots(layer)
        p_PP = p_EE[np.ix_(expert_P, expert_P)]
        most = float(np.quantile(p_PP, 0.998)) or 1.0
        maps[f"layer {layer}"] = (np.minimum(p_PP / most, 1) * _DEPTH).round().astype(np.uint8), most
    graph = graph_objects()
    figure = graph.Figure()
    for number, (name, (cells_EE, most)) in enumerate(maps.items()):
        figure.add_heatmap(
            z=cells_EE, zmin=0, zmax=_DEPTH, colorscale=_SCALE, visible=number == 0, name=name,
            colorbar={
                "tickvals": [0, _DEPTH / 2, _DEPTH], "ticktext": ["0", f"{most / 2:.3f}", f"{most:.3f}+"],
                "thickness": 12,
            },
            hovertemplate="slots %{x} and %{y}<extra></extra>",
        )  # fmt: skip
    bounds = np.flatnonzero(np.diff(device_P)) + 0.5  # slots of devices are the same in all layers
    for bound in bounds.tolist():
        for line in ({"x0": bound, "x1": bound, "y0": 0, "y1": 1, "yref": "paper"},
                     {"y0": bound, "y1": bound, "x0": 0, "x1": 1, "xref": "paper"}):  # fmt: skip
            figure.add_shape(type="line", line={"color": "white", "width": 0.6}, **line)
    named = "slot, by device" if by_device or shown.num_slots > experts else "expert"
    figure.update_layout(xaxis_title=named, yaxis={"title": named, "autorange": "reversed"})
    return _with_menu(figure, list(maps))


def expert_loads(report: PlacementReport) -> Any:
    """Load of every expert over its layer's mean."""
    load_LE = report.load_LE / np.maximum(report.load_LE.mean(axis=1, keepdims=True), 1e-12)
    figure = graph_objects().Figure()
    figure.add_heatmap(
        z=load_LE.astype(np.float32), colorscale=_SCALE, colorbar={"thickness": 12},
        hovertemplate="layer %{y}, expert %{x}: %{z:.2f} of the mean<extra></extra>",
    )  # fmt: skip
    figure.update_layout(xaxis_title="expert", yaxis={"title": "MoE layer", "autorange": "reversed"})
    return figure


def device_loads(report: PlacementReport) -> Any:
    """Load of the busiest, second busiest, ... device over the mean, the mean over layers, for every placement."""
    figure = graph_objects().Figure()
    for name in report.placements:
        ranked_G = -np.sort(-report.device_load(name), axis=1).mean(axis=0)
        ranks, own = np.arange(1, ranked_G.size + 1), colour(report, name)
        if ranked_G.size > _MOST_BARS:
            figure.add_scatter(x=ranks, y=ranked_G.astype(np.float32), name=name, mode="lines", line={"color": own})
        else:
            figure.add_bar(x=ranks, y=ranked_G.astype(np.float32), name=name, marker={"color": own})
    figure.update_layout(
        barmode="group", xaxis_title="device of a layer, busiest first", yaxis_title="load over the mean"
    )  # fmt: skip
    return figure


def load_maps(report: PlacementReport) -> Any:
    """Load of every device of every layer over the mean, before (linear) and after."""
    maps = {name: report.device_load(name) for name in _main_first(report)}
    most = float(np.max([load_LG.max() for load_LG in maps.values()]))
    figure = graph_objects().Figure()
    for number, load_LG in enumerate(maps.values()):
        figure.add_heatmap(
            z=load_LG.astype(np.float32), zmin=0, zmax=most, colorscale=_SCALE, visible=number == 0,
            colorbar={"thickness": 12},
            hovertemplate="layer %{y}, device %{x}: %{z:.2f} of the mean<extra></extra>",
        )  # fmt: skip
    figure.update_layout(xaxis={"title": "device", "dtick": 1 if load_LG.shape[1] <= 16 else None},
                         yaxis={"title": "MoE layer", "autorange": "reversed"})  # fmt: skip
    return _with_menu(figure, list(maps))


def traffic(report: PlacementReport) -> Any:
    """Copies per token from home to device, the mean over layers; the diagonal stays at home and costs nothing."""
    matrices = {name: report.placements[name].traffic_GG() for name in _main_first(report)}
    devices = report.setting.topology.num_devices
    remote = ~np.eye(devices, dtype=np.bool_)
    most = max(float(matrix[remote].max()) if devices > 1 else 1.0 for matrix in matrices.values())
    figure = graph_objects().Figure()
    for number, matrix_GG in enumerate(matrices.values()):
        figure.add_heatmap(
            z=np.where(remote, matrix_GG, np.nan).astype(np.float32), zmin=0, zmax=most, colorscale=_SCALE,
            visible=number == 0, colorbar={"thickness": 12}, texttemplate="%{z:.3f}" if devices <= 8 else None,
            hovertemplate="from device %{y} to %{x}: %{z:.4f} copies per token<extra></extra>",
        )  # fmt: skip
    figure.update_layout(xaxis={"title": "to device", "dtick": 1 if devices <= 16 else None},
                         yaxis={"title": "from the token's device", "autorange": "reversed"})  # fmt: skip
    return _with_menu(figure, list(matrices))


def spectrum(report: PlacementReport) -> Any:
    """Devices per token against B (CAP Figs. 6 and 13): spectra as lines, single placements as points."""
    figure = graph_objects().Figure()
    for name, points in report.spectra.items():
        visits, balances = zip(*points, strict=True)
        method = name.removesuffix("-spectrum")
        figure.add_scatter(
            x=visits, y=balances, name=f"{method} spectrum", mode="lines+markers",
            marker={"size": 5}, line={"color": colour(report, method), "width": 1.5},
        )  # fmt: skip
    for name, shown in report.placements.items():
        means = shown.means()
        figure.add_scatter(
            x=[means["dpt"]], y=[means["balance"]], name=name, mode="markers",
            marker={"size": 12, "symbol": "diamond", "opacity": 0.8, "color": colour(report, name)},
        )  # fmt: skip
    figure.update_layout(xaxis_title="devices per token (communication)", yaxis_title="B (imbalance of computation)")
    return figure


def over_time(report: PlacementReport, name: str, label: str) -> Any:
    """One metric in consecutive windows of the trace."""
    figure = graph_objects().Figure()
    for placement, rows in report.over_time.items():
        figure.add_scatter(
            x=report.windows, y=[row[name] for row in rows], name=placement, mode="lines+markers",
            line={"dash": "dot" if placement == "linear" else "solid", "color": colour(report, placement)},
        )  # fmt: skip
    figure.update_layout(xaxis_title="first token of the window", yaxis_title=label)
    return figure


def skew(report: PlacementReport) -> Any:
    """Share of the uses that the most used combinations hold, a line for each layer (CRISP Fig. 3)."""
    trace, figure = report.setting.trace, graph_objects().Figure()
    pairs = natural_pairs(trace)
    for layer in range(trace.num_layers):
        counts_EE = combination_counts(trace, layer, pairs=pairs)
        falling = np.sort(counts_EE[np.triu_indices(len(counts_EE), 1)])[::-1]
        total = np.concatenate([[0], np.cumsum(falling)])
        at = np.unique(np.linspace(0, falling.size, _SKEW_POINTS).round().astype(int))
        figure.add_scatter(
            x=(at / max(falling.size, 1)).astype(np.float32), y=(total[at] / max(total[-1], 1)).astype(np.float32),
            name=f"layer {layer}", mode="lines", line={"width": 1}, showlegend=False,
        )  # fmt: skip
    figure.add_scatter(x=[0, 1], y=[0, 1], name="even use", mode="lines", line={"dash": "dot", "color": _GREY})
    figure.update_layout(
        xaxis={"title": f"share of the {pairs}, most used first", "tickformat": ".0%"},
        yaxis={"title": "share of the uses", "tickformat": ".0%"}
    )  # fmt: skip
    return figure


def _main_first(report: PlacementReport) -> Sequence[str]:
    return list(dict.fromkeys((report.main, *report.placements)))


def _with_menu(figure: Any, names: Sequence[str]) -> Any:
    """A menu that shows one of the figure's traces at a time."""
    if len(names) > 1:
        buttons = [
            {"label": name, "method": "update", "args": [{"visible": [other == name for other in names]}]}
            for name in names
        ]
        figure.update_layout(
            updatemenus=[{"buttons": buttons, "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"}]
        )
    return figure
