"""Refinement against a state-of-the-art hypergraph partitioner, on devices per token alone.

A token's devices are the connectivity of its hyperedge, so Mt-KaHyPar (objective km1 = connectivity - 1, zero
imbalance: every device the same number of experts) solves the same problem when nothing else counts. It is run with
its QUALITY and DETERMINISTIC presets on two threads, five seeds each; refinement searches once, on one thread.
All on the earlier half of each trace, layer by layer; the later half tells whether the difference is real.

    python benchmarks/partitioner.py [TRACE ...] [--devices 8] [--layers N] [--seeds 5]
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import mtkahypar
import numpy as np

from coterie.placement.metrics import measure_layer
from coterie.placement.objective import Objective
from coterie.placement.problem import NO_EXPERT, LayerProblem, build_problem
from coterie.placement.refine import refine
from coterie.topology import Topology
from coterie.trace.open import open_trace
from coterie.trace.splits import split

TRACES = ("dsv2lite-law", "dsv2lite-intent", "gptoss20b-decode")
PRESETS = ("QUALITY", "DETERMINISTIC")
THREADS = 2


def best_partition(library: Any, problem: LayerProblem, preset: str, seeds: int) -> tuple[np.ndarray, float, float]:
    """The partition with the lowest km1 over seeds, the seconds of all runs and of one run (mean)."""
    context = library.context_from_preset(getattr(mtkahypar.PresetType, preset))
    devices = problem.num_devices
    context.set_partitioning_parameters(devices, 0.0, mtkahypar.Objective.KM1)
    context.logging = False
    size = problem.num_experts // devices
    context.set_individual_target_block_weights([size] * devices)
    edges = [row[row != NO_EXPERT].tolist() for row in problem.sets_UK]
    weights = problem.multiplicity_U.tolist()
    nodes = [1] * problem.num_experts
    best, found, seconds = np.inf, None, 0.0
    for seed in range(seeds):
        mtkahypar.set_seed(seed)
        graph = library.create_hypergraph(context, problem.num_experts, len(edges), edges, nodes, weights)
        started = time.perf_counter()
        partition = graph.partition(context)
        seconds += time.perf_counter() - started
        blocks = np.asarray(partition.get_partition(), dtype=np.int64)
        if (np.bincount(blocks, minlength=devices) == size).all() and partition.km1() < best:
            best, found = partition.km1(), blocks
    assert found is not None, "no run kept the block sizes exact"
    return found, seconds, seconds / seeds


def measure(library: Any, name: str, devices: int, layers: int | None, seeds: int) -> dict[str, Any]:
    """DPT on both halves and seconds, summed over layers, for refinement and each preset."""
    trace, topology = open_trace(name), Topology(1, devices)
    parts = split(trace, 0.5)
    objective = Objective(device=1.0, node=0.0, peak=0.0, balance=0.0)
    rows: dict[str, dict[str, list[float]]] = {}
    refine(build_problem(trace, 0, topology, parts.first), objective, 0, 1)  # compiled before it is timed
    for layer in range(min(layers or trace.num_layers, trace.num_layers)):
        problem = build_problem(trace, layer, topology, parts.first)
        started = time.perf_counter()
        placed = {"coterie": (refine(problem, objective, 0, 1)[0], time.perf_counter() - started, 0.0)}
        placed["coterie"] = (placed["coterie"][0], placed["coterie"][1], placed["coterie"][1])
        for preset in PRESETS:
            placed[preset] = best_partition(library, problem, preset, seeds)
        for method, (device_E, all_runs, one_run) in placed.items():
            row = rows.setdefault(method, {"fit": [], "heldout": [], "seconds": [], "seconds_one_run": []})
            row["fit"].append(measure_layer(trace, layer, device_E, topology, parts.first).dpt)
            row["heldout"].append(measure_layer(trace, layer, device_E, topology, parts.second).dpt)
            row["seconds"].append(all_runs)
            row["seconds_one_run"].append(one_run)
    totals = {
        method: {key: float(np.sum(v) if "seconds" in key else np.mean(v)) for key, v in row.items()}
        for method, row in rows.items()
    }
    best = np.minimum.reduce([rows[preset]["fit"] for preset in PRESETS]).mean()
    ours = totals["coterie"]
    print(f"\n{name}: {len(rows['coterie']['fit'])} layers, {devices} devices, best of {seeds} seeds a preset")
    print(f"  {'':15}{'DPT fit':>10}{'held out':>10}{'seconds':>10}{'one run':>10}")
    for method, row in totals.items():
        print(
            f"  {method:15}{row['fit']:10.4f}{row['heldout']:10.4f}{row['seconds']:10.2f}{row['seconds_one_run']:10.2f}"
        )
    fastest = min(totals[preset]["seconds_one_run"] for preset in PRESETS)
    summary = {"dpt_over_best": ours["fit"] / float(best), "time_over_one_run": ours["seconds"] / fastest}
    summary["time_over_all_runs"] = ours["seconds"] / sum(totals[preset]["seconds"] for preset in PRESETS)
    print("  coterie / best: " + "  ".join(f"{key} {value:.4f}" for key, value in summary.items()))
    return {**totals, **summary}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="*", default=TRACES)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--layers", type=int, default=None, help="only the first N layers")
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    library = mtkahypar.initialize(THREADS)
    results = {
        name.split("/")[-1]: measure(library, name, arguments.devices, arguments.layers, arguments.seeds)
        for name in arguments.traces
    }
    print(json.dumps({"benchmark": "partitioner", "devices": arguments.devices, "traces": results}))


if __name__ == "__main__":
    main()
