"""The options with which a verb that runs a model prunes destinations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.errors import ConfigError

if TYPE_CHECKING:
    from coterie.evaluate.change import Change
    from coterie.placement.placement import Placement
    from coterie.progress import Progress
    from coterie.pruning.fitting import RuleChoice
    from coterie.topology import Topology

AUTO = "auto"
FLOOR_HELP = "Least share of its weight a token keeps (priced); auto: where the target costs least."
_DEFAULTS = {"rule": "cap", "floor": AUTO, "topology": None, "placement": None, "fit": None, "renormalise": None}


@dataclass(frozen=True)
class PruningOptions:
    """The options that ask for destination pruning, as they were written."""

    prune: str | None
    peak: str | None
    rule: str
    floor: str
    topology: str | None
    placement: Path | None
    fit: Path | None
    renormalise: bool | None

    @property
    def wanted(self) -> bool:
        """Whether pruning was asked for."""
        return self.prune is not None or self.peak is not None

    def check(self) -> None:
        """Refuse what cannot be, or would be ignored, before a model is loaded."""
        if self.wanted:
            self._choice()
            self._devices()
            if self.fit is not None and not self.fit.exists():
                raise ConfigError(f"--fit {self.fit} does not exist; record a trace with coterie record")
            return
        for option, default in _DEFAULTS.items():
            if getattr(self, option) != default:
                raise ConfigError(f"--{option} belongs to pruning; give --prune, e.g. --prune 0.2, or --peak")

    def changes(self, model: Any, listen: Progress) -> list[Change]:
        """The change of the model, if one is wanted."""
        if not self.wanted:
            return []
        from coterie.evaluate.changes import pruning
        from coterie.trace.open import open_trace

        placement, topology = self._devices()
        return [
            pruning(
                model, self._choice(), placement=placement, topology=topology,
                trace=None if self.fit is None else open_trace(self.fit, progress=listen),
                renormalise=self.renormalise, progress=listen,
            )
        ]  # fmt: skip

    def _devices(self) -> tuple[Placement | None, Topology | None]:
        from coterie.placement.placement import Placement
        from coterie.topology import Topology

        if self.placement is not None:
            placed = Placement.load(self.placement)
            return replace(placed, topology=topology_of(placed, self.topology, self.placement)), None
        if self.topology is None:
            raise ConfigError("pruning needs devices; give --topology, e.g. --topology 8, or --placement")
        return None, Topology.parse(self.topology)

    def _choice(self) -> RuleChoice:
        from coterie.pruning.fitting import RuleChoice
        from coterie.units import parse_fraction

        p, peak = (None if value is None else parse_fraction(value) for value in (self.prune, self.peak))
        return RuleChoice(self.rule, p, peak, parse_floor(self.floor))


def parse_floor(text: str) -> float | None:
    """A floor as it was written; None for one that is to be chosen."""
    from coterie.units import parse_fraction

    return None if text == AUTO else parse_fraction(text)


def topology_of(placement: Placement, topology: str | None, file: Path) -> Topology:
    """The topology of a placement; a given one may bring other link costs, but must have its nodes and devices.

    Raises:
        ConfigError: when the given topology has other nodes or devices than the placement was made for.
    """
    from coterie.topology import Topology

    made_for = placement.topology
    if topology is None:
        return made_for
    given = Topology.parse(topology)
    if (given.num_nodes, given.devices_per_node) != (made_for.num_nodes, made_for.devices_per_node):
        raise ConfigError(
            f"--topology {given} has {given.num_nodes} nodes of {given.devices_per_node} devices, {file} was made for "
            f"{made_for.num_nodes} of {made_for.devices_per_node}; leave --topology out to use the placement's"
        )
    return replace(given, slots_per_device=made_for.slots_per_device)
