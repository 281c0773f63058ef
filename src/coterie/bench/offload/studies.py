"""Further tables: prompts of several lengths, batches of several sizes, and what deciding costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.bench.offload.decisions import Decisions
from coterie.bench.offload.plans import Plans
from coterie.bench.offload.replay import Replayer, replay_decode, replay_prefill
from coterie.bench.offload.systems import FULL, LOSSLESS, MOE_OFFLOAD, System, lossless_systems, width_systems
from coterie.bench.offload.table import Quality, Setting
from coterie.bench.offload.timing import Visit, budget_bytes
from coterie.checkpoint.expert_store import ExpertStore
from coterie.errors import ConfigError
from coterie.offloading.model import offload
from coterie.progress import Progress, silent

LENGTHS, BATCHES = (128, 256, 512, 1024, 2048), (1, 4, 16)
_STEPS = 4  # of a batch that are timed
_WARM_STEPS = 200
_RESIDENT_TOKENS = 40
_OURS = "value 1.5%"


@dataclass(frozen=True)
class Bench:
    """What every table needs.

    Attributes:
        store: the model to time.
        quality: see `table.Quality`.
        plans: widths; None: the source has none.
        setting: how the main table is measured; its first budget is used here.
        top_k: experts that a token chooses in a layer.
        progress: told of the work.
    """

    store: ExpertStore
    quality: Quality
    plans: Plans | None
    setting: Setting
    top_k: int
    progress: Progress = silent

    @property
    def budget(self) -> tuple[str, float]:
        """The first budget, as it was written and as a share."""
        return next(iter(self.setting.budgets.items()))

    def systems(self) -> list[System]:
        """Full offload, MoE-Offload and ours, lossy where there is a model to say what that costs."""
        known = [*lossless_systems(self.top_k), *width_systems()]
        wanted = [FULL, MOE_OFFLOAD[1], LOSSLESS, *([_OURS] if self.plans is not None else [])]
        return [system for system in known if system.name in wanted]

    def decisions(self, system: System) -> Decisions:
        """What it replays, in neurons of the store's experts."""
        return self.quality(system, self.budget[1]).decisions.scaled(self.store.layout.width)


def lengths(bench: Bench) -> dict[str, Any]:
    """Prompts of several lengths: tokens per second of prefill.

    Source: CRISP Fig. 17.
    """
    rows, systems = [], bench.systems()
    for number, length in enumerate(LENGTHS):
        for system in systems:
            decisions = bench.decisions(system)
            if len(decisions) < 2 * length:
                continue
            seconds = _timed(bench, system, decisions, np.arange(len(decisions) - length, len(decisions))[None], True)
            rows.append(_row(bench, system, length=length, tokens_per_s=length / seconds))
        bench.progress("prompts", number + 1, len(LENGTHS))
    return {"by": "length", "about": f"prompts: tokens per second, at {bench.budget[0]}", "rows": rows}


def batches(bench: Bench) -> dict[str, Any]:
    """Several sequences side by side: tokens per second of decoding."""
    rows, systems = [], bench.systems()
    for number, batch in enumerate(BATCHES):
        for system in systems:
            decisions = bench.decisions(system)
            seconds = _timed(bench, system, decisions, side_by_side(len(decisions), batch), False)
            rows.append(_row(bench, system, batch=batch, tokens_per_s=_STEPS * batch / seconds))
        bench.progress("batches", number + 1, len(BATCHES))
    return {"by": "batch", "about": f"batches: tokens per second, at {bench.budget[0]}", "rows": rows}


def side_by_side(total: int, batch: int) -> NDArray[np.int64]:
    """[S, B] tokens: the recording cut into `batch` stretches of equal length, of which each row runs the last steps.

    Args:
        total: recorded tokens.
        batch: sequences, B.
    """
    each = total // batch
    steps = min(each, _WARM_STEPS + 1 + _STEPS)
    rows_SB: NDArray[np.int64] = np.arange(each - steps, each)[:, None] + np.arange(batch) * each
    return rows_SB


