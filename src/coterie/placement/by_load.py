"""A placement from loads alone: EPLB, the one method that needs no company."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import coterie
from coterie.placement.balance import eplb, imbalance, linear
from coterie.placement.placement import Placement
from coterie.placement.problem import LayerProblem
from coterie.spec import MoESpec
from coterie.topology import Topology
from coterie.trace.load_table import LoadTable, halves


def balance(load_LE: NDArray[np.float64], device_LE: NDArray[np.int64], topology: Topology) -> float:
    """B, the mean over layers; a layer without any load counts as even."""
    return float(np.mean([
        imbalance(np.bincount(device_E, weights=load_E, minlength=topology.num_devices), topology.speeds())
        for load_E, device_E in zip(load_LE, device_LE, strict=True)
    ]))  # fmt: skip


def place_by_load(table: LoadTable, topology: Topology, spec: MoESpec) -> tuple[Placement, dict[str, Any]]:
    """EPLB's placement from the earlier half of the steps, and its B and linear's on both halves.

    Where the table has one step only, all of it is fitted and nothing is held out.

    Args:
        table: the loads.
        topology: where experts can live.
        spec: the model; its layers and experts must be the table's.

    Returns:
        The placement, whose metrics hold B alone, and the figures ready for JSON: for "linear" and "eplb" B on "fit"
        and, with more than one step, on "heldout".

    Raises:
        InfeasiblePlacement: when the experts do not fit the topology.
    """
    parts = dict(zip(("fit", "heldout"), halves(table), strict=False))
    slots_G = topology.slots(spec.num_experts)
    placed = np.stack([eplb(_problem(load_E, topology, slots_G, spec)) for load_E in parts["fit"]])
    in_order = np.tile(linear(slots_G), (len(placed), 1))
    figures = {
        name: {part: balance(load_LE, rows, topology) for part, load_LE in parts.items()}
        for name, rows in (("linear", in_order), ("eplb", placed))
    }
    method = {
        "name": "eplb", "from": "loads alone", "loads": dict(table.provenance), "format": table.format,
        "coterie": coterie.__version__,
    }  # fmt: skip
    metrics = {part: {"balance": value} for part, value in figures["eplb"].items()}
    return Placement.from_devices(placed, topology, spec, method, metrics), figures


def _problem(
    load_E: NDArray[np.float64], topology: Topology, slots_G: NDArray[np.int64], spec: MoESpec
) -> LayerProblem:  # fmt: skip
    """What EPLB looks at; nothing is known of the tokens."""
    experts = load_E.size
    none = np.zeros(0, dtype=np.int64)
    load: Any = load_E
    return LayerProblem(
        np.zeros((0, 1), dtype=np.int32), none, none.astype(np.int32), 0, load,
        np.zeros((experts, experts), dtype=np.int64), topology, slots_G, 1, spec.num_groups,
    )  # fmt: skip
