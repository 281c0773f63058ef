"""What destination pruning saves and costs, on held-out tokens of real traces.

An all-to-all ends when its busiest device ends, so what pruning should lower is the remote peak traffic (remote
visits per token to the busiest device), and what it costs is routing weight. Rules are compared where they are equal
in one of the two. Everything is fitted on the earlier half of the sequences and measured on the later half; means
over layers. Where two rules are compared at equal held-out peak, only the level of traffic is chosen on the held-out
half; the shape of the prices still comes from the earlier half. Beside it the bound of any such rule, one threshold for
each layer and device: prices fitted on the held-out half itself, to its homes as recorded.

    python benchmarks/pruning.py [TRACE ...] [--topology 8] [--method coterie | --placement FILE ...] [--earlier-half]

Experts are placed by a method, also on the earlier half, or by one placement file for each trace. With --earlier-half
the same within the earlier half alone: how prices are fitted was chosen there, against one level of traffic for all
layers.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from coterie.placement.driver import place, prepare
from coterie.placement.placement import Placement
from coterie.pruning.destinations import Cap, Naive, Priced, PruningRule
from coterie.pruning.fitting import RuleChoice, weakest
from coterie.pruning.prices import LEVELS, Prices, fit_prices, price_layers
from coterie.pruning.prune import prune_trace
from coterie.pruning.report import PartReport
from coterie.pruning.routed import RoutedTrace, peaks
from coterie.pruning.traffic import kept_weight
from coterie.topology import Topology
from coterie.trace.routing_trace import TOKEN_FIELDS, RoutingTrace, TokenSelector
from coterie.trace.splits import split

THRESHOLDS = (0.1, 0.2, 0.3)
PRICED_LOSS_LIMIT = 0.6
HELDOUT = 0.5


def only(trace: RoutingTrace, tokens: TokenSelector) -> RoutingTrace:
    """A trace of these tokens alone."""
    by_layer = {name: getattr(trace, name) for name in ("expert_ids", "weights", "kept")}
    by_token = {name: getattr(trace, name) for name in TOKEN_FIELDS}
    cut: dict[str, Any] = {name: None if value is None else value[:, tokens] for name, value in by_layer.items()}
    cut |= {name: None if value is None else value[tokens] for name, value in by_token.items()}
    return replace(trace, **cut)


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


def loss_over_cap(routed: RoutedTrace, prices: Prices, p: float, tokens: TokenSelector) -> float:
    """Weight that prices lose, at the least strength with the peak of CAP's rule on these tokens, over CAP's loss."""
    target = float(peaks(routed, Cap(p), tokens).mean())
    equal = weakest(lambda n: Priced(prices.theta(n)), prices.num_strengths, routed, tokens, target)
    return mean_loss(routed, equal, tokens) / mean_loss(routed, Cap(p), tokens)


def oracle(routed: RoutedTrace, tokens: TokenSelector) -> Prices:
    """Prices that know the tokens they are used on, and where each lives; links of one cost."""
    theta_NLG = np.zeros((LEVELS + 1, routed.trace.num_layers, routed.topology.num_devices))
    for index in range(routed.trace.num_layers):
        layer = routed.layer(index, tokens)
        weight_TK = np.where(layer.before_TK, layer.weight_TK, 0.0)
        share_TK = weight_TK / weight_TK.sum(axis=1, keepdims=True)
        allowed_N = np.arange(LEVELS + 1) * len(layer.home_T) // LEVELS
        for device in range(routed.topology.num_devices):
            there_TK = layer.before_TK & (layer.device_TK == device)
            remote_T = there_TK.any(axis=1) & (layer.home_T != device)
            a_V = np.sort((share_TK * there_TK).sum(axis=1)[remote_T])[::-1]
            bounds = np.concatenate([[2.0], a_V, np.full(allowed_N[-1] + 1 - a_V.size, 0.0)])
            theta_NLG[:, index, device] = (bounds[allowed_N] + bounds[allowed_N + 1]) / 2
    return price_layers(theta_NLG)


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
    fitted, bound = fit_prices(routed, parts.first), oracle(routed, parts.second)
    speed = {
        "cap": microseconds_per_token(routed, Cap(0.2), parts.second),
        "naive": microseconds_per_token(routed, Naive(0.2), parts.second),
        "priced": microseconds_per_token(routed, Priced(fitted.theta(fitted.num_strengths // 2)), parts.second),
    }
    rows = [row("none", prune_trace(trace, device_LE, topology, RuleChoice("cap", p=0.0))[1].heldout, None)]
    for name in ("cap", "naive", "priced"):
        for p in THRESHOLDS:
            report = prune_trace(trace, device_LE, topology, RuleChoice(name, p=p))[1]
            label = f"priced to cap's {p}" if name == "priced" else f"{name} p = {p}"
            rows.append(row(label, report.heldout, speed[name]))
    by_name = {item["rule"]: item for item in rows}
    ratios = {str(p): loss_over_cap(routed, fitted, p, parts.second) for p in THRESHOLDS}
    level = Prices(fitted.theta_NLG, np.tile(np.arange(trace.num_layers), LEVELS))
    even = {str(p): loss_over_cap(routed, level, p, parts.second) for p in THRESHOLDS}
    least = {str(p): loss_over_cap(routed, bound, p, parts.second) for p in THRESHOLDS}
    cap, naive = by_name["cap p = 0.2"]["remote_peak_traffic"], by_name["naive p = 0.3"]["remote_peak_traffic"]
    return {
        "heldout_tokens": parts.num_second,
        "rows": rows,
        "cap_0.2_peak_over_naive_0.3_peak": cap / naive,
        "priced_loss_over_cap_loss_at_equal_heldout_peak": ratios,
        "one_level_loss_over_cap_loss_at_equal_heldout_peak": even,
        "oracle_loss_over_cap_loss_at_equal_heldout_peak": least,
        "met": {"cap_against_naive": cap <= naive, "priced_against_cap": max(ratios.values()) <= PRICED_LOSS_LIMIT},
    }


def words_of(ratios: dict[str, float]) -> str:
    return ", ".join(f"{ratio:.3f}x at p = {p}" for p, ratio in ratios.items())


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
    print(
        f"priced, at the held-out peak of CAP's rule, loses {words_of(ratios)} of CAP's loss "
        f"(at most {PRICED_LOSS_LIMIT}): {verdict[result['met']['priced_against_cap']]}"
    )
    bounds = result["oracle_loss_over_cap_loss_at_equal_heldout_peak"]
    even = result["one_level_loss_over_cap_loss_at_equal_heldout_peak"]
    print(f"with one level of traffic for all layers {words_of(even)}; fitted where it is measured {words_of(bounds)}")


def main() -> None:
    from coterie.trace.open import open_trace

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", default=["dsv2lite-law", "dsv2lite-intent"])
    parser.add_argument("--topology", default="8")
    parser.add_argument("--method", default="coterie", help="how experts are placed, without --placement")
    parser.add_argument("--placement", nargs="*", default=[])
    parser.add_argument("--earlier-half", action="store_true", help="fit and measure within the earlier half")
    options = parser.parse_args()
    if options.placement and len(options.placement) != len(options.traces):
        sys.exit(f"{len(options.placement)} placements for {len(options.traces)} traces; give one for each")
    topology = Topology.parse(options.topology)
    results = {}
    for name, file in zip(options.traces, options.placement or [None] * len(options.traces), strict=True):
        trace = open_trace(name)
        if options.earlier_half:
            trace = only(trace, split(trace, HELDOUT).first)
        placement, device_LE = devices(trace, topology, options.method, file)
        results[name] = {"placement": placement, **measure(trace, device_LE, topology)}
        show(name, placement, results[name])
    print(json.dumps({"benchmark": "pruning", "topology": topology.to_json(), "traces": results}))


if __name__ == "__main__":
    main()
