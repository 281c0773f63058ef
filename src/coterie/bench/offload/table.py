"""The table of systems: at every budget how fast each is, what it reads, and how near its bounds that is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.bench.offload.bounds import beyond_budget, certain_blocks, least_seconds, reads_of, segments
from coterie.bench.offload.decisions import Decisions
from coterie.bench.offload.plans import Measured
from coterie.bench.offload.systems import FULL, MOE_OFFLOAD, System
from coterie.bench.offload.timing import Resident, Round, budget_bytes, time_round
from coterie.checkpoint.expert_store import ExpertStore
from coterie.models.memory import available_bytes
from coterie.policies.belady import Belady
from coterie.policies.registry import make_policy
from coterie.progress import Progress, silent

_FITS = 0.9  # of the free memory may be taken to time everything resident
_WARM = 1 / 3  # of the recorded tokens fill the cache and teach the policy before any is counted

Quality = Callable[[System, float], Measured]
"""(system, budget as a share) -> what it costs, and its decisions on held-out text."""


@dataclass(frozen=True)
class Setting:
    """How the table is measured.

    Attributes:
        budgets: shares of all experts, by how they were written.
        bandwidth: bytes per second of the emulated link; None: the real one.
        tokens: timed for each system and budget, over all rounds.
        rounds: stretches they are in; all systems take turns in each.
        seed: of what chance enters.
    """

    budgets: Mapping[str, float]
    bandwidth: float | None = 1e9
    tokens: int = 16
    rounds: int = 2
    seed: int = 0

    def segments(self, decisions: Decisions) -> list[NDArray[Any]]:
        """Which tokens each round decodes; the first of each is not timed."""
        each = max(1, self.tokens // self.rounds)
        return segments(len(decisions), self.rounds, each + 1, int(len(decisions) * _WARM))


@dataclass(frozen=True)
class Rounded:
    """The model to time in eight bits.

    Attributes:
        store: of it.
        share: from a budget, as a share of all experts as they are, to the share of them in eight bits that it holds.
    """

    store: ExpertStore
    share: Callable[[float], float]


@dataclass(eq=False)
class Cell:
    """One system at one budget; `share` is of all experts of its own store."""

    system: System
    budget: str
    share: float
    measured: Measured
    decisions: Decisions
    store: ExpertStore
    rounds: list[Round] = field(default_factory=list)


def measure_table(
    store: ExpertStore, systems: Sequence[System], quality: Quality, setting: Setting, progress: Progress = silent,
    rounded: Rounded | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Time every system at every budget on recorded tokens, in turns, and set it beside its bounds.

    Args:
        store: the model to time.
        systems: what is compared.
        quality: what each costs, and what it chose.
        setting: how.
        progress: told of every round.
        rounded: the same model in eight bits, for systems that read that.

    Returns:
        rows, ready for JSON.
    """
    cells: list[Cell] = []
    for budget, share in setting.budgets.items():
        for system in systems:
            if system.budget_experts is not None and any(cell.system is system for cell in cells):
                continue  # it has the same memory at every budget
            measured = quality(system, share)
            decisions, own, of = measured.decisions.scaled(store.layout.width), share, store
            if system.bits is not None:
                assert rounded is not None, "a store in eight bits for systems that read one"
                own, of = rounded.share(share), rounded.store
            cells.append(Cell(system, budget, own, measured, decisions, of))
    rounds, done = setting.segments(cells[0].decisions), 0
    for rows_S in rounds:
        for cell in cells:
            options = cell.measured.options
            cell.rounds.append(
                time_round(
                    cell.store,
                    cell.system,
                    cell.share,
                    cell.decisions,
                    rows_S,
                    setting.bandwidth,
                    setting.seed,
                    options,
                )
            )
            done += 1
            progress("timing", done, len(rounds) * len(cells))
    computing = _computing(cells, rounds, setting)
    bandwidth = setting.bandwidth or max(_link(cell) for cell in cells)
    record_bytes = store.layout.blocks * store.layout.block_bytes
    rows = [_row(cell, computing[id(cell.measured)], rounds, bandwidth, record_bytes) for cell in cells]
    return _compared(rows, cells, setting)


