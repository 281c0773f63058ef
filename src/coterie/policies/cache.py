"""A memory of blocks of neurons in which every expert's resident part is a prefix; it decides, others move bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import BudgetError, ConfigError
from coterie.policies import kernels
from coterie.policies.eviction import CacheShape, EvictionPolicy


@dataclass(frozen=True)
class Decision:
    """What must happen before a layer can run: evictions first, then loads; both are counted already.

    Attributes:
        layer: the MoE layer that the loads are of.
        loads_N3: [N, 3] int32: expert, first block, one past the last block; one contiguous read each.
        evicted_N3: [N, 3] int32: layer, expert, blocks of it that stay.
        misses: experts asked for of which any needed block was not resident or on its way.
        loaded_blocks: blocks to read.
    """

    layer: int
    loads_N3: NDArray[np.int32]
    evicted_N3: NDArray[np.int32]
    misses: int
    loaded_blocks: int


class ExpertCache:
    """Decides what to load and what to evict so that a budget is never exceeded, loads on their way included.

    For each layer in turn: `lookup` what its tokens chose; carry out the decision, saying `loaded` as reads arrive;
    compute; say `used`. `prefetch` does the same for a layer that is only predicted, and `cancel` takes it back.

    Source: design of an offloading cache for CRISP's prefix widths; beyond the paper.
    """

    def __init__(self, shape: CacheShape, budget_blocks: int, policy: EvictionPolicy) -> None:
        if policy.shape != shape:
            raise ConfigError(f"the policy is for {policy.shape}, the cache for {shape}; make both from one shape")
        if budget_blocks < 1:
            raise BudgetError(f"a budget of {budget_blocks} blocks holds nothing; give at least one token's experts")
        self.shape, self.policy = shape, policy
        self.budget_blocks = min(budget_blocks, shape.total_blocks)
        size = (shape.num_layers, shape.num_experts)
        self.reserved_LE: NDArray[np.int32] = np.zeros(size, np.int32)
        self.arrived_LE: NDArray[np.int32] = np.zeros(size, np.int32)
        self.pinned_LE: NDArray[np.int32] = np.zeros(size, np.int32)
        self.used_blocks = 0
        self._now = 0
        self._need_E: NDArray[np.int32] = np.zeros(shape.num_experts, np.int32)
        self._loads: NDArray[np.int32] = np.empty((shape.num_experts, 3), np.int32)
        self._evicted: NDArray[np.int32] = np.empty((shape.total_blocks + 1, 3), np.int32)
        self._share = self.budget_blocks / shape.num_layers if policy.by_layer else -1.0

    def lookup(self, layer: int, ids_N: NDArray[Any], blocks_N: NDArray[Any] | None = None) -> Decision:
        """Decide for a layer whose experts are known; they are pinned until `used`.

        Args:
            layer: the MoE layer.
            ids_N: [N] the experts its tokens chose; repeated where tokens share one.
            blocks_N: [N] how many of its first blocks each runs; None: all. 0: skipped.

        Raises:
            BudgetError: when what the layer needs, with what is on its way, does not fit; nothing was changed but
                what the policy learnt.
        """
        return self.lookup_need(layer, self._need_of(ids_N, blocks_N))

    def lookup_need(self, layer: int, need_E: NDArray[np.int32]) -> Decision:
        """`lookup` of what each expert needs, [E] int32, within 0 and B, which is not checked."""
        self.policy.touch(layer, need_E)
        self._now = layer
        before_E = self.pinned_LE[layer].copy()
        self.pinned_LE[layer] = need_E
        try:
            return self._reserve(layer, need_E)
        except BudgetError:
            self.pinned_LE[layer] = before_E
            raise

    def prefetch(
        self, layer: int, ids_N: NDArray[Any], blocks_N: NDArray[Any] | None = None, keep_from: int | None = None
    ) -> Decision | None:
        """Decide for a layer that is predicted; None where it would evict what is pinned or on its way.

        What is fetched is pinned until the layer's own `lookup`, or `cancel`.

        Args:
            layer: the MoE layer.
            ids_N: [N] experts.
            blocks_N: [N] how many of its first blocks; None: all.
            keep_from: layers from this one on give up nothing for it; None: every layer may.
        """
        if keep_from is not None and keep_from < self.shape.num_layers:
            before_LE = self.pinned_LE[keep_from:].copy()
            np.maximum(before_LE, self.reserved_LE[keep_from:], out=self.pinned_LE[keep_from:])
            decision = self.prefetch(layer, ids_N, blocks_N)
            fetched_N = self.pinned_LE[layer, np.asarray(ids_N)]
            self.pinned_LE[keep_from:] = before_LE
            if decision is not None:
                self.pinned_LE[layer, np.asarray(ids_N)] = fetched_N
            return decision
        need_E = np.maximum(self._need_of(ids_N, blocks_N), self.pinned_LE[layer])
        before_E = self.pinned_LE[layer].copy()
        self.pinned_LE[layer] = need_E
        try:
            return self._reserve(layer, need_E)
        except BudgetError:
            self.pinned_LE[layer] = before_E
            return None

    def loaded(self, layer: int, loads_N3: NDArray[Any]) -> None:
        """These reads, rows of a decision's `loads_N3`, have arrived; report the reads of one expert in their order."""
        for expert, first, end in loads_N3:
            if self.arrived_LE[layer, expert] == first and end <= self.reserved_LE[layer, expert]:
                self.arrived_LE[layer, expert] = end

    def cancel(self, layer: int, experts_N: NDArray[Any]) -> None:
        """The reads of these experts will not arrive: their memory is free again, and what is resident unpinned."""
        for expert in np.unique(np.asarray(experts_N)):
            self.used_blocks -= int(self.reserved_LE[layer, expert] - self.arrived_LE[layer, expert])
            self.reserved_LE[layer, expert] = self.arrived_LE[layer, expert]
            self.pinned_LE[layer, expert] = 0

    def cancel_all(self) -> None:
        """No read under way will arrive: what waited for one is free again, and nothing is pinned."""
        self.reserved_LE[:] = self.arrived_LE
        self.used_blocks = int(self.arrived_LE.sum())
        self.pinned_LE[:] = 0

    def release(self, layer: int, expert: int) -> None:
        """One expert of a layer has computed, the others have not: what it used may be evicted."""
        self.pinned_LE[layer, expert] = 0

    def used(self, layer: int) -> None:
        """The layer has computed: what it used may be evicted."""
        self.pinned_LE[layer] = 0

    def serve(self, layer: int, ids_N: NDArray[Any], blocks_N: NDArray[Any]) -> tuple[int, int]:
        """Look up, load at once and use, as a simulator does with choices it has checked; (misses, blocks read)."""
        kernels.fill_need(ids_N, blocks_N, self._need_E)
        self.policy.touch(layer, self._need_E)
        self._now = layer
        self.pinned_LE[layer] = self._need_E
        decision = self._reserve(layer, self._need_E)
        if decision.misses:
            self.arrived_LE[layer] = self.reserved_LE[layer]
        self.pinned_LE[layer] = 0
        return decision.misses, decision.loaded_blocks

    def _need_of(self, ids_N: NDArray[Any], blocks_N: NDArray[Any] | None) -> NDArray[np.int32]:
        ids = np.asarray(ids_N)
        blocks = np.full(ids.size, self.shape.blocks) if blocks_N is None else np.asarray(blocks_N)
        for what, values, limit in (("expert", ids, self.shape.num_experts - 1), ("blocks", blocks, self.shape.blocks)):
            if values.size and (values.min() < 0 or values.max() > limit):
                raise ConfigError(f"{what} {values.min()} to {values.max()} asked of a cache of 0 to {limit}")
        kernels.fill_need(ids, blocks, self._need_E)
        return self._need_E

    def _reserve(self, layer: int, need_E: NDArray[np.int32]) -> Decision:
        count = kernels.missing_of(layer, need_E, self.reserved_LE, self._loads)
        if count == 0:
            return Decision(layer, self._loads[:0], self._evicted[:0], 0, 0)
        loads = self._loads[:count].copy()
        coming = int((loads[:, 2] - loads[:, 1]).sum())
        short = self.used_blocks + coming - self.budget_blocks
        evictions = 0
        if short > 0:
            state = (self.reserved_LE, self.arrived_LE, self.pinned_LE)
            if kernels.evictable(*state) < short:
                raise BudgetError(
                    f"a budget of {self.budget_blocks} blocks cannot hold what layer {layer} needs now with what is "
                    f"pinned or on its way; it takes {short - kernels.evictable(*state)} blocks more"
                )
            evictions, gone = kernels.make_room(
                self._now, short, coming if layer == self._now else 0, self._share, self.policy.whole,
                self.policy.score_LEB, self.policy.near_D, *state, self._evicted,
            )  # fmt: skip
            self.used_blocks -= gone
        self.reserved_LE[layer, loads[:, 0]] = loads[:, 2]
        self.used_blocks += coming
        return Decision(layer, loads, self._evicted[:evictions].copy(), count, coming)