def batch_visits(decisions: Decisions, store: ExpertStore, rows_SB: NDArray[Any]) -> Iterator[Visit]:
    """What steps of a batch ask of the cache: of each expert as much as the sequence that runs most of it."""
    uses = decisions.uses(store.layout)
    for rows_B in rows_SB:
        for layer in range(store.layout.num_layers):
            need_E = np.zeros(store.layout.num_experts, np.int64)
            np.maximum.at(need_E, uses.ids_TLK[rows_B, layer].reshape(-1), uses.blocks_TLK[rows_B, layer].reshape(-1))
            experts_N = np.flatnonzero(need_E)
            yield layer, experts_N, need_E[experts_N]


def _timed(bench: Bench, system: System, decisions: Decisions, rows: NDArray[Any], prompt: bool) -> float:
    """Seconds of a prompt [1, T], or of the last steps of a batch [S, B], from a warm cache."""
    replayer, budget = Replayer(decisions), budget_bytes(system, bench.budget[1], bench.store)
    model = offload(
        bench.store.folder, budget, None if decisions.widths_TLK is None else replayer.widths, policy=system.policy,
        schedule=system.schedule, bandwidth=bench.setting.bandwidth, **system.options,
    )  # fmt: skip
    before = np.arange(max(0, rows.min() - _WARM_STEPS), rows.min())[:, None] if prompt else rows[: -_STEPS - 1]
    try:
        model.warm(batch_visits(decisions, bench.store, before))
        with replayer.intercepting(model):
            if prompt:
                return replay_prefill(model, replayer, rows[0], bench.setting.seed)
            replay_decode(model, replayer, rows[-_STEPS - 1 : -_STEPS], bench.setting.seed)
            return sum(replay_decode(model, replayer, rows[-_STEPS:], bench.setting.seed))
    finally:
        model.close()


def _row(bench: Bench, system: System, **figures: Any) -> dict[str, Any]:
    increase = bench.quality(system, bench.budget[1]).increase
    return {"system": system.name, "budget": bench.budget[0], **figures, "perplexity_increase": increase}


def scheduling(bench: Bench) -> dict[str, Any]:
    """Microseconds of deciding, a token and layer, with every expert resident: no read is begun.

    Looking up is finding widths in the plan's tables; coordination is everything else that is not computing: cache,
    policy, schedule, grouping.

    Source: CRISP Table 3.
    """
    from coterie.ops.value_widths import host_widths
    from coterie.ops.widths import WidthTables

    measured = None if bench.plans is None else bench.plans.get(_OURS)
    decisions = bench.decisions(System("any")) if measured is None else measured.decisions.scaled(1)
    widths = None if measured is None or measured.plan is None else host_widths(WidthTables.of(measured.plan))
    layout, replayer = bench.store.layout, Replayer(decisions)
    if measured is not None and measured.plan is not None and measured.plan.width > layout.width:
        raise ConfigError(
            f"the plan is for {measured.plan.width} neurons an expert, the model to time has {layout.width}; looking "
            "up widths is timed with the plan's own, so time a model of as many"
        )
    model = offload(bench.store.folder, "100%", widths)
    try:
        every, whole = np.arange(layout.num_experts), np.full(layout.num_experts, layout.blocks)
        model.warm((layer, every, whole) for layer in range(layout.num_layers))
        rows_S1 = np.arange(min(len(decisions), _RESIDENT_TOKENS + 4))[:, None]
        with replayer.intercepting(model):
            replay_decode(model, replayer, rows_S1[:4])
            before = model.stats()
            replay_decode(model, replayer, rows_S1[4:])
        stats = model.stats().since(before)
    finally:
        model.close()
    parts = {"looking up widths": stats.lookup_seconds, "coordination": stats.coordination_seconds}
    microseconds = {name: seconds / stats.layer_visits * 1e6 for name, seconds in parts.items()}
    microseconds["both"] = sum(microseconds.values())
    about = "deciding, all experts resident; asked: under 50 microseconds a token and layer"
    return {"microseconds": microseconds, "asked": 50.0, "tokens": len(rows_S1) - 4, "about": about}
