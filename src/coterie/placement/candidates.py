"""Candidates of every layer of a model, and what each costs on any part of the trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.placement.copies import FEWEST_DEVICES
from coterie.placement.methods import get_copy_method, get_method
from coterie.placement.metrics import LayerMetrics, measure_layer
from coterie.placement.objective import Objective
from coterie.placement.parallel import map_layers
from coterie.placement.path import Path, build_path
from coterie.placement.problem import SEARCH_TOKENS, build_problem, windows
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
        redundant: slots of a layer for copies of experts.
        dispatch: the rule by which tokens choose copies (`copies.RULES`).
        domain_T: [T] which workload every token of the trace is of, so that none is traded for another; None: one.
    """

    trace: RoutingTrace
    topology: Topology
    objective: Objective
    seed: int
    keep_groups: bool
    progress: Progress
    redundant: int = 0
    dispatch: str = FEWEST_DEVICES
    domain_T: NDArray[np.int64] | None = None


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
        devices: for each layer [A, E] device of each expert; with copies [A, E, G], the devices that hold each.
        fit: their metrics on the tokens they were fitted on.
        costs: for each layer [A] the cost that drift is likely to leave: averaged over windows of these tokens.
        balances: for each layer [A] likewise B: the mean of B over all tokens and of its average over windows. The
            first alone flatters what was fitted to it, the second cannot tell placements apart near B = 1.
        path: the way through them from cheapest to most balanced, by these costs and balances.
    """

    devices: list[NDArray[Any]]
    fit: Measured
    costs: list[NDArray[np.float64]]
    balances: list[NDArray[np.float64]]
    path: Path

    def score(self, objective: Objective) -> NDArray[np.float64]:
        """The objective at every point of the path, [S + 1]."""
        return self.path.means(self.costs) + objective.balance * self.path.means(self.balances)

    def placement(self, point: int) -> NDArray[Any]:
        """The device of every expert at a point of the path, [L, E]; with copies [L, E, G]."""
        return np.stack([rows[choice] for rows, choice in zip(self.devices, self.path.choice(point), strict=True)])


def propose(setting: Setting, method: str, tokens: TokenSelector, sample: int = SEARCH_TOKENS) -> Candidates:
    """Candidates of every layer by the named method, fitted on the selected tokens.

    Args:
        setting: trace, topology, objective, seed.
        method: a name of `METHODS`.
        tokens: what to fit on.
        sample: tokens a search may look at, evenly spaced.

    Raises:
        ConfigError: for an unknown method.
        InfeasiblePlacement: when the experts do not fit the topology.
    """
    place = get_copy_method(method) if setting.redundant else get_method(method)
    num_layers = setting.trace.num_layers

    def one(layer: int) -> NDArray[Any]:
        problem = build_problem(
            setting.trace, layer, setting.topology, tokens, setting.keep_groups, sample, setting.redundant,
            setting.dispatch, setting.domain_T,
        )  # fmt: skip
        return place(problem, setting.objective, setting.seed + layer)

    devices = map_layers(one, num_layers, f"placing ({method})", setting.progress)
    fit = _measure(setting, devices, tokens)
    selected = np.arange(setting.trace.num_tokens, dtype=np.int64)[tokens]
    domain_T = None if setting.domain_T is None else setting.domain_T[tokens]
    parts = [_measure(setting, devices, selected[cut]) for cut in windows(selected.size, domain_T)]
    costs = _mean([part.costs(setting.objective) for part in parts])
    balances = _mean([fit.values("balance"), _mean([part.values("balance") for part in parts])])
    return Candidates(devices, fit, costs, balances, build_path(costs, balances))


def measure_candidates(setting: Setting, candidates: Candidates, tokens: TokenSelector) -> Measured:
    """Metrics of every candidate on other tokens."""
    return _measure(setting, candidates.devices, tokens)


def _measure(setting: Setting, devices: Sequence[NDArray[Any]], tokens: TokenSelector) -> Measured:
    def one(layer: int) -> list[LayerMetrics]:
        rows, rule = devices[layer], setting.dispatch
        return [measure_layer(setting.trace, layer, row, setting.topology, tokens, rule) for row in rows]

    return Measured(map_layers(one, setting.trace.num_layers, "measuring", setting.progress))


def _mean(values: Sequence[Sequence[NDArray[np.float64]]]) -> list[NDArray[np.float64]]:
    """The mean over the outer sequence of each layer's array."""
    return [np.mean(layer, axis=0) for layer in zip(*values, strict=True)]
