"""Placement methods by name: each proposes, for one layer, placements from the cheapest to the most balanced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, unknown_name
from coterie.placement.adjust import adjustment
from coterie.placement.balance import eplb, linear
from coterie.placement.copy_baselines import cap_copies, eplb_copies, linear_copies
from coterie.placement.greedy import algorithm_1
from coterie.placement.groups import place_in_groups
from coterie.placement.objective import Objective
from coterie.placement.problem import LayerProblem
from coterie.placement.refine import refine
from coterie.placement.replicate import replicate

_MOST_CANDIDATES = 64


class PlacementMethod(Protocol):
    """Proposes placements of one layer; the same problem and seed give the same placements."""

    def __call__(self, problem: LayerProblem, objective: Objective, seed: int) -> NDArray[np.int64]:
        """Candidates as the device of each expert, [A, E]; the driver measures them and chooses."""
        ...


class CopyMethod(Protocol):
    """Proposes placements of one layer with more slots than experts; no device holds two copies of one expert."""

    def __call__(self, problem: LayerProblem, objective: Objective, seed: int) -> NDArray[np.bool_]:
        """Candidates as the devices that hold each expert, [A, E, G]."""
        ...


def _linear(problem: LayerProblem, objective: Objective, seed: int) -> NDArray[np.int64]:
    return linear(problem.slots_G)[None]


def _eplb(problem: LayerProblem, objective: Objective, seed: int) -> NDArray[np.int64]:
    return _grouped(problem.without_speeds(), eplb)[None]


def _cap(problem: LayerProblem, objective: Objective, seed: int) -> NDArray[np.int64]:
    return _grouped(problem, lambda part: algorithm_1(part, seed))[None]


def _cap_spectrum(problem: LayerProblem, objective: Objective, seed: int) -> NDArray[np.int64]:
    """CAP's adjustment; with groups kept whole its swaps would break them, so only the start remains."""
    problem, start = problem.without_speeds(), _cap(problem, objective, seed)
    if problem.num_groups > 1:
        return start
    path = adjustment(problem, start[0])
    keep = np.unique(np.linspace(0, len(path) - 1, min(len(path), _MOST_CANDIDATES)).round().astype(int))
    kept: NDArray[np.int64] = path[keep]
    return kept


def _coterie(problem: LayerProblem, objective: Objective, seed: int) -> NDArray[np.int64]:
    return refine(problem, objective, seed)


def _grouped(problem: LayerProblem, place: Callable[[LayerProblem], NDArray[np.int64]]) -> NDArray[np.int64]:
    return place_in_groups(problem, place, place) if problem.num_groups > 1 else place(problem)


METHODS: dict[str, PlacementMethod] = {
    "linear": _linear,
    "eplb": _eplb,
    "cap": _cap,
    "cap-spectrum": _cap_spectrum,
    "coterie": _coterie,
}


COPY_METHODS: dict[str, CopyMethod] = {
    "linear": linear_copies,
    "eplb": eplb_copies,
    "cap": cap_copies,
    "coterie": replicate,
}


def get_copy_method(name: str) -> CopyMethod:
    """The method of this name for machines with slots to spare.

    Raises:
        ConfigError: for an unknown name, with the nearest known one, or one that places every expert once.
    """
    if name in METHODS and name not in COPY_METHODS:
        raise ConfigError(f"{name} places every expert once; with --redundant use {', '.join(COPY_METHODS)}")
    if name not in COPY_METHODS:
        raise unknown_name("placement method", name, COPY_METHODS)
    return COPY_METHODS[name]


def get_method(name: str) -> PlacementMethod:
    """The method of this name.

    Raises:
        ConfigError: for an unknown name, with the nearest known one.
    """
    if name not in METHODS:
        raise unknown_name("placement method", name, METHODS)
    return METHODS[name]
