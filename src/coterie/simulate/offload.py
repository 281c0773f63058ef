"""Replay a routing trace through an expert cache: what a budget and a policy would read, without a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import BudgetError, ConfigError, TraceError, unknown_name
from coterie.policies.belady import Belady
from coterie.policies.cache import ExpertCache
from coterie.policies.eviction import CacheShape, EvictionPolicy
from coterie.policies.registry import POLICIES, make_policy
from coterie.progress import Progress, silent
from coterie.pruning.width_plan import WidthPlan
from coterie.pruning.widths import widths as width_of
from coterie.trace.routing_trace import ALL_TOKENS, DECODE, RoutingTrace, TokenSelector

WidthRule = Callable[[int, NDArray[Any], NDArray[Any] | None], NDArray[Any]]
"""(layer, ids [T, K], weights [T, K] or None) -> widths [T, K] in neurons, 0: skipped."""

BLOCKS = 16
SIMULATED = (*POLICIES, Belady.name)


@dataclass(frozen=True)
class Uses:
    """What a trace's tokens ask of a cache, token by token and layer by layer.

    Attributes:
        shape: what is cached.
        ids_TLK: [T, L, K] int64 chosen experts.
        blocks_TLK: [T, L, K] int64 how many of its first blocks each runs; 0 where skipped or not kept.
        chosen_T: [T] int64 experts each token chose over all layers, which full offload reads: L K if none is pruned.
    """

    shape: CacheShape
    ids_TLK: NDArray[np.int64]
    blocks_TLK: NDArray[np.int64]
    chosen_T: NDArray[np.int64]

    @property
    def smallest_budget(self) -> int:
        """Blocks that the neediest token needs in one layer: below this no cache can work."""
        return int(self.blocks_TLK.sum(axis=2).max())

    @property
    def smallest_share(self) -> float:
        """The same as a share of all experts, rounded up to a hundredth of a percent."""
        return math.ceil(self.smallest_budget / self.shape.total_blocks * 1e4) / 1e4


@dataclass(frozen=True)
class Replayed:
    """What one policy did at one budget.

    Attributes:
        policy: its name.
        budget_blocks: the budget.
        miss_ratio: share of the uses of experts of which any needed block was missing.
        bytes_share: bytes read as a share of full offload, which reads every chosen expert whole every time.
        uses: expert uses counted, skipped ones excluded.
    """

    policy: str
    budget_blocks: int
    miss_ratio: float
    bytes_share: float
    uses: int


def decode_tokens(trace: RoutingTrace) -> TokenSelector:
    """The tokens to replay: the decoded ones where the trace knows them, else all."""
    if trace.phase is None:
        return ALL_TOKENS
    decoded = np.flatnonzero(np.asarray(trace.phase) == DECODE)
    return decoded if decoded.size else ALL_TOKENS


def uses_of(
    trace: RoutingTrace, tokens: TokenSelector = ALL_TOKENS, widths: WidthRule | None = None, full_width: int = 0,
    blocks: int | None = None,
) -> Uses:  # fmt: skip
    """What the selected tokens ask of a cache.

    Args:
        trace: the trace.
        tokens: which tokens, in order.
        widths: how wide each expert runs; None: as wide as it is.
        full_width: neurons of an expert, I; needed with `widths`.
        blocks: blocks of an expert; None: 16 with widths, else 1, as whole experts come and go.

    Raises:
        ConfigError: when widths are given without the full width, or reach beyond it.
    """
    if widths is not None and full_width < 1:
        raise ConfigError(f"a full width of {full_width} neurons; give the expert's number of neurons with widths")
    parts = blocks or (1 if widths is None else BLOCKS)
    shape = CacheShape(trace.num_layers, trace.spec.num_experts, parts)
    count = len(np.arange(trace.num_tokens)[tokens])
    if not count:
        raise TraceError("no token is selected for replay; select at least one")
    ids_TLK = np.empty((count, trace.num_layers, trace.spec.top_k), np.int64)
    blocks_TLK = np.full(ids_TLK.shape, parts, np.int64)
    chosen_T = np.zeros(count, np.int64)
    for layer in range(trace.num_layers):
        routing = trace.layer(layer, tokens)
        ids_TLK[:, layer] = routing.expert_ids_TK
        if widths is not None:
            blocks_TLK[:, layer] = _in_blocks(
                widths(layer, routing.expert_ids_TK, routing.weights_TK), full_width, parts, layer
            )
        blocks_TLK[:, layer][~routing.kept()] = 0
        chosen_T += routing.kept().sum(axis=1)
    return Uses(shape, ids_TLK, blocks_TLK, chosen_T)


def planned_widths(plan: WidthPlan, trace: RoutingTrace) -> WidthRule:
    """The widths that a plan gives the choices of a trace.

    Raises:
        ConfigError: when the plan is for a model of another shape than the trace's.
        TraceError: when the trace has no routing weights, on which widths depend.
    """
    theirs, ours = ((spec.num_layers, spec.num_experts, spec.top_k) for spec in (plan.spec, trace.spec))
    if theirs != ours:
        raise ConfigError(
            "the plan is for {} layers of {} experts, top-{}, ".format(*theirs)
            + "the trace of {} layers of {} experts, top-{}; use a trace of the plan's model".format(*ours)
        )
    trace.require_weights("replaying widths")
    return lambda layer, ids_TK, weights_TK: width_of(plan, layer, ids_TK, np.asarray(weights_TK))


def _in_blocks(widths_TK: NDArray[Any], full_width: int, blocks: int, layer: int) -> NDArray[np.int64]:
    """Blocks that hold the first `width` neurons."""
    widths = np.asarray(widths_TK).astype(np.int64)
    if widths.min() < 0 or widths.max() > full_width:
        raise ConfigError(
            f"layer {layer} has widths from {widths.min()} to {widths.max()}; they lie within 0 and {full_width}"
        )
    return -(-widths * blocks // full_width)


def budget_in_blocks(uses: Uses, share: float) -> int:
    """Blocks in a budget that is a share of all experts.

    Raises:
        BudgetError: when a token's experts of one layer do not fit.
    """
    total = uses.shape.total_blocks
    budget = int(share * total + 1e-9)
    if budget < uses.smallest_budget:
        raise BudgetError(
            f"a budget of {share:.2%} of all experts cannot hold what one token needs in one layer; "
            f"the smallest that works here is {uses.smallest_share:.2%}"
        )
    return budget


def build(name: str, uses: Uses) -> EvictionPolicy:
    """A policy by name, Belady's included.

    Raises:
        ConfigError: for an unknown name.
    """
    if name == Belady.name:
        return Belady(uses.shape, uses.ids_TLK, uses.blocks_TLK)
    if name not in POLICIES:
        raise unknown_name("eviction policy", name, SIMULATED)
    return make_policy(name, uses.shape)


def replay(uses: Uses, policy: EvictionPolicy, budget_blocks: int, warm: int = 0) -> Replayed:
    """Serve all uses in order from an empty cache.

    Args:
        uses: what is asked.
        policy: decides evictions; what it has learnt before, it uses.
        budget_blocks: the budget.
        warm: the first tokens that are served but not counted.

    Raises:
        ConfigError: when nothing is left to count.
    """
    tokens, layers, _ = uses.ids_TLK.shape
    if not 0 <= warm < tokens:
        raise ConfigError(f"{warm} of {tokens} tokens warm the cache; leave at least one to count")
    cache = ExpertCache(uses.shape, budget_blocks, policy)
    misses = read = 0
    for token in range(tokens):
        if token == warm:
            misses = read = 0
        for layer in range(layers):
            missed, blocks = cache.serve(layer, uses.ids_TLK[token, layer], uses.blocks_TLK[token, layer])
            misses += missed
            read += blocks
    count = int((uses.blocks_TLK[warm:] > 0).sum())
    whole = int(uses.chosen_T[warm:].sum()) * uses.shape.blocks
    return Replayed(policy.name, budget_blocks, misses / max(count, 1), read / max(whole, 1), count)


def simulate(
    uses: Uses, budgets: Sequence[float], policies: Sequence[str] = SIMULATED, warm: int = 0,
    progress: Progress = silent,
) -> dict[float, dict[str, Replayed]]:  # fmt: skip
    """Every policy at every budget, each from an empty cache and knowing nothing.

    Args:
        uses: what is asked.
        budgets: shares of all experts.
        policies: names.
        warm: the first tokens that are served but not counted.
        progress: told after each replay.

    Raises:
        BudgetError: when a budget is too small.
        ConfigError: for an unknown policy, or when nothing is left to count.
    """
    blocks = {share: budget_in_blocks(uses, share) for share in budgets}
    unknown = [name for name in policies if name not in SIMULATED]
    if unknown:
        raise unknown_name("eviction policy", unknown[0], SIMULATED)
    results: dict[float, dict[str, Replayed]] = {share: {} for share in budgets}
    total = len(budgets) * len(policies)
    for number, (share, name) in enumerate([(share, name) for share in budgets for name in policies]):
        results[share][name] = replay(uses, build(name, uses), blocks[share], warm)
        progress("replaying", number + 1, total)
    return results
