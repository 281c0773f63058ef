"""`coterie bench offload` as a function: what to replay, what to run it on, and all tables as one JSON object."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import coterie
from coterie.bench.offload.bench_model import BenchShape, bench_shape, make_bench_store
from coterie.bench.offload.cached_plans import CachedPlans
from coterie.bench.offload.decisions import Decisions, decisions_of_trace
from coterie.bench.offload.plans import SIZE, Measured, Plans
from coterie.bench.offload.schedules import schedules
from coterie.bench.offload.studies import Bench, batches, lengths, scheduling
from coterie.bench.offload.systems import (
    System,
    cached_systems,
    chosen_systems,
    lossless_systems,
    rounded_systems,
    width_systems,
)
from coterie.bench.offload.table import Quality, Rounded, Setting, measure_table
from coterie.bench.offload.targets import asked_of
from coterie.checkpoint.expert_store import ExpertStore
from coterie.checkpoint.store_layout import StoreLayout
from coterie.errors import BudgetError, ConfigError, unknown_name
from coterie.files import write_text
from coterie.progress import Progress, silent
from coterie.spec import MoESpec
from coterie.study.widths.context import StudyContext, StudySize, make_context
from coterie.trace.routing_trace import RoutingTrace


@dataclass(frozen=True, eq=False)
class Source:
    """Where decisions come from.

    Attributes:
        spec: the model's routing.
        quality: see `table.Quality`.
        systems: what it can be asked for.
        about: it, ready for JSON.
        plans: widths, where there is a model.
    """

    spec: MoESpec
    quality: Quality
    systems: Sequence[System]
    about: Mapping[str, Any]
    plans: Plans | None = None

    @property
    def full(self) -> Measured:
        """Full width."""
        return self.quality(System("any"), 1.0)


def source_of_model(
    model: str, texts: Mapping[str, str], seed: int = 0, size: StudySize = SIZE, progress: Progress = silent,
    keep: Path | None = None,
) -> Source:  # fmt: skip
    """A trained model: routing and loss are its own, on text that nothing was chosen on.

    Args:
        model: a folder or a shipped model's name; it is held in float32.
        texts: by name; widths are chosen on first halves, losses measured on second ones.
        seed: of what chance enters.
        size: how much text.
        progress: told of the work.
        keep: where the model to time is kept; what is learnt about widths stays beside it, for the next run.
    """
    learning = None if keep is None else keep.with_name(f"{keep.name}.{Path(model).name}.learning")
    context: StudyContext = make_context(
        model, texts=texts, quick=True, seed=seed, size=size, progress=progress, learning=learning
    )
    plans = Plans(context)
    about = {
        **context.facts, "texts": sorted(texts), "held_out_tokens": int(context.bench.ids_WN.numel()),
        "calibration_tokens": int(context.calibration.ids_WN.numel()), "window": size.window,
    }  # fmt: skip
    spec = context.profile.spec
    systems = [*lossless_systems(spec.top_k), *width_systems(), *cached_systems(), *rounded_systems()]
    return Source(spec, lambda system, share: plans.get(system.widths), systems, about, plans)


def source_of_trace(trace: RoutingTrace, name: str) -> Source:
    """A recorded trace: what does not change the outputs can be replayed from it, and nothing else."""
    full = Measured(None, 0.0, (0.0, 0.0), 0.0, decisions_of_trace(trace))
    about = {"trace": name, "fingerprint": trace.fingerprint(), "model": trace.spec.model}
    return Source(trace.spec, lambda system, share: full, lossless_systems(trace.spec.top_k), about)


@contextmanager
def bench_store(
    shape: BenchShape, keep: Path | None = None, seed: int = 0, progress: Progress = silent, bits: int | None = None
) -> Iterator[ExpertStore]:  # fmt: skip
    """The store to time, removed afterwards unless it is kept.

    Args:
        shape: of its model.
        keep: where it stays, and where one that is there is used again; None: a temporary folder.
        seed: of its weights.
        progress: told of the writing.
        bits: 8: in eight bits, kept beside the other; None: bfloat16.

    Raises:
        ConfigError: when the disk is too small, or the folder holds something else.
    """
    if keep is not None:
        beside = keep if bits is None else keep.with_name(f"{keep.name}.{bits}bits")
        yield make_bench_store(beside, shape, seed, progress, bits)
        return
    folder = Path(tempfile.mkdtemp(prefix="coterie-bench-"))
    try:
        yield make_bench_store(folder / "store", shape, seed, progress, bits)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def require_budgets(budgets: Mapping[str, float], spec: MoESpec) -> None:
    """Refuse budgets that do not hold what a token needs in one layer.

    Raises:
        BudgetError: naming the smallest.
    """
    smallest = spec.top_k / (spec.num_layers * spec.num_experts)
    for text, share in budgets.items():
        if share < smallest:
            raise BudgetError(
                f"a budget of {text} of all experts cannot hold the {spec.top_k} that a token needs in one layer; the "
                f"smallest that works here is {smallest:.2%}"
            )


def require_shape(spec: MoESpec, shape: BenchShape) -> None:
    """Refuse to replay routing on a model of another shape.

    Raises:
        ConfigError: naming both.
    """
    ours, theirs = (spec.num_layers, spec.num_experts, spec.top_k), (shape.layers, shape.experts, shape.top_k)
    if ours != theirs:
        raise ConfigError(
            "the routing is of {} layers of {} experts, top-{}, ".format(*ours)
            + "the model to time of {} layers of {} experts, top-{}; use routing of its shape".format(*theirs)
        )


def require_tokens(setting: Setting, decisions: Decisions) -> None:
    """Refuse more tokens than were recorded.

    Raises:
        ConfigError: naming how many there are.
    """
    if setting.tokens < setting.rounds:
        raise ConfigError(f"{setting.tokens} tokens in {setting.rounds} rounds: give at least one a round")
    most = len(decisions) // 3
    if setting.tokens > most:
        raise ConfigError(
            f"{setting.tokens} tokens are to be timed, {len(decisions):,} were recorded, most of which warm the cache; "
            f"time at most {most:,}"
        )


STUDIES: Mapping[str, Callable[[Bench], dict[str, Any]]] = {
    "schedules": schedules, "lengths": lengths, "batches": batches, "scheduling": scheduling,
}  # fmt: skip


def run_bench(
    source: Source, setting: Setting, *, systems: Sequence[str] = (), studies: Sequence[str] = (),
    keep: Path | None = None, shape: BenchShape | None = None, progress: Progress = silent,
) -> dict[str, Any]:  # fmt: skip
    """All rows, and the tables of further studies, on a bench model of the source's shape.

    Args:
        source: whose decisions are replayed.
        setting: how.
        systems: names; empty: all that the source has.
        studies: names of further tables.
        keep: see `bench_store`.
        shape: of the bench model; None: `bench_shape`.
        progress: told of the work.

    Raises:
        BudgetError: for a budget that is too small.
        ConfigError: for unknown names, too many tokens, or a disk that is too small.
    """
    for name in studies:
        if name not in STUDIES:
            raise unknown_name("table", name, STUDIES)
    chosen = chosen_systems(source.systems, systems)
    require_budgets(setting.budgets, source.spec)
    shape, started = shape or bench_shape(source.spec), time.monotonic()
    require_shape(source.spec, shape)
    require_tokens(setting, source.full.decisions)
    cached = None
    if source.plans is not None:
        cached = CachedPlans(source.plans, shape, tuple(setting.budgets.values()), progress)

    def quality(system: System, share: float) -> Measured:
        return cached.get(system.name, share) if cached and system.by_budget else source.quality(system, share)

    with ExitStack() as stack:
        store, rounded = stack.enter_context(bench_store(shape, keep, setting.seed, progress)), None
        if any(system.bits for system in chosen):
            own = stack.enter_context(bench_store(shape, keep, setting.seed, progress, bits=8))
            rounded = Rounded(own, partial(shape.share_in, bits=8))
        rows = measure_table(store, chosen, quality, setting, progress, rounded)
        bench = Bench(store, quality, source.plans, setting, source.spec.top_k, progress)
        found = {name: STUDIES[name](bench) for name in studies}
        layout = store.layout
    about = {
        "routing": dict(source.about), "spec": source.spec.to_json(), "systems": about_systems(chosen),
        "bench_model": about_model(layout, shape.top_k, True),
        "widths": {} if source.plans is None else {name: each.to_json() for name, each in source.plans.made().items()},
        "by_budget": {} if cached is None else dict(cached.to_json()),
    }  # fmt: skip
    rows = [{**row, "asked": asked_of(row, shape.coarse)} for row in rows]
    tables = {name: each.pop("rows", each) for name, each in found.items()}
    about["studies"] = {name: each for name, each in found.items() if each is not tables[name]}
    return {"rows": rows, **tables, **about, **provenance(setting), "seconds": round(time.monotonic() - started, 1)}


def about_model(layout: StoreLayout, top_k: int, random_weights: bool) -> dict[str, Any]:
    """The model that is timed, ready for JSON."""
    return {
        "layers": layout.num_layers, "experts": layout.num_experts, "top_k": top_k, "hidden": layout.hidden_size,
        "width": layout.width, "dtype": layout.dtype, "random_weights": random_weights,
        "expert_bytes": layout.record_bytes, "all_expert_bytes": layout.total_bytes,
        "blocks_per_expert": layout.blocks,
    }  # fmt: skip


def about_systems(systems: Sequence[System]) -> dict[str, Any]:
    """What each system is, ready for JSON."""
    return {
        system.name: {"policy": system.policy, "schedule": system.schedule, "widths": system.widths,
                      "options": dict(system.options), "about": system.about}
        for system in systems
    }  # fmt: skip


def provenance(setting: Setting) -> dict[str, Any]:
    """Versions, seed and configuration."""
    packages = ("torch", "transformers", "numpy")
    configuration = {**asdict(replace(setting, budgets=dict(setting.budgets))), "threads": _threads()}
    return {
        "emulated_bandwidth": setting.bandwidth, "configuration": configuration, "seed": setting.seed,
        "versions": {"coterie": coterie.__version__, **{name: version(name) for name in packages}},
    }  # fmt: skip


def _threads() -> int:
    import torch

    return int(torch.get_num_threads())


def write_bench(result: Mapping[str, Any], out: Path) -> Path:
    """Write offload.json into a folder.

    Raises:
        ConfigError: when it cannot be written.
    """
    file = out / "offload.json"
    write_text(file, json.dumps(result, allow_nan=False, indent=1) + "\n")
    return file
