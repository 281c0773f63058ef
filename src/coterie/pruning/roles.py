"""Which expert of a combination dominates, from whatever measured it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, unknown_name
from coterie.profile.model_profile import ModelProfile

PREFERRED = ("fisher", "weight")
DOMINANT, AUXILIARY = 0, 1


@dataclass(frozen=True)
class Roles:
    """Who dominates.

    Attributes:
        higher_LEE: [L, E, E] bool, symmetric: whether the expert with the higher id dominates the pair.
        method: what was asked to decide.
        decided_by: for each way of deciding, the share of the uses that it decided.
    """

    higher_LEE: NDArray[np.bool_]
    method: str
    decided_by: dict[str, float]


def roles(profile: ModelProfile, method: str | None = None) -> Roles:
    """The dominant expert of every pair: the one whose masking loses more.

    Where a method did not measure a pair (NaN; unseen pairs), or finds both equal, the next one decides: the methods
    asked for, then Fisher scores, routing weights, each expert's mean score over all its company by the first of
    these, its load, and last the lower id.

    Source: CRISP §3.3.2; the fallbacks go beyond it.

    Args:
        profile: of a model.
        method: a name in `profile.dominance`; None: "fisher" where there is one, else "weight".

    Raises:
        ConfigError: when the profile has no such method, or none at all.
    """
    name = _choose(profile, method)
    higher_LEE = np.zeros(profile.pairs_LEE.shape, dtype=np.bool_)
    open_LEE = ~np.eye(profile.spec.num_experts, dtype=np.bool_)[None].repeat(profile.spec.num_layers, 0)
    uses_LEE = profile.pairs_LEE / max(int(profile.pairs_LEE.sum()), 1)
    rises_LEE = np.triu(np.ones(profile.pairs_LEE.shape, dtype=np.bool_), 1)  # row below column in id
    decided_by: dict[str, float] = {}
    for way, score_LEE in _scores(profile, name):
        margin_LEE = score_LEE - score_LEE.transpose(0, 2, 1)  # row's over column's
        told_LEE = open_LEE & np.isfinite(margin_LEE) & (margin_LEE != 0)
        higher_LEE |= told_LEE & ((margin_LEE < 0) == rises_LEE)
        decided_by[way] = float(uses_LEE[told_LEE].sum())
        open_LEE &= ~told_LEE
    decided_by["lower id"] = float(uses_LEE[open_LEE].sum())
    return Roles(higher_LEE, name, {way: share for way, share in decided_by.items() if share > 0})


def _choose(profile: ModelProfile, method: str | None) -> str:
    known = profile.dominance
    if method is not None and method not in known:
        raise unknown_name("way of telling dominance in this profile", method, known)
    name = method or next((name for name in PREFERRED if name in known), next(iter(known), None))
    if name is None:
        raise ConfigError("the profile says nothing about dominance; make it again with coterie profile")
    return name


def _scores(profile: ModelProfile, name: str) -> Iterator[tuple[str, NDArray[np.float64]]]:
    """Ways of deciding, best first, as [L, E, E] scores of the row's expert in company of the column's."""
    for each in dict.fromkeys((name, *(method for method in PREFERRED if method in profile.dominance))):
        yield each, profile.dominance[each].astype(np.float64)
    score_LEE = profile.dominance[name].astype(np.float64)
    uses_LEE = np.where(np.isfinite(score_LEE), profile.pairs_LEE, 0)
    total_LE = uses_LEE.sum(2)
    mean_LE = (np.nan_to_num(score_LEE) * uses_LEE).sum(2) / np.maximum(total_LE, 1)
    every = np.ones(profile.spec.num_experts)
    yield f"mean {name}", np.where(total_LE > 0, mean_LE, np.nan)[:, :, None] * every
    yield "load", profile.load_LE[:, :, None] * every
