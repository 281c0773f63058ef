"""What the page of a trace and its placements shows, counted: everything here is on held-out sequences.

With slots for copies the methods' placements have copies too, and all are measured under one dispatch rule; what the
other rules leave of each is counted beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, InfeasiblePlacement
from coterie.parallel.candidates import require_fit
from coterie.placement.candidates import Candidates, Setting, measure_candidates, propose
from coterie.placement.copies import RULES
from coterie.placement.driver import choose, spaced_points
from coterie.placement.metrics import LayerMetrics, average, measure
from coterie.placement.numbering import EXPERT_ORDER_KEY, expert_order_of_placement, require_same_numbering
from coterie.placement.placement import Placement
from coterie.profile.load import trace_load
from coterie.trace.splits import Split, split

WINDOWS = 16
SPECTRUM_POINTS = 12
BASELINES = ("linear", "eplb", "cap")
ADJUSTED = "cap-spectrum"
OURS = "coterie"


@dataclass(frozen=True)
class Shown:
    """A placement on the page.

    Attributes:
        devices: [L, E] device of each expert; with copies [L, E, G] bool, the devices that hold each.
        layers: its metrics on the held-out part.
        seen: whether it may have been fitted on tokens that it is measured on.
        by_rule: with copies, the means over layers under every dispatch rule.
    """

    devices: NDArray[Any]
    layers: list[LayerMetrics]
    seen: bool = False
    by_rule: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def num_slots(self) -> int:
        """Slots of a layer, on all devices together."""
        return int(self.devices[0].sum()) if self.devices.ndim == 3 else int(self.devices.shape[1])

    def slots(self, layer: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The expert in every slot of a layer, [P], device by device, and the device of the slot, [P]."""
        held = self.devices[layer]
        if held.ndim == 2:
            device_P, expert_P = np.nonzero(held.T)
            return expert_P, device_P
        order_P = np.argsort(held, kind="stable")
        return order_P, held[order_P]

    def means(self) -> dict[str, float]:
        """The mean over layers of every metric."""
        return average(self.layers)

    def traffic_GG(self) -> NDArray[np.float64]:
        """Copies per token from home (row) to device (column), the mean over layers."""
        mean: NDArray[np.float64] = np.mean([layer.traffic_GG for layer in self.layers], axis=0)
        return mean


@dataclass(frozen=True)
class PlacementReport:
    """The figures of a page.

    Attributes:
        setting: trace, topology, objective, seed.
        parts: which tokens fitted and which measured.
        placements: by name; linear first.
        main: the name of the one that experts are ordered by.
        spectra: for each method (devices per token, B) from the least traffic to the best balance.
        load_LE: [L, E] token-expert pairs of the held-out part.
        windows: first token of each window of consecutive tokens of the whole trace.
        over_time: for each placement the means over layers in each window.
    """

    setting: Setting
    parts: Split
    placements: Mapping[str, Shown]
    main: str
    spectra: Mapping[str, list[tuple[float, float]]]
    load_LE: NDArray[np.int64]
    windows: list[int]
    over_time: Mapping[str, list[dict[str, float]]]

    def device_load(self, name: str) -> NDArray[np.float64]:
        """How long every device computes over what an even share takes, [L, G]; on equal devices load over mean."""
        load_LG = np.stack([layer.load_G for layer in self.placements[name].layers])
        speed_G = self.setting.topology.speeds()
        even_L1 = np.maximum(load_LG.sum(axis=1, keepdims=True) / speed_G.sum(), 1e-12)
        relative_LG: NDArray[np.float64] = load_LG / speed_G / even_L1
        return relative_LG


