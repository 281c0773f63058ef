"""The options with which a verb that runs a model prunes destinations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.errors import ConfigError

if TYPE_CHECKING:
    from coterie.evaluate.change import Change
    from coterie.progress import Progress
    from coterie.pruning.fitting import RuleChoice

_DEFAULTS = {"rule": "cap", "floor": "0", "topology": None, "placement": None, "fit": None, "renormalise": None}


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
        """Refuse options that would be ignored, before a model is loaded."""
        if self.wanted:
            self._choice()
            if self.placement is None and self.topology is None:
                raise ConfigError("pruning needs devices; give --topology, e.g. --topology 8, or --placement")
            return
        for option, default in _DEFAULTS.items():
            if getattr(self, option) != default:
                raise ConfigError(f"--{option} belongs to pruning; give --prune, e.g. --prune 0.2, or --peak")

    def changes(self, model: Any, listen: Progress) -> list[Change]:
        """The change of the model, if one is wanted."""
        if not self.wanted:
            return []
        from coterie.evaluate.changes import pruning
        from coterie.placement.placement import Placement
        from coterie.topology import Topology
        from coterie.trace.open import open_trace

        return [
            pruning(
                model, self._choice(),
                placement=None if self.placement is None else Placement.load(self.placement),
                topology=None if self.topology is None else Topology.parse(self.topology),
                trace=None if self.fit is None else open_trace(self.fit, progress=listen),
                renormalise=self.renormalise, progress=listen,
            )
        ]  # fmt: skip

    def _choice(self) -> RuleChoice:
        from coterie.pruning.fitting import RuleChoice
        from coterie.units import parse_fraction

        p, peak = (None if value is None else parse_fraction(value) for value in (self.prune, self.peak))
        return RuleChoice(self.rule, p, peak, parse_fraction(self.floor))
