"""Orders of a layer's loads side by side, on a link so slow that reading a layer takes as long as computing it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.bench.offload.decisions import Decisions
from coterie.bench.offload.replay import Replayer, replay_prefill
from coterie.bench.offload.studies import Bench
from coterie.bench.offload.systems import System
from coterie.bench.offload.timing import Resident, Round, budget_bytes
from coterie.offloading.link import blocks_a_read
from coterie.offloading.model import offload
from coterie.policies.schedule import get_schedule, makespan

_TOKENS = 6
_MOST_ROWS = 2048
_SLOWER = 0.8  # of the link's own rate, at most: an emulated link cannot be faster
_ORDER = ("fifo", "widest-first", "johnson")


def schedules(bench: Bench) -> dict[str, Any]:
    """Overlap and speed by schedule, where loading and computing a layer take equally long.

    Nothing stays from one token to the next, so every expert is loaded, at the widths of the paper's plan (of chance,
    where there is no plan). Reading is slower than computing here, so every expert computes as many rows as it takes
    for both to be equal: all tokens of a prompt choose what one recorded token chose.

    First as in the paper, an expert computed when all of it is there: an order then hides one expert behind another.
    Then as the runtime does, in pieces.

    Source: CRISP §3.4.1, §5.4.
    """
    decisions = _decisions(bench)
    tokens = np.linspace(0, len(decisions) - 1, _TOKENS + 1).round().astype(np.int64)
    limit = _SLOWER * (bench.setting.bandwidth or 1e9)
    rows, rate = _balanced(bench, decisions, tokens, limit)
    jobs = [_jobs(bench, decisions, token) for token in tokens[1:]]
    found = []
    runs = [(name, pieces, False) for pieces in (False, True) for name in _ORDER] + [(_ORDER[-1], True, True)]
    for number, (name, pieces, ahead) in enumerate(runs):
        room, options = 2 if ahead else 1, {"ahead": ahead, "pieces": pieces}
        system = System("any", "lru-whole", name, options=options, budget_experts=room * bench.top_k)
        timed = _time(bench, system, decisions, tokens, rows, rate)
        compute, piece = timed.stats.compute_seconds, blocks_a_read(bench.store.layout) if pieces else None
        found.append(
            {
                "schedule": name + (", in pieces" if pieces else "") + (", reading ahead" if ahead else ""),
                "overlap": timed.stats.overlap, "attainable_overlap": timed.stats.attainable_overlap,
                "within_a_layer": None if ahead else _expected(bench, jobs, name, rate, compute, piece),
                "tokens_per_s": timed.tokens_per_s,
            }
        )  # fmt: skip
        bench.progress("schedules", number + 1, len(runs))
    about = f"schedules: an emulated link of {rate / 1e9:.2f} GB/s, {rows} rows an expert, loading as long as computing"
    return {"about": about, "rows": found, "bandwidth": rate, "rows_per_expert": rows, "asked_overlap": 0.78}


def _decisions(bench: Bench) -> Decisions:
    """Of the paper's plan; or of chance widths."""
    width = bench.store.layout.width
    if bench.plans is not None:
        return bench.plans.get("crisp").decisions.scaled(width)
    decisions = bench.decisions(System("any"))
    rng = np.random.default_rng(bench.setting.seed)
    widths = rng.choice([width, width // 2], decisions.ids_TLK.shape).astype(np.int64)
    return Decisions(decisions.ids_TLK, decisions.weights_TLK, widths, width)


def _balanced(bench: Bench, decisions: Decisions, tokens: NDArray[Any], limit: float) -> tuple[int, float]:
    """Rows of each expert, and the rate of a link that reads what they need while they compute."""
    uses = decisions.uses(bench.store.layout)
    nbytes = float(uses.blocks_TLK[tokens[1:]].sum()) * bench.store.layout.block_bytes
    resident, rows, rate = Resident(bench.store), 32, np.inf
    try:
        while rate > limit and rows < _MOST_ROWS:
            rows *= 2
            resident.replayer.use(decisions)
            with resident.replayer.intercepting(resident.model):
                replay_prefill(resident.model, resident.replayer, np.full(rows, tokens[0]))
                before = resident.model.stats()
                for token in tokens[1:]:
                    replay_prefill(resident.model, resident.replayer, np.full(rows, token))
            rate = nbytes / resident.model.stats().since(before).compute_seconds
    finally:
        resident.close()
    return rows, float(min(rate, limit))


def _time(bench: Bench, system: System, decisions: Decisions, tokens: NDArray[Any], rows: int, rate: float) -> Round:
    replayer = Replayer(decisions)
    model = offload(
        bench.store.folder, budget_bytes(system, 1.0, bench.store), replayer.widths, policy=system.policy,
        schedule=system.schedule, bandwidth=rate, **system.options,
    )  # fmt: skip
    try:
        with replayer.intercepting(model):
            replay_prefill(model, replayer, np.full(rows, tokens[0]))
            before = model.stats()
            seconds = sum(replay_prefill(model, replayer, np.full(rows, token)) for token in tokens[1:])
        return Round(seconds, len(tokens) - 1, model.stats().since(before))
    finally:
        model.close()


def _jobs(bench: Bench, decisions: Decisions, token: int) -> list[NDArray[Any]]:
    """For every layer of a token the blocks of its experts, in the router's order."""
    uses = decisions.uses(bench.store.layout)
    return [uses.blocks_TLK[token, layer] for layer in range(bench.store.layout.num_layers)]


def _expected(
    bench: Bench, jobs: list[list[NDArray[Any]]], name: str, rate: float, compute_seconds: float, piece: int | None
) -> float:
    """The overlap that a schedule can have within one layer, reads and computations of the measured speeds.

    An expert is as many jobs as it has pieces of `piece` blocks, in their order; without pieces it is one.
    """
    order, nbytes = get_schedule(name), bench.store.layout.block_bytes
    piece = piece or bench.store.layout.blocks
    total = sum(float(blocks_K.sum()) for token in jobs for blocks_K in token)
    load, compute = nbytes / rate, compute_seconds / total  # of a block
    exposed = 0.0
    for token in jobs:
        for blocks_K in token:
            ordered = blocks_K[order(blocks_K * load, blocks_K * compute, blocks_K)].tolist()
            pieces_N = np.array([min(piece, blocks - first) for blocks in ordered for first in range(0, blocks, piece)])
            exposed += makespan(pieces_N * load, pieces_N * compute, np.arange(len(pieces_N)))
            exposed -= float(blocks_K.sum()) * compute
    return max(0.0, 1 - exposed / (total * load))
