"""What the page of a trace and its placements shows, counted: everything here is on held-out sequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError
from coterie.parallel.candidates import require_fit
from coterie.placement.balance import linear
from coterie.placement.candidates import Candidates, Setting, measure_candidates, propose
from coterie.placement.driver import choose, spaced_points
from coterie.placement.metrics import LayerMetrics, average, measure
from coterie.placement.numbering import EXPERT_ORDER_KEY, expert_order_of_placement, require_same_numbering
from coterie.placement.placement import Placement
from coterie.profile.load import trace_load
from coterie.trace.splits import Split, split

WINDOWS = 16
SPECTRUM_POINTS = 12
BASELINES = ("linear", "eplb", "cap")
OURS = "coterie"


@dataclass(frozen=True)
class Shown:
    """A placement on the page.

    Attributes:
        device_LE: [L, E] device of each expert.
        layers: its metrics on the held-out part.
        seen: whether it may have been fitted on tokens that it is measured on.
    """

    device_LE: NDArray[np.int64]
    layers: list[LayerMetrics]
    seen: bool = False

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
        num_devices = self.setting.topology.num_devices
        load_LG = np.stack([
            np.bincount(device_E, weights=load_E, minlength=num_devices)
            for device_E, load_E in zip(self.placements[name].device_LE, self.load_LE, strict=True)
        ])  # fmt: skip
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
        InfeasiblePlacement: for placements of another model.
    """
    trace, topology = setting.trace, setting.topology
    for name, placement in given.items():
        if name in (*BASELINES, OURS):
            raise ConfigError(f"a placement is called {name!r}, which is a method's name here; rename its file")
        require_fit(placement, setting)
        placement.require_no_copies("a report")
        held = trace.provenance.get(EXPERT_ORDER_KEY)
        require_same_numbering(expert_order_of_placement(placement.method), name, held, "the trace")
    parts = split(trace, heldout)
    devices, spectra = _placed(setting, parts, quick)
    devices |= {name: placement.device_of_expert() for name, placement in given.items()}
    placements = {
        name: Shown(
            device_LE, measure(trace, device_LE, topology, parts.second), _seen(given.get(name), setting, parts)
        )
        for name, device_LE in devices.items()
    }
    main = next(iter(given), OURS if OURS in devices else "cap")
    ends = np.linspace(0, trace.num_tokens, min(WINDOWS, max(1, trace.num_tokens // 200)) + 1).round().astype(int)
    windows = [slice(int(start), int(end)) for start, end in pairwise(ends)]
    over_time = {
        name: [average(measure(trace, devices[name], topology, window)) for window in windows]
        for name in dict.fromkeys(("linear", main, *given))
    }
    return PlacementReport(
        setting, parts, placements, main, spectra, trace_load(trace, parts.second), [one.start for one in windows],
        over_time,
    )  # fmt: skip


def _placed(
    setting: Setting, parts: Split, quick: bool
) -> tuple[dict[str, NDArray[np.int64]], dict[str, list[tuple[float, float]]]]:
    """The methods' own placements, and the spectra of CAP and Coterie, fitted on the earlier part."""
    slots_G = setting.topology.slots(setting.trace.spec.num_experts)
    devices = {"linear": np.tile(linear(slots_G), (setting.trace.num_layers, 1))}
    for name in ("eplb", "cap"):
        devices[name] = propose(setting, name, parts.first).placement(0)
    adjusted = propose(setting, "cap-spectrum", parts.first)
    spectra = {"cap-spectrum": _points(setting, adjusted, parts)}
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
