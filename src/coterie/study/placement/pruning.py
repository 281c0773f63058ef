"""What pruning does to loads, whom it spares, and whether to place before or after it.

Source: CAP §VII, Figs. 9 and 10, and step order; §VIII-D for the rules compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from coterie.placement.candidates import Setting
from coterie.profile.load import expert_load, imbalance
from coterie.pruning.fitting import RuleChoice
from coterie.pruning.prune import prune_trace
from coterie.pruning.routed import linear_devices
from coterie.study.placement.common import fit, head, means, notes
from coterie.trace.routing_trace import RoutingTrace
from coterie.trace.splits import Split, split

if TYPE_CHECKING:
    from coterie.report.page import Page

THRESHOLDS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
RULE_THRESHOLDS = (0.1, 0.2, 0.3)
RULES = ("cap", "naive", "priced")
DECILES = 10


def run(setting: Setting, name: str, *, method: str = "coterie", heldout: float = 0.5) -> dict[str, Any]:
    """Imbalance against p, weight by popularity, and cost against kept weight for every rule; ready for JSON.

    Args:
        setting: trace with routing weights, topology, objective, seed.
        name: what to call the trace.
        method: whose placements are pruned.
        heldout: share of the tokens, the latest sequences, that only measure.

    Raises:
        TraceError: when the trace has no weights.
        ConfigError: for an unknown method.
    """
    setting.trace.require_weights("the pruning study")
    parts = split(setting.trace, heldout)
    placed = fit(setting, method, parts.first)
    configuration = {
        "method": method, "heldout": heldout, "fit_tokens": parts.num_first, "heldout_tokens": parts.num_second,
        "priced_floor": 0.0,
    }  # fmt: skip
    return {
        **head("pruning", {name: setting.trace}, setting, configuration),
        "imbalance": [_imbalance(setting, placed, p, heldout, parts) for p in THRESHOLDS],
        "popularity": popularity(setting.trace),
        "unpruned": means(setting.trace, placed, setting.topology, parts.second),
        "rules": _rules(setting, method, placed, heldout, parts),
    }


def popularity(trace: RoutingTrace) -> list[dict[str, float]]:
    """Mean routing weight of a chosen expert, by its popularity in its layer: ten groups from cold to hot.

    Weights are divided by the sum over the token's kept experts. Source: CAP §VII, Fig. 10.

    Returns:
        For each group its share of the choices ("uses") and the mean "weight" of one; both means over layers.
    """
    trace.require_weights("weight by popularity")
    num_experts = trace.spec.num_experts
    weight_LQ = np.full((trace.num_layers, DECILES), np.nan)
    uses_LQ = np.zeros((trace.num_layers, DECILES))
    for layer in range(trace.num_layers):
        routing = trace.layer(layer)
        assert routing.weights_TK is not None
        kept_TK = routing.kept()
        weights_TK = np.where(kept_TK, routing.weights_TK.astype(np.float64), 0.0)
        total_T = weights_TK.sum(axis=1, keepdims=True)
        share_TK = np.divide(weights_TK, total_T, out=np.zeros_like(weights_TK), where=total_T > 0)
        load_E = expert_load(routing.expert_ids_TK, routing.kept_TK, num_experts)
        sum_E = np.bincount(
            routing.expert_ids_TK[kept_TK].astype(np.int64), weights=share_TK[kept_TK], minlength=num_experts
        )
        for group, experts in enumerate(np.array_split(np.argsort(load_E, kind="stable"), DECILES)):
            uses = load_E[experts].sum()
            uses_LQ[layer, group] = uses / max(load_E.sum(), 1)
            if uses:
                weight_LQ[layer, group] = sum_E[experts].sum() / uses
    return [
        {
            "decile": group + 1, "uses": float(uses_LQ[:, group].mean()),
            "weight": float(np.nanmean(weight_LQ[:, group])) if np.isfinite(weight_LQ[:, group]).any() else 0.0,
        }
        for group in range(DECILES)
    ]  # fmt: skip


def _imbalance(
    setting: Setting, placed: NDArray[np.int64], p: float, heldout: float, parts: Split
) -> dict[str, float]:  # fmt: skip
    """Loads after CAP's rule with this p, on held-out tokens: of experts, and of devices under two placements."""
    trace, topology = setting.trace, setting.topology
    row = {"p": p}
    for label, device_LE in (("linear", linear_devices(trace.spec, topology)), ("placed", placed)):
        kept, _ = prune_trace(trace, device_LE, topology, RuleChoice("cap", p=p), heldout)
        pruned = trace.with_kept(kept, {})
        row[f"devices_{label}"] = means(pruned, device_LE, topology, parts.second)["balance"]
        if label == "linear":
            loads = (pruned.layer(layer, parts.second) for layer in range(trace.num_layers))
            row["experts"] = float(
                np.mean([
                    imbalance(expert_load(one.expert_ids_TK, one.kept_TK, trace.spec.num_experts)) for one in loads
                ])
            )  # fmt: skip
    return row


