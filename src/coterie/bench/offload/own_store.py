"""The same table for a user's own store: its model reads held-out text, and is timed with its decisions there."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie import data
from coterie.bench.offload.decisions import recording
from coterie.bench.offload.plans import Measured
from coterie.bench.offload.run import about_model, about_systems, provenance, require_budgets, require_tokens
from coterie.bench.offload.systems import System, chosen_systems, lossless_systems
from coterie.bench.offload.table import Setting, measure_table
from coterie.bench.offload.targets import asked_of
from coterie.checkpoint.expert_store import ExpertStore, open_store
from coterie.models.load import load_tokenizer
from coterie.offloading.model import offload
from coterie.progress import Progress, silent
from coterie.study.measure import Bench, bootstrap
from coterie.study.widths.context import spread_windows

if TYPE_CHECKING:
    from coterie.pruning.width_plan import WidthPlan

PLANNED = "planned widths"
_WINDOW, _WINDOWS = 128, 16


def run_own_store(
    folder: Path, setting: Setting, *, plan: WidthPlan | None = None, systems: Sequence[str] = (),
    texts: Mapping[str, str] | None = None, progress: Progress = silent,
) -> dict[str, Any]:  # fmt: skip
    """Rows for a store: systems that do not change its outputs, and a width plan's where one is given.

    Args:
        folder: the store.
        setting: how.
        plan: widths for it; None: none.
        systems: names; empty: all.
        texts: what its model reads, by name; None: the second halves of the texts that ship.
        progress: told of the work.

    Raises:
        BudgetError: for a budget that is too small.
        CheckpointError: for a store that cannot be used, or has no tokenizer.
        ConfigError: for an unknown system, a plan of another model, or too many tokens.
    """
    store, started = open_store(folder), time.monotonic()
    spec = store.header.spec
    known = lossless_systems(spec.top_k)
    if plan is not None:
        known.append(System(PLANNED, widths=PLANNED, about="ours with the given width plan"))
    chosen = chosen_systems(known, systems)
    require_budgets(setting.budgets, spec)
    if texts is None:
        texts = {name: data.text(name)[len(data.text(name)) // 2 :] for name in data.text_names()}
    ids_WN, _ = spread_windows(load_tokenizer(store.skeleton), texts, _WINDOW, _WINDOWS)
    largest = max(setting.budgets.values())
    found: dict[str | None, tuple[Measured, Any]] = {None: _read(store, ids_WN, None, None, largest, progress)}
    if plan is not None:
        found[PLANNED] = _read(store, ids_WN, plan, found[None], largest, progress)
    require_tokens(setting, found[None][0].decisions)
    rows = measure_table(store, chosen, lambda system, share: found[system.widths][0], setting, progress)
    return {
        "rows": [{**row, "asked": asked_of(row, False)} for row in rows],
        "routing": {"model": spec.model, "texts": sorted(texts), "held_out_tokens": int(ids_WN.numel())},
        "spec": spec.to_json(), "bench_model": about_model(store.layout, spec.top_k, False),
        "systems": about_systems(chosen), "widths": {} if plan is None else {PLANNED: found[PLANNED][0].to_json()},
        "full_perplexity": math.exp(found[None][1].mean()), **provenance(setting),
        "seconds": round(time.monotonic() - started, 1),
    }  # fmt: skip


def _read(
    store: ExpertStore, ids_WN: Any, plan: WidthPlan | None, full: tuple[Measured, Any] | None, budget: float,
    progress: Progress,
) -> tuple[Measured, Any]:  # fmt: skip
    """What the model chose on the text, and its loss there, [W, S]; `full`: the same at full width."""
    model = offload(store.folder, budget, plan)
    try:
        with recording(model) as found:
            nll_WS = Bench(model, ids_WN, progress=progress).base_WS
        decisions = replace(found.decisions().under(plan), width=store.layout.width)
    finally:
        model.close()
    if full is None:
        return Measured(plan, 0.0, (0.0, 0.0), 0.0, decisions), nll_WS
    rise_WS = nll_WS - full[1]
    return Measured(plan, math.expm1(rise_WS.mean()), bootstrap(rise_WS), None, decisions), nll_WS