def _computing(cells: Sequence[Cell], rounds: Sequence[NDArray[Any]], setting: Setting) -> dict[int, float]:
    """Seconds a token takes with everything resident, by what runs; where it does not fit, without the waiting."""
    found: dict[int, float] = {}
    for folder in dict.fromkeys(cell.store.folder for cell in cells):
        own = [cell for cell in cells if cell.store.folder == folder]
        found |= _computing_from(own[0].store, own, rounds, setting)
    return found


def _computing_from(
    store: ExpertStore, cells: Sequence[Cell], rounds: Sequence[NDArray[Any]], setting: Setting
) -> dict[int, float]:
    distinct = {id(cell.measured): cell.decisions for cell in cells}
    if store.layout.total_bytes > _FITS * available_bytes():
        return {key: min(_without_waiting(cell) for cell in cells if id(cell.measured) == key) for key in distinct}
    resident = Resident(store)
    try:
        found: dict[int, list[Round]] = {key: [] for key in distinct}
        for rows_S in rounds:
            for key, decisions in distinct.items():
                found[key].append(resident.time(decisions, rows_S[:, None], setting.seed))
    finally:
        resident.close()
    return {key: sum(each.seconds for each in own) / sum(each.tokens for each in own) for key, own in found.items()}


def _without_waiting(cell: Cell) -> float:
    """Seconds a token took, but for waiting for reads."""
    seconds = sum(each.seconds - each.stats.exposed_seconds for each in cell.rounds)
    return seconds / sum(each.tokens for each in cell.rounds)


def _link(cell: Cell) -> float:
    """Bytes a second while anything was read; 0 without reads."""
    loaded = sum(each.stats.loaded_bytes for each in cell.rounds)
    return loaded / (sum(each.stats.load_seconds for each in cell.rounds) or 1.0)


def _row(
    cell: Cell, computing: float, rounds: Sequence[NDArray[Any]], bandwidth: float, record_bytes: int
) -> dict[str, Any]:
    """Its figures; shares are of what full offload reads, experts of `record_bytes` as they are."""
    layout, uses = cell.store.layout, cell.decisions.uses(cell.store.layout)
    blocks = budget_bytes(cell.system, cell.share, cell.store) // layout.block_bytes
    policy, factor = make_policy(cell.system.policy, uses.shape), cell.measured.options.get("skip_misses", 0)
    read_T = reads_of(uses, policy, blocks, cell.decisions.weights_TLK, factor)
    certain = replace(uses, blocks_TLK=certain_blocks(uses, cell.decisions.weights_TLK, factor))
    belady_T = reads_of(certain, Belady(uses.shape, uses.ids_TLK, certain.blocks_TLK), blocks)
    timed, counted = np.concatenate([rows_S[1:] for rows_S in rounds]), slice(int(len(read_T) * _WARM), None)
    whole = int(uses.chosen_T[0]) * record_bytes / layout.block_bytes  # in blocks: what full offload reads a token
    loaded = sum(each.stats.loaded_bytes for each in cell.rounds)
    guessed = 1.0  # what guesses read besides is known of the timed tokens alone
    if cell.system.options.get("ahead") and read_T[timed].any():
        guessed = loaded / float(read_T[timed].sum() * layout.block_bytes)
    lossless = cell.decisions.widths_TLK is None and not factor
    least_T = belady_T if lossless else beyond_budget(certain, blocks)
    least = {
        "bound": float(least_T[timed].mean()) * layout.block_bytes,
        "belady": float(belady_T[timed].mean()) * layout.block_bytes, "own_bound": loaded / timed.size,
    }  # fmt: skip
    return {
        "budget": cell.budget, "system": cell.system.name, **_speeds(cell, computing, least, bandwidth),
        "bytes_share": guessed * float(read_T[counted].mean()) / whole,
        "timed_bytes_share": loaded / (timed.size * whole * layout.block_bytes),
        "belady_bytes_share": float(belady_T[counted].mean()) / whole,
        "demanded_share": float(uses.blocks_TLK[counted].sum(axis=(1, 2)).mean()) / whole,
        "perplexity_increase": cell.measured.increase, "interval_95": list(cell.measured.interval),
        "calibration_increase": cell.measured.calibration_increase, "budget_bytes": blocks * layout.block_bytes,
        **_deciding(cell),
    }  # fmt: skip


