"""Nodes that tokens visit, against CAP's, and how few any placement could make them visit.

The default pick is fitted on the earlier half of the sequences and measured on the later half, means over layers.
Beside it stands what dividing the experts between nodes reaches if nothing else counts, neither balance nor devices:
the best of many searches from random divisions, fitted on the earlier half and (an oracle) on the measured half itself.
A search proves nothing; in how many of its starts the best is found says how sure it is.

    python benchmarks/nodes.py [TRACE ...] [--topology 2x4] [--starts 40] [--seed 0]

Prints a table for each trace, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

import coterie
from coterie.placement.driver import choose, prepare
from coterie.placement.metrics import average, measure, measure_layer
from coterie.placement.objective import Objective
from coterie.placement.problem import build_problem
from coterie.placement.refine import search_from
from coterie.topology import Topology
from coterie.trace.open import open_trace
from coterie.trace.routing_trace import RoutingTrace, TokenSelector
from coterie.trace.splits import split

TRACES = ("dsv2lite-law", "dsv2lite-intent")
HELDOUT = 0.5
VISITS = Objective(device=1.0, node=0.0, peak=0.0, balance=0.0)
FIGURES = ("npt", "dpt", "peak_traffic", "balance")


def divided(
    trace: RoutingTrace, nodes: Topology, tokens: TokenSelector, starts: int, seed: int
) -> tuple[NDArray[np.int64], int]:
    """The node of every expert, [L, E], that makes these tokens visit the fewest nodes; nodes are `nodes`' devices.

    Returns:
        the best of all starts in every layer, and how many of the starts find it in the layer where the fewest do.
    """
    rng = np.random.default_rng(seed)
    even_E = np.repeat(np.arange(nodes.num_devices), nodes.slots(trace.spec.num_experts))
    best, surest = [], starts
    for layer in range(trace.num_layers):
        problem = build_problem(trace, layer, nodes, tokens)
        found = [
            search_from(problem, VISITS, seed + start, 1, [rng.permutation(even_E)], even_E)[0]
            for start in range(starts)
        ]
        visited = np.array([measure_layer(trace, layer, node_E, nodes, tokens).dpt for node_E in found])
        best.append(found[int(np.argmin(visited))])
        surest = min(surest, int((visited <= visited.min() + 1e-9).sum()))
    return np.stack(best), surest


def compare(name: str, topology: Topology, starts: int, seed: int) -> dict[str, Any]:
    """All figures of one trace, printed and returned."""
    trace = open_trace(name)
    parts, setting = split(trace, HELDOUT), prepare(trace, topology, seed=seed)
    rows: dict[str, dict[str, float]] = {}
    for method in ("linear", "cap", "coterie"):
        candidates, point = choose(setting, method, parts.first)
        found = average(measure(trace, candidates.placement(point), topology, parts.second))
        rows[method] = {figure: found[figure] for figure in FIGURES}
    nodes, agreed = Topology(1, topology.num_nodes), {}
    for label, tokens in (("nodes alone", parts.first), ("the same, fitted where measured", parts.second)):
        node_LE, agreed[label] = divided(trace, nodes, tokens, starts, seed)
        rows[label] = {"npt": average(measure(trace, node_LE, nodes, parts.second))["dpt"]}
    print(f"\n{name} on {topology}, held out; over cap's in brackets")
    print(f"  {'':32}" + "".join(f"{figure:>20}" for figure in FIGURES))
    for label, row in rows.items():
        figures = "".join(f"{value:11.3f} ({value / rows['cap'][figure]:.3f}x)" for figure, value in row.items())
        print(f"  {label:32}{figures}" + (f"   found by {agreed[label]} of {starts} starts" if label in agreed else ""))
    return {"heldout": rows, "starts_that_agree": agreed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="*", default=TRACES)
    parser.add_argument("--topology", default="2x4")
    parser.add_argument("--starts", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    topology = Topology.parse(arguments.topology)
    traces = {name: compare(name, topology, arguments.starts, arguments.seed) for name in arguments.traces}
    about = {"topology": str(topology), "starts": arguments.starts, "seed": arguments.seed}
    print(json.dumps({"benchmark": "nodes", **about, "coterie": coterie.__version__, "traces": traces}))


if __name__ == "__main__":
    main()
