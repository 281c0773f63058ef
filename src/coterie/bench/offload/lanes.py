"""The loss of widths that depend on what is cached: token by token, many sequences and budgets side by side.

Every row of the batch has a cache of its own, which decides as the runtime's does and moves no bytes; the model itself
is resident. So one pass gives the loss at every budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.bench.offload.decisions import Decisions, recording
from coterie.checkpoint.store_layout import StoreLayout
from coterie.offloading.demand import fill_demand, skip_missing, widen_to_resident
from coterie.policies.cache import ExpertCache
from coterie.policies.eviction import CacheShape
from coterie.policies.registry import make_policy
from coterie.progress import Progress, silent
from coterie.pruning.width_plan import WidthPlan
from coterie.pruning.widths import widths as planned


@dataclass(frozen=True, eq=False)
class Lane:
    """What one budget's rows run at.

    Attributes:
        share: the budget, of all experts.
        plan: planned widths; None: full.
        use_cached: whether neurons that are resident run too.
        skip_misses: F; 0: never.
        policy: what decides evictions.
    """

    share: float
    plan: WidthPlan | None = None
    use_cached: bool = False
    skip_misses: float = 0.0
    policy: str = "company"


class LaneCache:
    """The cache of one sequence at one budget, in blocks of which a store would have as many.

    Args:
        lane: how it runs.
        layout: of the store that will be timed; an expert of the model has as many blocks.
        width: neurons of an expert of the model, I.
    """

    def __init__(self, lane: Lane, layout: StoreLayout, width: int) -> None:
        self.lane, self._width, self._block = lane, width, -(-width // layout.blocks)
        shape = CacheShape(layout.num_layers, layout.num_experts, -(-width // self._block))
        budget = int(lane.share * shape.total_blocks + 1e-9)
        self.cache = ExpertCache(shape, budget, make_policy(lane.policy, shape))
        self._need_E, self._rows_E = (np.zeros(layout.num_experts, np.int32) for _ in range(2))
        self._asked_N3 = np.zeros((layout.num_experts, 3), np.int64)

    def settle(self, layer: int, ids_K: NDArray[np.int64], weights_K: NDArray[np.float32], widths_K: Any) -> int:
        """Skip, look up and widen as the runtime does, `widths_K` [K] int64 in place; blocks that were read."""
        cache, block = self.cache, self._block
        if self.lane.skip_misses:
            factor = np.float32(self.lane.skip_misses)
            skip_missing(ids_K, weights_K, len(ids_K), factor, block, cache.reserved_LE[layer], widths_K)
        fill_demand(ids_K, widths_K, block, self._width, self._need_E, self._rows_E, self._asked_N3)
        decision = cache.lookup_need(layer, self._need_E)
        if self.lane.use_cached:
            most_K = np.full(len(ids_K), self._width)
            arrived_E, pinned_E = cache.arrived_LE[layer], cache.pinned_LE[layer]
            widen_to_resident(ids_K, most_K, block, self._width, arrived_E, pinned_E, widths_K)
        cache.loaded(layer, decision.loads_N3)
        cache.used(layer)
        return decision.loaded_blocks


@dataclass(frozen=True, eq=False)
class Ran:
    """One lane's text.

    Attributes:
        nll_WS: [W, S] of every scored token, nats, window after window.
        decisions: of every token, with planned widths.
        warm_W: [W] windows that only filled the cache, whose loss does not count.
    """

    nll_WS: NDArray[np.float64]
    decisions: Decisions
    warm_W: NDArray[np.bool_]


def run_lanes(
    model: Any, ids_WN: Any, lanes: Sequence[Lane], layout: StoreLayout, width: int, sequences: int,
    progress: Progress = silent,
) -> list[Ran]:  # fmt: skip
    """Decode windows of text in every lane.

    A lane's windows are cut into sequences of consecutive ones, each with a cache of its own that the first window
    fills; keys and values begin anew with every window, as where the unchanged model is measured.

    Args:
        model: resident, in the order of neurons in which it was profiled; all plans are of one order.
        ids_WN: [W, N] token ids.
        lanes: what runs.
        layout: of the store that will be timed.
        width: neurons of an expert of the model.
        sequences: in each lane; W is a multiple.
        progress: told of every window.
    """
    from coterie.models.reorder import reordered
    from coterie.models.widths import apply_widths

    num_windows, length = ids_WN.shape
    each = num_windows // sequences
    assert each * sequences == num_windows, "sequences of equally many windows"
    caches = [LaneCache(lane, layout, width) for lane in lanes for _ in range(sequences)]
    row_of = np.arange(sequences) * each
    nll = np.zeros((len(caches), each, length - 1))
    orders = [lane.plan.order_LEI for lane in lanes if lane.plan is not None]
    with ExitStack() as stack:
        if orders:
            stack.enter_context(reordered(model, orders[0]))
        stack.enter_context(apply_widths(model, _Widths(caches, width).widths, count=False))
        found = stack.enter_context(recording(model))
        for window in range(each):
            rows = np.tile(row_of + window, len(lanes))
            nll[:, window] = _decode(model, ids_WN[rows])
            progress("decoding with caches", window + 1, each)
    # tokens ran window by window, position by position, row by row
    taken = found.decisions()
    order = np.arange(len(taken)).reshape(each, length, len(lanes), sequences).transpose(2, 3, 0, 1)
    warm_W = np.arange(num_windows) % each == 0
    ran = []
    for number, lane in enumerate(lanes):
        tokens = order[number].reshape(-1)
        own = replace(taken, ids_TLK=taken.ids_TLK[tokens], weights_TLK=taken.weights_TLK[tokens], width=width)
        rows_of_lane = nll[number * sequences : (number + 1) * sequences].reshape(num_windows, -1)
        ran.append(Ran(rows_of_lane, replace(own.under(lane.plan), width=width), warm_W))
    return ran


class _Widths:
    """For `apply_widths`: row b of a batch of single tokens runs as cache b settles."""

    def __init__(self, caches: Sequence[LaneCache], width: int) -> None:
        self._caches, self._width = caches, width
        self._plans: dict[int, tuple[WidthPlan | None, list[int]]] = {}
        for row, cache in enumerate(caches):
            self._plans.setdefault(id(cache.lane.plan), (cache.lane.plan, []))[1].append(row)

    def widths(self, layer: int, ids_TK: Any, weights_TK: Any) -> Any:
        import torch

        ids_BK, weights_BK = ids_TK.numpy().astype(np.int64), weights_TK.float().numpy()
        widths_BK = np.full(ids_BK.shape, self._width, np.int64)
        for plan, rows in self._plans.values():
            if plan is not None:
                widths_BK[rows] = planned(plan, layer, ids_BK[rows], weights_BK[rows])
        for row, cache in enumerate(self._caches):
            cache.settle(layer, ids_BK[row], weights_BK[row], widths_BK[row])
        return torch.from_numpy(widths_BK)


def _decode(model: Any, ids_BN: Any) -> NDArray[np.float64]:
    """Negative log-likelihoods [B, N - 1], one token at a time."""
    import torch

    from coterie.bench.offload.replay import Decoder

    decoder, parts = Decoder(model), []
    for position in range(ids_BN.shape[1]):
        logits_BV = decoder.step(ids_BN[:, position : position + 1])[:, -1].float()
        if position + 1 < ids_BN.shape[1]:
            chosen_B1 = torch.log_softmax(logits_BV, -1).gather(1, ids_BN[:, position + 1 : position + 2])
            parts.append(-chosen_B1[:, 0].double().numpy())
    return np.stack(parts, 1)