def _rules(
    setting: Setting, method: str, placed: NDArray[np.int64], heldout: float, parts: Split
) -> list[dict[str, Any]]:  # fmt: skip
    """Every rule at every p, under a placement made before pruning and under one made from the pruned trace."""
    trace, topology = setting.trace, setting.topology
    linear, found = linear_devices(trace.spec, topology), []
    for rule in RULES:
        for p in RULE_THRESHOLDS:
            choice = RuleChoice(rule, p=p)
            kept, _ = prune_trace(trace, linear, topology, choice, heldout)
            after = fit(replace(setting, trace=trace.with_kept(kept, {})), method, parts.first)
            for label, device_LE in (("before", placed), ("after", after)):
                found.append({"rule": rule, "p": p, "placed": label, **_pruned(setting, device_LE, choice, heldout)})
            setting.progress("pruning rules", len(found) // 2, len(RULES) * len(RULE_THRESHOLDS))
    return found


def _pruned(setting: Setting, device_LE: NDArray[np.int64], choice: RuleChoice, heldout: float) -> dict[str, float]:
    """Held-out kept weight and costs of a placement under a rule that is fitted under it."""
    kept, report = prune_trace(setting.trace, device_LE, setting.topology, choice, heldout)
    pruned = setting.trace.with_kept(kept, {})
    measured = means(pruned, device_LE, setting.topology, split(pruned, heldout).second)
    return {"kept_weight": report.heldout.mean("kept_weight"), **measured}


def columns() -> Sequence[str]:
    """What stands above `rows`."""
    return ("rule", "p", "placed", "kept weight", "devices", "remote devices", "B", "peak", "remote peak")


def rows(result: dict[str, Any], places: Sequence[str] = ("before", "after")) -> list[list[object]]:
    """The lines of the rules; "before": placed on unpruned routing, "after": on pruned."""
    names = ("kept_weight", "dpt", "remote_dpt", "balance", "peak_traffic", "remote_peak_traffic")
    unpruned = {"kept_weight": 1.0, **result["unpruned"]}
    head_row: list[object] = ["none", 0.0, "-", *(unpruned[name] for name in names)]
    chosen = [each for each in result["rules"] if each["placed"] in places]
    return [head_row, *([each["rule"], each["p"], each["placed"], *(each[name] for name in names)] for each in chosen)]


def show(page: Page, result: dict[str, Any]) -> None:
    """The sections of the page."""
    from coterie.report.page import graph_objects

    graph = graph_objects()
    page.section(
        "Load imbalance against the threshold (CAP Fig. 9)",
        "The paper: pruning takes more from cold experts, so imbalance rises with p, from about 1.6 to 1.8.",
        "CAP's rule on held-out tokens; B of the experts of a layer, and of devices under the linear placement and "
        "under the one that was fitted on unpruned routing.",
    )
    lines = {"experts": "experts", "devices_linear": "devices, linear", "devices_placed": "devices, placed"}
    page.table(["p", *lines.values()], [[each["p"], *(each[key] for key in lines)] for each in result["imbalance"]])
    figure = graph.Figure()
    for key, label in lines.items():
        figure.add_scatter(
            x=[each["p"] for each in result["imbalance"]], y=[each[key] for each in result["imbalance"]], name=label
        )
    figure.update_layout(xaxis_title="p", yaxis_title="largest load over mean", xaxis_tickformat=".0%")
    page.figure(figure)
    page.section(
        "Routing weight by popularity (CAP Fig. 10)",
        "The paper: hot experts get higher weights when they are chosen, cold ones lower. A token's weights are "
        "divided by their sum; experts are ranked within their layer.",
    )
    figure = graph.Figure()
    deciles = [each["decile"] for each in result["popularity"]]
    figure.add_bar(x=deciles, y=[each["weight"] for each in result["popularity"]], name="weight when chosen")
    figure.update_layout(xaxis_title="popularity decile, cold to hot", yaxis_title="mean weight when chosen")
    page.figure(figure)
    page.section(
        "What is saved at what loss, placed before and after pruning (CAP §VII)",
        "Each rule is fitted on the earlier sequences under the placement it is used with; priced means: down to the "
        "peak that CAP's rule reaches with that p, without a floor. Before: the placement was fitted on unpruned "
        "routing; after: on routing that was pruned under the linear placement, the paper's order. Held-out figures.",
    )
    page.table(columns(), rows(result))
    for name, label in (("remote_dpt", "remote devices per token"), ("remote_peak_traffic", "remote peak traffic")):
        figure = graph.Figure()
        for rule in RULES:
            for placed, dash in (("before", "dash"), ("after", "solid")):
                points = [each for each in result["rules"] if (each["rule"], each["placed"]) == (rule, placed)]
                figure.add_scatter(
                    x=[each["kept_weight"] for each in points], y=[each[name] for each in points],
                    name=f"{rule}, placed {placed}", mode="lines+markers", line={"dash": dash},
                )  # fmt: skip
        figure.update_layout(xaxis={"title": "kept weight", "autorange": "reversed"}, yaxis_title=label)
        page.figure(figure)


def remarks(result: dict[str, Any]) -> list[str]:
    """What holds for the whole page."""
    asked = result["configuration"]
    return notes(
        result,
        f"Fitted by {asked['method']} on {asked['fit_tokens']:,} tokens, measured on {asked['heldout_tokens']:,} later "
        "ones. Weight is not quality: coterie eval measures that on a model.",
    )
