"""From measured times to the measured fields of a topology."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from coterie.parallel.fit import Line, fit_line
from coterie.topology import Topology

_GROWS = 1.01


@dataclass(frozen=True)
class Point:
    """One measured size.

    Attributes:
        units: bytes that one device (within nodes) or one node (across) sends and gets back, or token-expert pairs.
        seconds: of the slowest rank, in the best of the repeats: other work on a machine only ever adds.
    """

    units: float
    seconds: float


def with_measured(topology: Topology, found: Mapping[str, Sequence[Point]], told: Mapping[str, Any]) -> Topology:
    """The topology with lines fitted through measured points.

    A point of a link is a dispatch and a combine: two exchanges, so a fixed time is half the line's. Where devices are
    alone on their nodes, their own link is the node's. The cost c of crossing nodes becomes the ratio of what a device
    gets within its node to its share of the uplink, at least 1.
    """
    lines = {name: fit_line([p.units for p in points], [p.seconds for p in points]) for name, points in found.items()}
    fields: dict[str, Any] = {}
    if "compute" in lines:
        fields |= {"compute_base_s": lines["compute"].base, "compute_pair_s": lines["compute"].slope}
    for name in ("intra", "inter"):
        if name in lines:
            fields |= {
                f"{name}_bandwidth_bytes_per_s": _rate(lines[name], found[name]),
                f"{name}_latency_s": lines[name].base / 2,
            }  # fmt: skip
    if "inter" in lines:
        uplink = fields["inter_bandwidth_bytes_per_s"]
        own = fields.setdefault("intra_bandwidth_bytes_per_s", uplink)
        fields["inter_cost"] = max(1.0, round(own * topology.devices_per_node / uplink, 3))
    measured = {
        **told,
        "fits": {
            name: {
                "worst_residual": round(lines[name].residual, 4),
                "points": [{"units": p.units, "seconds": p.seconds} for p in points],
            }
            for name, points in found.items()
        },
        "units": "compute: token-expert pairs; links: bytes a device (intra) or node (inter) sends and gets back",
    }
    return replace(topology, **fields, measured=measured)


def _rate(line: Line, points: Sequence[Point]) -> float:
    """Bytes per second of a link: what was sent out and came back went one after another.

    Where times do not grow with the bytes, the best rate seen: the link is at least as fast.
    """
    grows = line.at(max(point.units for point in points)) > _GROWS * line.base
    return 1 / line.slope if grows else max(point.units / point.seconds for point in points)
