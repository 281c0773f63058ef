"""The placements that tuning chooses from: the baselines, and a spectrum from least traffic to best balance."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from coterie.errors import ConfigError
from coterie.placement import driver
from coterie.placement.candidates import Setting
from coterie.placement.placement import Placement
from coterie.placement.spectrum_files import load_spectrum


@dataclass(frozen=True)
class Candidate:
    """A placement and its name; of a spectrum, `METHOD-k` is the k-th point, 0 having the least traffic."""

    name: str
    placement: Placement


def make_candidates(
    setting: Setting, points: int, method: str = "coterie", heldout: float = 0.2, folder: Path | None = None
) -> list[Candidate]:
    """Linear, EPLB, CAP's Algorithm 1 and the points of a spectrum, fitted on the earlier part of the trace.

    With copies all have as many: those of linear and CAP are what `placement.copy_baselines` says.

    Args:
        setting: trace, topology, objective, seed.
        points: of the spectrum, at most.
        method: whose spectrum.
        heldout: share of the tokens that no placement sees.
        folder: a spectrum that was written before (`coterie place --spectrum`), instead of making one.

    Raises:
        InfeasiblePlacement: when a spectrum from a folder is for another model.
        ConfigError: when it is for other devices, or with another number of copies.
    """
    made = [Candidate(name, driver.place(setting, name, heldout=heldout)) for name in ("linear", "eplb", "cap")]
    if folder is None:
        found = driver.spectrum(setting, points, method, heldout)
    else:
        found = load_spectrum(folder)
        for placement in found:
            require_fit(placement, setting)
            if placement.num_copies != setting.redundant:
                raise ConfigError(
                    f"{folder} has placements with {placement.num_copies} copies of experts a layer, asked for are "
                    f"{setting.redundant}; give --redundant {placement.num_copies}, or place again"
                )
        method = str(found[0].method.get("name", "spectrum"))
    return [*made, *(Candidate(f"{method}-{number}", placement) for number, placement in enumerate(found))]


def require_fit(placement: Placement, setting: Setting) -> None:
    """Raise unless a placement is for the setting's model and devices.

    Raises:
        InfeasiblePlacement: for another model.
        ConfigError: for other nodes or devices.
    """
    placement.require_model(setting.trace.spec, "the trace")
    mine, asked = placement.topology, setting.topology
    if (mine.num_nodes, mine.devices_per_node) != (asked.num_nodes, asked.devices_per_node):
        raise ConfigError(f"a placement for {mine} devices, the topology is {asked}; place for that topology again")
