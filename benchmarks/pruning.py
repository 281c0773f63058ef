"""What destination pruning saves and costs, on held-out tokens of real traces.

An all-to-all ends when its busiest device ends, so what pruning should lower is the remote peak traffic (remote
visits per token to the busiest device), and what it costs is routing weight. Rules are compared where they are equal
in one of the two. Everything is fitted on the earlier half of the sequences and measured on the later half; means
over layers. Where two rules are compared at equal held-out peak, only the level of traffic is chosen on the held-out
half (to 1/4096 of the tokens); the shape of the prices still comes from the earlier half.

    python benchmarks/pruning.py [TRACE ...] [--topology 8] [--method coterie | --placement FILE ...]

Experts are placed by a method, also on the earlier half, or by one placement file for each trace.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from coterie.placement.driver import place, prepare
from coterie.placement.placement import Placement
from coterie.pruning.destinations import Cap, Naive, Priced, PruningRule
from coterie.pruning.fitting import RuleChoice, weakest
from coterie.pruning.prices import LEVELS, theta_at_levels
from coterie.pruning.prune import prune_trace
from coterie.pruning.report import PartReport
from coterie.pruning.routed import RoutedTrace, peaks
from coterie.pruning.traffic import kept_weight
from coterie.topology import Topology
from coterie.trace.routing_trace import RoutingTrace, TokenSelector
from coterie.trace.splits import split

THRESHOLDS = (0.1, 0.2, 0.3)
PRICED_LOSS_LIMIT = 0.6
HELDOUT = 0.5


def devices(trace: RoutingTrace, topology: Topology, method: str, file: str | None) -> tuple[str, np.ndarray]:
    """A placement's name and the device of every expert, [L, E]: from a file, or fitted on the earlier half."""
    if file is None:
        return method, place(prepare(trace, topology), method, heldout=HELDOUT).device_of_expert()
    placed = Placement.load(file)
    placed.require_model(trace.spec, "the trace")
    return Path(file).name, placed.device_of_expert()


def mean_loss(routed: RoutedTrace, rule: PruningRule, tokens: TokenSelector) -> float:
    """Share of the routing weight that a rule drops."""
    layers = [routed.layer(layer, tokens) for layer in range(routed.trace.num_layers)]
    kept = [kept_weight(layer, rule.prune_layer(index, layer)).mean() for index, layer in enumerate(layers)]
    return 1 - float(np.mean(kept))


def microseconds_per_token(routed: RoutedTrace, rule: PruningRule, tokens: TokenSelector) -> float:
    """Time to prune one token in one layer, the best of five passes over all layers."""
    layers = [routed.layer(layer, tokens) for layer in range(routed.trace.num_layers)]
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        for index, layer in enumerate(layers):
            rule.prune_layer(index, layer)
        best = min(best, time.perf_counter() - started)
    return best / sum(len(layer.home_T) for layer in layers) * 1e6


def row(name: str, part: PartReport, microseconds: float | None) -> dict[str, Any]:
    return {
        "rule": name,
        "remote_dpt": part.mean("remote_dpt"),
        "remote_peak_traffic": part.mean("remote_peak_traffic"),
        "kept_weight": part.mean("kept_weight"),
        "emptied": part.mean("emptied"),
        "us_per_token_and_layer": microseconds,
    }


