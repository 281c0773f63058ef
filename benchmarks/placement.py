"""How much better placements are, on held-out tokens of real traces.

What a placement costs is what its tokens visit: devices per token (all bytes sent), peak traffic (an all-to-all ends
when its busiest device ends) and B (so does the computation). Everything is fitted on the earlier half of the
sequences, choices are validated on a slice of that half, and the later half only measures; means over layers.

    python benchmarks/placement.py [TRACE ...] [--topology 8] [--seed 0]

Prints for each trace every method, the default pick against CAP and EPLB, `--balance 1.07` against CAP, and the
coterie spectrum against CAP's own spectrum at equal B; then one JSON line.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np

from coterie.placement.candidates import Setting, measure_candidates, propose
from coterie.placement.driver import choose, compare, prepare
from coterie.placement.metrics import average
from coterie.topology import Topology
from coterie.trace.open import open_trace
from coterie.trace.splits import split

TRACES = ("dsv2lite-law", "dsv2lite-intent", "gptoss20b-decode")
HELDOUT = 0.5
BALANCE = 1.07


def ratios(rows: dict[str, Any], other: str) -> dict[str, float]:
    """The default pick's held-out figures as a share of another method's."""
    mine, theirs = rows["coterie"]["heldout"], rows[other]["heldout"]
    return {name: mine[name] / theirs[name] for name in ("dpt", "peak_traffic", "balance")}


def at_balance(setting: Setting, limit: float) -> dict[str, float]:
    """Held-out figures of the cheapest placement with B within a limit on the validation slice."""
    parts = split(setting.trace, HELDOUT)
    candidates, point = choose(setting, "coterie", parts.first, limit)
    return average(measure_candidates(setting, candidates, parts.second).at(candidates.path.choice(point)))


def spectrum_gap(setting: Setting) -> dict[str, float]:
    """CAP's whole spectrum against ours: at each of its points, its held-out cost over ours at equal or better B.

    Returns:
        the least and the mean of the ratio of costs over CAP's points; a least above 1 says that no point of CAP's
        spectrum is better than ours at equal B. "beyond" of CAP's "points" have a lower B than any of ours: with these
        there is no comparison.
    """
    parts = split(setting.trace, HELDOUT)
    held = {}
    for method in ("cap-spectrum", "coterie"):
        candidates = propose(setting, method, parts.first)
        measured = measure_candidates(setting, candidates, parts.second)
        cost = candidates.path.means(measured.costs(setting.objective))
        held[method] = (candidates.path.means(measured.values("balance")), cost)
    balance, cost = held["coterie"]
    found = []
    for limit, theirs in zip(*held["cap-spectrum"], strict=True):
        within = balance <= limit
        found.append(theirs / cost[within].min() if within.any() else np.nan)
    beyond = int(np.isnan(found).sum())
    return {
        "least": float(np.nanmin(found)), "mean": float(np.nanmean(found)), "beyond": beyond, "points": len(found)
    }  # fmt: skip


def measure(name: str, topology: Topology, seed: int) -> dict[str, Any]:
    """All figures of one trace, printed and returned."""
    setting = prepare(open_trace(name), topology, seed=seed)
    result = compare(setting, HELDOUT)
    rows = result["methods"]
    print(f"\n{name}: {result['trace']['fit_tokens']} tokens fitted, {result['trace']['heldout_tokens']} measured")
    print(f"  {'held out':10}{'DPT':>8}{'B':>8}{'peak':>8}{'remote peak':>13}{'seconds':>9}")
    for method, row in rows.items():
        held = row["heldout"]
        figures = f"{held['dpt']:8.3f}{held['balance']:8.3f}{held['peak_traffic']:8.3f}"
        print(f"  {method:10}{figures}{held['remote_peak_traffic']:13.3f}{row['seconds']:9.2f}")
    summary: dict[str, Any] = {"vs_cap": ratios(rows, "cap"), "vs_eplb": ratios(rows, "eplb")}
    balanced = at_balance(setting, BALANCE)
    summary["balance_1.07"] = {key: balanced[key] for key in ("dpt", "balance", "peak_traffic")}
    summary["balance_1.07"]["dpt_vs_cap"] = balanced["dpt"] / rows["cap"]["heldout"]["dpt"]
    summary["cap_spectrum_cost_over_ours"] = spectrum_gap(setting)
    for label, values in summary.items():
        print(f"  {label:28}" + "  ".join(f"{key} {value:.3f}" for key, value in values.items()))
    held = {
        method: {key: value for key, value in row["heldout"].items() if key != "layers"} for method, row in rows.items()
    }
    return {"heldout": held, **summary}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="*", default=TRACES)
    parser.add_argument("--topology", default="8")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    topology = Topology.parse(arguments.topology)
    traces = {name.split("/")[-1]: measure(name, topology, arguments.seed) for name in arguments.traces}
    print(json.dumps({"benchmark": "placement", "topology": str(topology), "seed": arguments.seed, "traces": traces}))


if __name__ == "__main__":
    main()