def gather(
    setting: Setting, given: Mapping[str, Placement], *, heldout: float = 0.2, quick: bool = False
) -> PlacementReport:
    """Place, measure and count everything that the page shows.

    Args:
        setting: trace, topology, objective, seed.
        given: placements to show beside linear, EPLB and CAP's Algorithm 1, by name.
        heldout: share of the tokens, the latest sequences, that only measure.
        quick: leave out Coterie's own search, which takes longest.

    Raises:
        ConfigError: for placements of other devices or another numbering of experts, or a reserved name.
        InfeasiblePlacement: for placements of another model, or with other slots than the setting's; ones without
            copies may stand beside methods with them.
    """
    trace, topology = setting.trace, setting.topology
    for name, placement in given.items():
        if name in (*BASELINES, OURS):
            raise ConfigError(f"a placement is called {name!r}, which is a method's name here; rename its file")
        require_fit(placement, setting)
        _require_slots(name, placement, setting)
        held = trace.provenance.get(EXPERT_ORDER_KEY)
        require_same_numbering(expert_order_of_placement(placement.method), name, held, "the trace")
    parts = split(trace, heldout)
    devices, spectra = _placed(setting, parts, quick)
    devices |= {name: placement.where() for name, placement in given.items()}
    placements = {
        name: _shown(setting, rows, parts, _seen(given.get(name), setting, parts)) for name, rows in devices.items()
    }
    main = next(iter(given), OURS if OURS in devices else "cap")
    ends = np.linspace(0, trace.num_tokens, min(WINDOWS, max(1, trace.num_tokens // 200)) + 1).round().astype(int)
    windows = [slice(int(start), int(end)) for start, end in pairwise(ends)]
    over_time = {
        name: [average(measure(trace, devices[name], topology, window, setting.dispatch)) for window in windows]
        for name in dict.fromkeys(("linear", main, *given))
    }
    return PlacementReport(
        setting, parts, placements, main, spectra, trace_load(trace, parts.second), [one.start for one in windows],
        over_time,
    )  # fmt: skip


def _require_slots(name: str, placement: Placement, setting: Setting) -> None:
    """Raise unless the methods place into as many slots; more would flatter whoever has them."""
    copies, asked = placement.num_copies, setting.redundant
    if copies not in (0, asked):
        raise InfeasiblePlacement(
            f"{name} has {copies} copies of experts a layer, the methods beside it {asked}; give --redundant {copies}; "
            "placements with several numbers of copies need a page each"
        )
    mine = placement.slots_per_device.tolist()
    theirs = setting.topology.slots(setting.trace.spec.num_experts + asked).tolist()
    if copies == asked and mine != theirs:
        raise InfeasiblePlacement(
            f"{name} has {mine} slots on its devices, {setting.topology} gives {theirs}; leave --topology out, or "
            "place for that topology again"
        )


def _shown(setting: Setting, devices: NDArray[Any], parts: Split, seen: bool) -> Shown:
    trace, topology, unseen = setting.trace, setting.topology, parts.second
    by_rule = {}
    if devices.ndim == 3:
        by_rule = {rule: average(measure(trace, devices, topology, unseen, rule)) for rule in RULES}
    return Shown(devices, measure(trace, devices, topology, unseen, setting.dispatch), seen, by_rule)


def _placed(
    setting: Setting, parts: Split, quick: bool
) -> tuple[dict[str, NDArray[Any]], dict[str, list[tuple[float, float]]]]:
    """The methods' own placements, and the spectra of CAP and Coterie, fitted on the earlier part."""
    devices: dict[str, NDArray[Any]] = {name: propose(setting, name, parts.first).placement(0) for name in BASELINES}
    spectra = {}
    if not setting.redundant:  # CAP's swaps know no copies
        spectra[ADJUSTED] = _points(setting, propose(setting, ADJUSTED, parts.first), parts)
    if not quick:
        candidates, point = choose(setting, OURS, parts.first)
        devices[OURS] = candidates.placement(point)
        spectra[OURS] = _points(setting, candidates, parts)
    return devices, spectra


def _points(setting: Setting, candidates: Candidates, parts: Split) -> list[tuple[float, float]]:
    unseen = measure_candidates(setting, candidates, parts.second)
    chosen = spaced_points(candidates.path.means(candidates.fit.values("balance")), SPECTRUM_POINTS)
    visits, balances = (candidates.path.means(unseen.values(name)) for name in ("dpt", "balance"))
    return [(float(visits[point]), float(balances[point])) for point in chosen]


def _seen(placement: Placement | None, setting: Setting, parts: Split) -> bool:
    """Whether a given placement comes from this trace and held out less of it than the page measures on."""
    if placement is None:
        return False
    about: Any = placement.method.get("trace") or {}
    if about.get("fingerprint") != setting.trace.fingerprint():
        return False
    held = placement.method.get("heldout")
    return not isinstance(held, float) or split_size(setting, held) < parts.num_second


def split_size(setting: Setting, heldout: float) -> int:
    """Tokens of the later part of a split; 0 where nothing is held out."""
    return split(setting.trace, heldout).num_second if 0 < heldout < 1 else 0