def measure(trace: RoutingTrace, device_LE: np.ndarray, topology: Topology) -> dict[str, Any]:
    """All rows of the table and both checks, for one trace under one placement."""
    routed, parts = RoutedTrace(trace, device_LE, topology), split(trace, HELDOUT)
    theta_NLG = theta_at_levels(routed, parts.first)
    speed = {
        "cap": microseconds_per_token(routed, Cap(0.2), parts.second),
        "naive": microseconds_per_token(routed, Naive(0.2), parts.second),
        "priced": microseconds_per_token(routed, Priced(theta_NLG[LEVELS // 3]), parts.second),
    }
    rows = [row("none", prune_trace(trace, device_LE, topology, RuleChoice("cap", p=0.0))[1].heldout, None)]
    for name in ("cap", "naive", "priced"):
        for p in THRESHOLDS:
            report = prune_trace(trace, device_LE, topology, RuleChoice(name, p=p))[1]
            label = f"priced to cap's {p}" if name == "priced" else f"{name} p = {p}"
            rows.append(row(label, report.heldout, speed[name]))
    by_name = {item["rule"]: item for item in rows}
    ratios = {}
    for p in THRESHOLDS:
        target = float(peaks(routed, Cap(p), parts.second).mean())
        equal = weakest(lambda n: Priced(theta_NLG[LEVELS - n]), LEVELS + 1, routed, parts.second, target)
        ratios[str(p)] = mean_loss(routed, equal, parts.second) / mean_loss(routed, Cap(p), parts.second)
    cap, naive = by_name["cap p = 0.2"]["remote_peak_traffic"], by_name["naive p = 0.3"]["remote_peak_traffic"]
    return {
        "heldout_tokens": parts.num_second,
        "rows": rows,
        "cap_0.2_peak_over_naive_0.3_peak": cap / naive,
        "priced_loss_over_cap_loss_at_equal_heldout_peak": ratios,
        "met": {"cap_against_naive": cap <= naive, "priced_against_cap": max(ratios.values()) <= PRICED_LOSS_LIMIT},
    }


def show(name: str, placement: str, result: dict[str, Any]) -> None:
    print(f"\n{name}, placement {placement}, {result['heldout_tokens']} held-out tokens, means over layers")
    print(f"{'rule':22}{'remote DPT':>12}{'remote peak':>13}{'kept weight':>13}{'emptied':>9}{'µs/token':>10}")
    for item in result["rows"]:
        cost = item["us_per_token_and_layer"]
        print(
            f"{item['rule']:22}{item['remote_dpt']:12.3f}{item['remote_peak_traffic']:13.3f}"
            f"{item['kept_weight']:13.4f}{item['emptied']:9.4f}{'' if cost is None else format(cost, '.3f'):>10}"
        )
    verdict = {True: "met", False: "NOT met"}
    print(
        f"CAP p = 0.2 has {result['cap_0.2_peak_over_naive_0.3_peak']:.3f}x the peak of naive p = 0.3 "
        f"(at most 1): {verdict[result['met']['cap_against_naive']]}"
    )
    ratios = result["priced_loss_over_cap_loss_at_equal_heldout_peak"]
    words = ", ".join(f"{ratio:.3f}x at p = {p}" for p, ratio in ratios.items())
    print(
        f"priced, at the held-out peak of CAP's rule, loses {words} of CAP's loss "
        f"(at most {PRICED_LOSS_LIMIT}): {verdict[result['met']['priced_against_cap']]}"
    )


def main() -> None:
    from coterie.trace.open import open_trace

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", default=["dsv2lite-law", "dsv2lite-intent"])
    parser.add_argument("--topology", default="8")
    parser.add_argument("--method", default="coterie", help="how experts are placed, without --placement")
    parser.add_argument("--placement", nargs="*", default=[])
    options = parser.parse_args()
    if options.placement and len(options.placement) != len(options.traces):
        sys.exit(f"{len(options.placement)} placements for {len(options.traces)} traces; give one for each")
    topology = Topology.parse(options.topology)
    results = {}
    for name, file in zip(options.traces, options.placement or [None] * len(options.traces), strict=True):
        trace = open_trace(name)
        placement, device_LE = devices(trace, topology, options.method, file)
        results[name] = {"placement": placement, **measure(trace, device_LE, topology)}
        show(name, placement, results[name])
    print(json.dumps({"benchmark": "pruning", "topology": topology.to_json(), "traces": results}))


if __name__ == "__main__":
    main()
