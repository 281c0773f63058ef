"""Placements with copies of experts: peak traffic against EPLB's with as many copies, by the same dispatch rule.

Everything is fitted on the earlier half of the sequences and measured on the later half, means over layers. A token
takes the copy that adds no device, else the one whose device has the least to do so far (fewest-devices); the last
columns show what is left of it under two rules that look at one expert at a time, as engines' do.

    python benchmarks/replicas.py [TRACE ...] [--topology 8] [--redundant 8] [--balance 1.05] [--every 1] [--seed 0]

Prints for each trace EPLB, CAP with EPLB's copies, the default pick, the pick within `--balance` on the fitting part
and the pick that is fitted for the rule nearest, each with copies; the default pick and CAP without; then one JSON
line. `--every 4` looks at one layer in four.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

import coterie
from coterie.cli.common import warnings_as_notes
from coterie.placement.candidates import Setting
from coterie.placement.copies import RULES
from coterie.placement.driver import choose, prepare
from coterie.placement.metrics import average, measure
from coterie.topology import Topology
from coterie.trace.open import open_trace
from coterie.trace.routing_trace import RoutingTrace
from coterie.trace.splits import split

TRACES = ("dsv2lite-law", "dsv2lite-intent")
HELDOUT = 0.5


def some_layers(trace: RoutingTrace, every: int) -> RoutingTrace:
    """One layer in so many."""
    if every == 1:
        return trace
    cut = slice(every // 2, None, every)
    ids = trace.expert_ids[cut]
    kept = None if trace.kept is None else trace.kept[cut]
    spec = replace(trace.spec, num_layers=len(ids), layer_ids=())
    return replace(trace, expert_ids=ids, kept=kept, weights=None, spec=spec)


def figures(setting: Setting, method: str, balance: float | None = None) -> dict[str, Any]:
    """Held-out figures of a method's pick under every dispatch rule."""
    parts = split(setting.trace, HELDOUT)
    candidates, point = choose(setting, method, parts.first, balance)
    placed = candidates.placement(point)
    rules = RULES if setting.redundant else RULES[:1]
    return {rule: average(measure(setting.trace, placed, setting.topology, parts.second, rule)) for rule in rules}


def compare(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures of one trace, printed and returned."""
    trace, topology = some_layers(open_trace(name), arguments.every), Topology.parse(arguments.topology)
    copied = prepare(trace, topology, seed=arguments.seed, redundant=arguments.redundant)
    with warnings_as_notes():
        rows = {
            "eplb": figures(copied, "eplb"),
            "cap": figures(copied, "cap"),
            "coterie": figures(copied, "coterie"),
            f"coterie, B <= {arguments.balance:g}": figures(copied, "coterie", arguments.balance),
            "coterie for nearest": figures(replace(copied, dispatch="nearest"), "coterie"),
            "coterie, no copies": figures(prepare(trace, topology, seed=arguments.seed), "coterie"),
        }
    rows["cap, no copies"] = figures(prepare(trace, topology, seed=arguments.seed), "cap")
    base = rows["eplb"][RULES[0]]["peak_traffic"]
    print(f"\n{name}: {trace.num_layers} layers on {topology}, {arguments.redundant} slots for copies, held out")
    print(
        f"  {'':22}{'devices':>9}{'nodes':>8}{'B':>8}{'peak':>8}{'vs eplb':>9}"
        + "".join(f"{'peak, ' + r:>15}" for r in RULES[1:])
    )
    for label, by_rule in rows.items():
        mine = by_rule[RULES[0]]
        others = "".join(f"{by_rule[rule]['peak_traffic']:15.3f}" for rule in RULES[1:] if rule in by_rule)
        peak = mine["peak_traffic"]
        own = f"{mine['dpt']:9.3f}{mine['npt']:8.3f}{mine['balance']:8.3f}{peak:8.3f}{peak / base:9.3f}"
        print(f"  {label:22}{own}{others}")
    return {"layers": trace.num_layers, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="*", default=TRACES)
    parser.add_argument("--topology", default="8")
    parser.add_argument("--redundant", type=int, default=8)
    parser.add_argument("--balance", type=float, default=1.05)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    traces = {name: compare(name, arguments) for name in arguments.traces}
    about = {name: getattr(arguments, name) for name in ("topology", "redundant", "balance", "every", "seed")}
    print(json.dumps({"benchmark": "replicas", **about, "coterie": coterie.__version__, "traces": traces}))


if __name__ == "__main__":
    main()
