"""Candidates of every layer of a model, and what each costs on any part of the trace."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.placement.methods import get_method
from coterie.placement.metrics import LayerMetrics, measure_layer
from coterie.placement.objective import Objective
from coterie.placement.parallel import map_layers
from coterie.placement.path import Path, build_path
from coterie.placement.problem import build_problem
from coterie.progress import Progress
from coterie.topology import Topology
from coterie.trace.routing_trace import RoutingTrace, TokenSelector


@dataclass(frozen=True)
class Setting:
    """What every step of placing shares.

    Attributes:
        trace: the routing.
        topology: where experts can live.
        objective: what is minimised.
        seed: of every tie and search.
        keep_groups: whether router groups stay whole.
        progress: told how far it is.
    """

    trace: RoutingTrace
    topology: Topology
    objective: Objective
    seed: int
    keep_groups: bool
    progress: Progress


@dataclass(frozen=True)
class Measured:
    """Metrics of every candidate of every layer on one part of the trace.

    Attributes:
        layers: for each layer the metrics of each candidate.
    """

    layers: list[list[LayerMetrics]]

    def values(self, name: str) -> list[NDArray[np.float64]]:
        """A metric of each candidate, for each layer [A]."""
        return [np.array([getattr(metrics, name) for metrics in layer]) for layer in self.layers]

    def costs(self, objective: Objective) -> list[NDArray[np.float64]]:
        """The cost (without balance) of each candidate, for each layer [A]."""
        return [np.array([objective.cost(metrics) for metrics in layer]) for layer in self.layers]

    def at(self, choice_L: NDArray[np.int64]) -> list[LayerMetrics]:
        """The metrics of the chosen candidates, one for each layer."""
        return [layer[choice] for layer, choice in zip(self.layers, choice_L, strict=True)]


@dataclass(frozen=True)
class Candidates:
    """What a method proposes for a model, fitted on one part of its trace.

    Attributes:
        devices: for each layer [A, E] device of each expert.
        fit: their metrics on the tokens they were fitted on.
        path: the way through them from cheapest to most balanced.
    """

    devices: list[NDArray[np.int64]]
    fit: Measured
    path: Path

    def placement(self, point: int) -> NDArray[np.int64]:
        """The device of every expert at a point of the path, [L, E]."""
        return np.stack([rows[choice] for rows, choice in zip(self.devices, self.path.choice(point), strict=True)])


def propose(setting: Setting, method: str, tokens: TokenSelector) -> Candidates:
    """Candidates of every layer by the named method, fitted on the selected tokens.

    Raises:
        ConfigError: for an unknown method.
        InfeasiblePlacement: when the experts do not fit the topology.
    """
    place = get_method(method)

    def one(layer: int) -> tuple[NDArray[np.int64], list[LayerMetrics]]:
        problem = build_problem(setting.trace, layer, setting.topology, tokens, setting.keep_groups)
        devices_AE = place(problem, setting.objective, setting.seed + layer)
        return devices_AE, _measure_rows(setting, layer, devices_AE, tokens)

    results = map_layers(one, setting.trace.num_layers, f"placing ({method})", setting.progress)
    fit = Measured([metrics for _, metrics in results])
    path = build_path(fit.costs(setting.objective), fit.values("balance"))
    return Candidates([devices for devices, _ in results], fit, path)


def measure_candidates(setting: Setting, candidates: Candidates, tokens: TokenSelector) -> Measured:
    """Metrics of every candidate on other tokens."""

    def one(layer: int) -> list[LayerMetrics]:
        return _measure_rows(setting, layer, candidates.devices[layer], tokens)

    return Measured(map_layers(one, setting.trace.num_layers, "measuring", setting.progress))


def _measure_rows(
    setting: Setting, layer: int, devices_AE: NDArray[np.int64], tokens: TokenSelector
) -> list[LayerMetrics]:
    return [measure_layer(setting.trace, layer, row, setting.topology, tokens) for row in devices_AE]
