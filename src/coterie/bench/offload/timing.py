"""Timing a system on the store: warm the cache without waiting for minutes of reads, then decode recorded tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.bench.offload.bounds import served
from coterie.bench.offload.decisions import Decisions
from coterie.bench.offload.replay import Replayer, replay_decode
from coterie.bench.offload.systems import System
from coterie.checkpoint.expert_store import ExpertStore
from coterie.offloading.model import offload
from coterie.offloading.stats import OffloadStats
from coterie.policies.registry import make_policy

Visit = tuple[int, NDArray[Any], NDArray[Any]]


@dataclass(frozen=True)
class Round:
    """One timed stretch of tokens.

    Attributes:
        seconds: of all its tokens, the whole model.
        tokens: how many.
        stats: what the runtime did meanwhile.
    """

    seconds: float
    tokens: int
    stats: OffloadStats

    @property
    def tokens_per_s(self) -> float:
        """Speed."""
        return self.tokens / self.seconds


def budget_bytes(system: System, share: float, store: ExpertStore) -> int:
    """What a system's experts may take: a share of all experts, or as many as it says."""
    layout = store.layout
    if system.budget_experts is not None:
        return system.budget_experts * layout.blocks * layout.block_bytes
    return int(share * layout.num_records * layout.blocks + 1e-9) * layout.block_bytes


def visits(
    decisions: Decisions, store: ExpertStore, end: int, system: System, budget: int, factor: float
) -> Iterator[Visit]:
    """What the tokens before `end` ask of the cache of `budget` bytes, layer by layer; `factor`: F of skip-on-miss."""
    before = decisions.part(slice(0, end))
    uses, blocks = before.uses(store.layout), budget // store.layout.block_bytes
    if factor:  # what is skipped depends on what is there
        policy = make_policy(system.policy, uses.shape)
        for layer, ids_K, blocks_K, _ in served(uses, policy, blocks, before.weights_TLK, factor):
            yield layer, ids_K[blocks_K > 0], blocks_K[blocks_K > 0]
        return
    for ids_LK, blocks_LK in zip(uses.ids_TLK, uses.blocks_TLK, strict=True):
        for layer, (ids_K, blocks_K) in enumerate(zip(ids_LK, blocks_LK, strict=True)):
            yield layer, ids_K[blocks_K > 0], blocks_K[blocks_K > 0]


def time_round(
    store: ExpertStore, system: System, share: float, decisions: Decisions, rows_S: NDArray[Any],
    bandwidth: float | None, seed: int = 0, options: Mapping[str, Any] | None = None,
) -> Round:  # fmt: skip
    """Make a system's model, bring it to the state that it would be in, and time it over recorded tokens.

    The first of them is run but not timed.

    Args:
        store: what it reads.
        system: how it runs.
        share: budget, as a share of all experts.
        decisions: in neurons of the store's experts.
        rows_S: [S] consecutive tokens of the decisions.
        bandwidth: bytes per second of an emulated link; None: the real one.
        seed: of the token ids that are fed.
        options: further arguments of `coterie.offload`, beside the system's.
    """
    replayer, given = Replayer(decisions), {**system.options, **(options or {})}
    budget, factor = budget_bytes(system, share, store), float(given.get("skip_misses") or 0)
    model = offload(
        store.folder, budget, None if decisions.widths_TLK is None else replayer.widths,
        policy=system.policy, schedule=system.schedule, bandwidth=bandwidth, **given,
    )  # fmt: skip
    try:
        model.warm(visits(decisions, store, int(rows_S[0]), system, budget, factor))
        with replayer.intercepting(model):
            replay_decode(model, replayer, rows_S[:1, None], seed)
            before = model.stats()
            seconds = sum(replay_decode(model, replayer, rows_S[1:, None], seed))
        return Round(seconds, len(rows_S) - 1, model.stats().since(before))
    finally:
        model.close()


class Resident:
    """The same model with every expert in memory: what computing alone takes.

    Args:
        store: what it reads, once.
    """

    def __init__(self, store: ExpertStore) -> None:
        layout = store.layout
        every = np.arange(layout.num_experts)
        self._store, self.replayer = store, Replayer(Decisions(np.empty((0, 0, 0), np.int64), np.empty((0, 0, 0), "f")))
        self.model = offload(store.folder, "100%", self.replayer.widths)
        whole = np.full(layout.num_experts, layout.blocks)
        self.model.warm((layer, every, whole) for layer in range(layout.num_layers))

    def time(self, decisions: Decisions, rows_SB: NDArray[Any], seed: int = 0) -> Round:
        """Decode recorded tokens, [S, B] as for `replay_decode`; the first step is not timed."""
        self.replayer.use(decisions)
        with self.replayer.intercepting(self.model):
            replay_decode(self.model, self.replayer, rows_SB[:1], seed)
            before = self.model.stats()
            seconds = sum(replay_decode(self.model, self.replayer, rows_SB[1:], seed))
        return Round(seconds, rows_SB[1:].size, self.model.stats().since(before))

    def close(self) -> None:
        """Give the memory back."""
        self.model.close()