def _speeds(cell: Cell, computing: float, least: Mapping[str, float], bandwidth: float) -> dict[str, Any]:
    """How fast it was, and as a share of what `least` bytes a token allow; how much of the loading was hidden."""
    seconds = sum(each.seconds for each in cell.rounds) / sum(each.tokens for each in cell.rounds)
    load = sum(each.stats.load_seconds for each in cell.rounds)
    exposed = sum(each.stats.exposed_seconds for each in cell.rounds)
    attainable = min(1.0, sum(each.stats.compute_seconds for each in cell.rounds) / load) if load else 1.0
    overlap = max(0.0, 1 - exposed / load) if load else 1.0
    bounds = {name: least_seconds(computing, nbytes, bandwidth) for name, nbytes in least.items()}
    return {
        "tokens_per_s": 1 / seconds, "rounds_tokens_per_s": [each.tokens_per_s for each in cell.rounds],
        **{f"{name}_tokens_per_s": 1 / bound for name, bound in bounds.items()},
        **{f"share_of_{name}": bound / seconds for name, bound in bounds.items()},
        "overlap": overlap, "attainable_overlap": attainable,
        "share_of_attainable": overlap / attainable if attainable else 1.0,
        "compute_seconds_per_token": computing, "link_bytes_per_s": _link(cell) or None,
    }  # fmt: skip


def _deciding(cell: Cell) -> dict[str, float]:
    """Microseconds a token and layer of looking up widths (recorded ones here) and of coordination."""
    visits = sum(each.stats.layer_visits for each in cell.rounds)
    lookup = sum(each.stats.lookup_seconds for each in cell.rounds)
    coordination = sum(each.stats.coordination_seconds for each in cell.rounds)
    return {"lookup_us": lookup / visits * 1e6, "coordination_us": coordination / visits * 1e6}


def _compared(rows: list[dict[str, Any]], cells: Sequence[Cell], setting: Setting) -> list[dict[str, Any]]:
    """Every budget's rows, those of one memory repeated, with ratios to full offload and to MoE-Offload."""
    every = []
    for budget in setting.budgets:
        own = [(row, cell) for row, cell in zip(rows, cells, strict=True)
               if row["budget"] == budget or cell.system.budget_experts is not None]  # fmt: skip
        full = [cell for _, cell in own if cell.system.name == FULL]
        moe = [cell for _, cell in own if cell.system.name in MOE_OFFLOAD]
        for row, cell in own:
            ratios = {"over_full": _ratio(cell, full), "over_moe_offload": _ratio(cell, moe)}
            every.append({**row, "budget": budget, **ratios})
    return every


def _ratio(cell: Cell, others: Sequence[Cell]) -> dict[str, float] | None:
    """How many times as fast as the best of the others: over all rounds, and the least and most of any round."""
    if not others:
        return None
    best = max(others, key=lambda other: -sum(each.seconds for each in other.rounds))
    by_round = [theirs.seconds / own.seconds for own, theirs in zip(cell.rounds, best.rounds, strict=True)]
    total = sum(each.seconds for each in best.rounds) / sum(each.seconds for each in cell.rounds)
    return {"ratio": total, "least": min(by_round), "most": max(by_round)}
