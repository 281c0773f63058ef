"""One layer's placement problem: token sets as weighted hyperedges, and the devices to put experts on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError
from coterie.placement.copies import FEWEST_DEVICES
from coterie.profile.coactivation import coactivation_counts, jaccard
from coterie.profile.load import expert_load
from coterie.topology import Topology
from coterie.trace.routing_trace import ALL_TOKENS, RoutingTrace, TokenSelector

NO_EXPERT = -1
MAX_TOP_K = 255
NUM_WINDOWS = 4
WINDOW_TOKENS = 1024
SEARCH_TOKENS = 16_384
TRIAL_TOKENS = 4_096


@dataclass(frozen=True)
class LayerProblem:
    """What a placement method may look at.

    Experts are the vertices of a hypergraph; each token's set of kept experts is a hyperedge, and equal
    sets are merged into one with a multiplicity (algorithms §2).

    Attributes:
        sets_UK: [U, K] int32, the experts of each distinct set of a window in rising order, then NO_EXPERT.
        multiplicity_U: [U] int64, tokens with this set.
        window_U: [U] int32, the window the tokens are from, 0 .. W-1.
        num_tokens: tokens in the sets (those that keep no expert included).
        load_E: [E] int64, token-expert pairs of each expert.
        coactivation_EE: [E, E] int64, tokens that chose both; the diagonal is the load.
        topology: devices, nodes and link costs.
        slots_G: [G] int64, experts each device must hold.
        num_groups: expert groups of group-limited routing that must stay whole; 1: no such restriction.
        routing_groups: expert groups of the model's router, for methods that only look at them (EPLB).
        dispatch: with more slots than experts, the rule by which tokens choose copies (`copies.RULES`).
    """

    sets_UK: NDArray[np.int32]
    multiplicity_U: NDArray[np.int64]
    window_U: NDArray[np.int32]
    num_tokens: int
    load_E: NDArray[np.int64]
    coactivation_EE: NDArray[np.int64]
    topology: Topology
    slots_G: NDArray[np.int64]
    num_groups: int = 1
    routing_groups: int = 1
    dispatch: str = FEWEST_DEVICES

    @property
    def num_experts(self) -> int:
        """Experts, E."""
        return int(self.load_E.size)

    @property
    def num_devices(self) -> int:
        """Devices, G."""
        return int(self.slots_G.size)

    @property
    def speed_G(self) -> NDArray[np.float64]:
        """How fast each device computes, [G]; 1 as measured."""
        return self.topology.speeds()

    def without_speeds(self) -> LayerProblem:
        """The same layer on devices of equal speed, for methods that do not know of speeds."""
        if self.topology.speed_per_device is None:
            return self
        return replace(self, topology=replace(self.topology, speed_per_device=None))

    @cached_property
    def jaccard_EE(self) -> NDArray[np.float64]:
        """Co-activation probability p_ij of CAP §IV, [E, E], zero on the diagonal."""
        return jaccard(self.coactivation_EE)


def build_problem(
    trace: RoutingTrace,
    layer: int,
    topology: Topology,
    tokens: TokenSelector = ALL_TOKENS,
    keep_groups: bool = False,
    sample: int = SEARCH_TOKENS,
    redundant: int = 0,
    dispatch: str = FEWEST_DEVICES,
    domain_T: NDArray[np.int64] | None = None,
) -> LayerProblem:
    """The placement problem of MoE layer `layer` on the selected tokens.

    Loads and co-activation count every token; the sets come from at most `sample` evenly spaced ones, in
    NUM_WINDOWS windows of consecutive tokens (fewer when there are few tokens), or in one window for each domain where
    `domain_T` [T] says which of the trace's tokens is of which. `redundant` slots are left for copies of experts, which
    tokens choose by the rule `dispatch`.

    Raises:
        ConfigError: when a token has more experts than MAX_TOP_K.
        InfeasiblePlacement: when the experts do not fit the topology.
    """
    if trace.spec.top_k > MAX_TOP_K:
        raise ConfigError(f"top-{trace.spec.top_k} routing; placement supports up to top-{MAX_TOP_K}")
    routing = trace.layer(layer, tokens)
    num_experts = trace.spec.num_experts
    ids_TK, kept_TK = routing.expert_ids_TK, routing.kept_TK
    stride = -(-len(ids_TK) // sample)
    cuts = windows(len(ids_TK), None if domain_T is None else domain_T[tokens])
    parts = [
        merge_sets(ids_TK[cut][::stride], None if kept_TK is None else kept_TK[cut][::stride], num_experts)
        for cut in cuts
    ]
    return LayerProblem(
        np.concatenate([sets for sets, _ in parts]),
        np.concatenate([multiplicity for _, multiplicity in parts]),
        np.repeat(np.arange(len(parts), dtype=np.int32), [len(sets) for sets, _ in parts]),
        sum(len(ids_TK[cut][::stride]) for cut in cuts),
        expert_load(ids_TK, kept_TK, num_experts),
        coactivation_counts(ids_TK, kept_TK, num_experts),
        topology,
        topology.slots(num_experts + redundant),
        trace.spec.num_groups if keep_groups else 1,
        trace.spec.num_groups,
        dispatch,
    )


def windows(num_tokens: int, domain_T: NDArray[np.int64] | None = None) -> Sequence[TokenSelector]:
    """Parts of the tokens in which the busiest device is looked for, that cover them all.

    Consecutive windows of equal size (to one token), NUM_WINDOWS or fewer, so that each holds WINDOW_TOKENS: in a small
    window chance decides which device is busiest. With the domain of every token, [num_tokens], one for each domain:
    what is balanced over a mixture need not be so for any of its parts.
    """
    if domain_T is not None:
        return [np.flatnonzero(domain_T == domain) for domain in np.unique(domain_T)]
    count = max(1, min(NUM_WINDOWS, num_tokens // WINDOW_TOKENS))
    ends = np.linspace(0, num_tokens, count + 1).round().astype(int)
    return [slice(int(start), int(end)) for start, end in pairwise(ends)]


def merge_sets(
    ids_TK: NDArray[Any], kept_TK: NDArray[np.bool_] | None, num_experts: int
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Distinct sets of kept experts and how many tokens have each; tokens that keep none are left out.

    Returns:
        sets_UK [U, K] int32 in rising order then NO_EXPERT, and multiplicity_U [U] int64.
    """
    dtype = np.uint8 if num_experts < 2**8 else np.uint16 if num_experts < 2**16 else np.uint32
    ids = ids_TK.astype(dtype)
    if kept_TK is not None:
        ids[~kept_TK] = num_experts  # sorts last, and marks the end
    ids.sort(axis=1)
    rows = np.ascontiguousarray(ids).view(np.dtype((np.void, ids.shape[1] * ids.itemsize))).ravel()
    _, first, counts = np.unique(rows, return_index=True, return_counts=True)
    sets = ids[first].astype(np.int32)
    sets[sets == num_experts] = NO_EXPERT
    some = sets[:, 0] != NO_EXPERT
    return np.ascontiguousarray(sets[some]), counts[some].astype(np.int64)
