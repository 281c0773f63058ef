"""What studies of placements share: fitting here, measuring there, and what every result says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray

import coterie
from coterie.placement.candidates import Setting
from coterie.placement.driver import choose, describe_trace
from coterie.placement.metrics import average, measure
from coterie.topology import Topology
from coterie.trace.routing_trace import RoutingTrace, TokenSelector

MEASURES = {
    "dpt": "devices per token",
    "npt": "nodes per token",
    "balance": "B, largest device load over mean",
    "peak_traffic": "peak traffic, visits per token to the busiest device",
}
"""The metrics that do not depend on where tokens live, and what pages call them."""


def axis_label(measure: str) -> str:
    """A metric's name, short enough to stand beside a plot on a phone."""
    return MEASURES[measure].partition(",")[0]


def fit(setting: Setting, method: str, tokens: TokenSelector) -> NDArray[np.int64]:
    """The default pick of a method, made from the selected tokens alone: the device of every expert, [L, E]."""
    candidates, point = choose(setting, method, tokens)
    return candidates.placement(point)


def means(
    trace: RoutingTrace, device_LE: NDArray[np.int64], topology: Topology, tokens: TokenSelector
) -> dict[str, float]:
    """The mean over layers of every metric on the selected tokens."""
    return average(measure(trace, device_LE, topology, tokens))


def head(
    kind: str, traces: Mapping[str, RoutingTrace], setting: Setting, configuration: Mapping[str, Any]
) -> dict[str, Any]:
    """What a result says of itself: traces, devices, seed, versions, and what was asked."""
    return {
        "study": kind,
        "traces": {name: describe_trace(trace) for name, trace in traces.items()},
        "topology": setting.topology.to_json(),
        "objective": setting.objective.to_json(),
        "seed": setting.seed,
        "versions": {"coterie": coterie.__version__, "numpy": version("numpy")},
        "configuration": dict(configuration),
    }


def notes(result: Mapping[str, Any], *further: str) -> list[str]:
    """The head of a result as a page says it, and further remarks."""
    lines = []
    for name, about in result["traces"].items():
        synthetic = "SYNTHETIC, " if about["synthetic"] else ""
        lines.append(
            f"{name}: {synthetic}{about['model']}, {about['layers']} MoE layers of {about['experts']} experts, top-"
            f"{about['top_k']}, {about['tokens']:,} tokens in {about['sequences']:,} sequences."
        )
    devices, versions = Topology.from_json(result["topology"]), result["versions"]
    made = ", ".join(f"{name} {number}" for name, number in versions.items())
    return [
        *lines,
        *further,
        f"Devices: {devices}. Counts on recorded routing, means over layers; no time is measured. Seed "
        f"{result['seed']}; made with {made}.",
    ]
