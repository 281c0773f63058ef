"""Traces whose rows were made up from load histograms: their loads are real, their company is not.

Some tools publish only how often each expert was chosen, and others rebuild "tokens" from it. Placements fitted on such
rows are fitted on nothing.
"""

from __future__ import annotations

from math import comb
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.profile.coactivation import coactivation_counts
from coterie.trace.routing_trace import RoutingTrace

MIN_TOKENS = 1000
CHECKED_TOKENS = 20_000
CHECKED_LAYERS = 4
SORTED_SHARE = 0.95
CHANCE = 1.5
REBUILT = "loads and B can be trusted, devices per token and placements by company cannot: record real tokens"
_FEWEST_PAIRS = 50
_ROUNDS = 200
_POSSIBLE = 10


def rebuilt_from_histogram(trace: RoutingTrace) -> str | None:
    """Why a trace looks as if its rows were rebuilt from histograms, or None.

    Looks at a few layers and at most the first 20,000 tokens. Sorted blocks: from token to token hardly any id ever
    falls (or ever rises), in every layer; or, where their rows were shuffled, there are no more different sets of
    experts than such blocks have (E + K), though far more are possible. No company beyond chance: pairs of experts
    occur as often together as their loads alone explain (`chance_ratio` below 1.5 in every layer); real routing has
    many times that. Traces that say that they are synthetic, with fewer than 1,000 tokens, or too thin to tell are not
    suspected. Rows dealt out one after another, from what is left of each expert, are not recognised.

    Args:
        trace: the trace; memory-mapped ones are read a layer at a time.
    """
    if trace.provenance.get("synthetic") or trace.num_tokens < MIN_TOKENS or trace.spec.top_k < 2:
        return None
    layers = np.unique(np.linspace(0, trace.num_layers - 1, CHECKED_LAYERS).round().astype(int)).tolist()
    routings = [trace.layer(layer, slice(0, CHECKED_TOKENS)) for layer in layers]
    if all(_sorted(routing.expert_ids_TK) for routing in routings):
        return "its ids stand in sorted blocks, which no text makes"
    if all(_few_sets(routing.expert_ids_TK, trace.spec.num_experts) for routing in routings):
        return "its tokens choose among as few sets of experts as sorted blocks of ids have"
    ratios = [
        chance_ratio(coactivation_counts(routing.expert_ids_TK, routing.kept_TK, trace.spec.num_experts))
        for routing in routings
    ]
    known = [ratio for ratio in ratios if ratio is not None]
    if known and len(known) == len(ratios) and max(known) < CHANCE:
        return "its experts keep no company beyond what their loads explain by chance"
    return None


def chance_ratio(counts_EE: NDArray[np.int64]) -> float | None:
    """Squared deviation of pair counts from what loads alone explain, over what chance alone would make of it.

    Expected counts are products of one factor an expert, so that every expert has as many pairs as it really has.
    About 1 (a little less) where pairs are formed by chance; None where too few pairs are expected even once.

    Args:
        counts_EE: [E, E] from `coactivation_counts`; the diagonal is not looked at.
    """
    pairs_EE = counts_EE.astype(np.float64)
    np.fill_diagonal(pairs_EE, 0)
    margin_E = pairs_EE.sum(axis=1)
    if not margin_E.any():
        return None
    factor_E = margin_E / np.sqrt(margin_E.sum())
    for _ in range(_ROUNDS):
        others_E = np.maximum(factor_E.sum() - factor_E, 1e-12)
        factor_E = np.sqrt(factor_E * margin_E / others_E)
    expected_EE = np.outer(factor_E, factor_E)
    upper = np.triu_indices(len(pairs_EE), 1)
    expected, found = expected_EE[upper], pairs_EE[upper]
    enough = expected >= 1
    if enough.sum() < _FEWEST_PAIRS:
        return None
    return float(((found[enough] - expected[enough]) ** 2 / expected[enough]).mean())


def _few_sets(ids_TK: NDArray[Any], num_experts: int) -> bool:
    """Whether tokens share E + K sets of experts or fewer where far more exist; one set throughout is no block."""
    most = num_experts + ids_TK.shape[1]
    if comb(num_experts, ids_TK.shape[1]) < _POSSIBLE * most:
        return False
    return bool(1 < len(np.unique(np.sort(ids_TK, axis=1), axis=0)) <= most)


def _sorted(ids_TK: NDArray[Any]) -> bool:
    """Whether hardly any id falls, or hardly any rises, from one token to the next; one set throughout is no order."""
    step_TK = np.diff(ids_TK.astype(np.int64), axis=0)
    if not step_TK.any():
        return False
    rising, falling = (step_TK >= 0).all(axis=1).mean(), (step_TK <= 0).all(axis=1).mean()
    return bool(max(rising, falling) >= SORTED_SHARE)
