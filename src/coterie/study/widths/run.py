"""All width studies of a model, in the order of the page, and what they found as one page and one JSON object."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import coterie
from coterie.errors import unknown_name
from coterie.report.page import Page
from coterie.study.output import prepared_folder, write_study
from coterie.study.widths import (
    asymmetric,
    curves,
    dominance,
    frequency_damage,
    iso_memory,
    memory,
    ordering,
    roles,
    skew,
    tiers_quality,
    transfer,
)
from coterie.study.widths.context import StudyContext

if TYPE_CHECKING:
    from coterie.progress import Progress


@dataclass(frozen=True)
class Study:
    """One section of the page.

    Attributes:
        name: its key in the result.
        run: measures; the result is ready for JSON.
        show: puts a result on the page.
        lifted: keys of its result that stand at the top of the whole result instead.
    """

    name: str
    run: Callable[[StudyContext], dict[str, Any]]
    show: Callable[[Page, dict[str, Any]], None]
    lifted: tuple[str, ...] = ()


STUDIES: Sequence[Study] = (
    Study("frequency_damage", frequency_damage.run, frequency_damage.show),
    Study("roles", roles.run, roles.show),
    Study("skew", skew.run, skew.show),
    Study("dominance", dominance.run, dominance.show),
    Study("ordering", ordering.run, ordering.show),
    Study("policies", curves.run, curves.show, ("curves", "at_crisp_loss")),
    Study("iso_memory", iso_memory.run, iso_memory.show),
    Study("tiers_quality", tiers_quality.run, tiers_quality.show),
    Study("asymmetric", asymmetric.run, asymmetric.show),
    Study("transfer", transfer.run, transfer.show),
    Study("memory", memory.run, memory.show, ("offline_seconds",)),
)  # fmt: skip


def chosen_studies(names: Sequence[str] = ()) -> Sequence[Study]:
    """The studies of these names, in the order of the page; without names all.

    Raises:
        ConfigError: for an unknown name.
    """
    known = [study.name for study in STUDIES]
    for name in names:
        if name not in known:
            raise unknown_name("study", name, known)
    return [study for study in STUDIES if not names or study.name in names]


def run_studies(context: StudyContext, studies: Sequence[Study] = STUDIES) -> dict[str, Any]:
    """Everything the studies find, ready for JSON; the same for the same model, text and seed, but for seconds."""
    result = _head(context)
    seconds: dict[str, float] = {}
    for number, study in enumerate(studies):
        started = time.monotonic()
        found = study.run(context)
        seconds[study.name] = round(time.monotonic() - started, 2)
        result |= {name: found[name] for name in study.lifted}
        result[study.name] = {name: value for name, value in found.items() if name not in study.lifted}
        context.progress("studies", number + 1, len(studies))
    return {**result, "seconds": seconds}


def make_page(context: StudyContext, result: dict[str, Any], studies: Sequence[Study] = STUDIES) -> Page:
    """The page of a result."""
    page = Page(f"Width studies of {context.name}", _notes(context, result), context.subject)
    for study in studies:
        study.show(page, result[study.name] | {name: result[name] for name in study.lifted})
    return page


def _head(context: StudyContext) -> dict[str, Any]:
    profile, bench = context.profile, context.bench
    texts = {name: context.names.count(name) for name in dict.fromkeys(context.names)}
    packages = ("torch", "transformers", "numpy")
    return {
        "model": dict(context.facts),
        "versions": {"coterie": coterie.__version__, **{name: version(name) for name in packages}},
        "seeds": list(context.seeds),
        "configuration": {
            "quick": context.quick, **asdict(context.size), "profiled_tokens": profile.num_tokens,
            "measured_tokens": bench.num_tokens, "measured_windows": texts,
            "calibration_tokens": context.calibration.num_tokens,
        },
        "full_perplexity": bench.perplexity,
        "full_perplexity_on_calibration": context.calibration.perplexity,
    }  # fmt: skip


def _notes(context: StudyContext, result: dict[str, Any]) -> list[str]:
    facts, configuration = context.facts, result["configuration"]
    texts = ", ".join(f"{name} {count}" for name, count in configuration["measured_windows"].items())
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    seeds = result["seeds"]
    return [
        f"{context.subject}; {facts['moe_layers']} MoE layers of {facts['experts']} experts of "
        f"{facts['neurons_of_an_expert']} neurons, top-{facts['top_k']}; held in {facts['dtype']}. A small model, "
        "lightly trained: what it shows need not hold for one that is thousands of times larger, and the paper's "
        "figures are of such models.",
        f"Profiled, and everything that is chosen chosen, on the first half of every text "
        f"({configuration['profiled_tokens']:,} tokens profiled, {configuration['calibration_tokens']:,} to choose "
        f"on); measured on the second halves, which nothing was chosen on: {configuration['measured_tokens']:,} "
        f"scored tokens in windows of {configuration['window']} ({texts}). Models that ship with Coterie were "
        "trained on neither half.",
        f"Perplexity of the unchanged model: {result['full_perplexity']:.3f}. Increases are relative to it, token by "
        "token on the same windows. Bytes are the share of the chosen experts' bytes per token that is run. Ranges "
        f"are 95% intervals from resampling windows; seeds, where chance enters: {seeds[0]} to {seeds[-1]}.",
        f"{'A quick run on little text: expect wide intervals. ' if context.quick else ''}Made with {versions}.",
    ]


def study_widths(
    model: str, texts: dict[str, str], out: Path, *, quick: bool, seed: int, dtype: str | None, names: Sequence[str],
    progress: Progress,
) -> dict[str, Any]:  # fmt: skip
    """Run studies of a model and write their page.

    Source: CRISP §2, §5, A.1-A.5.

    Args:
        model: a folder, a shipped model's name or a hub id.
        texts: texts by name; the first half of each to choose on, the second to measure on.
        out: folder for index.html and study.json.
        quick: less text, one seed.
        seed: the first seed.
        dtype: to hold the model in; None: the checkpoint's own.
        names: of studies; empty: all.
        progress: told of the work.

    Raises:
        BackendUnavailable: without plotly.
        CheckpointError: for a model that cannot be used.
        ConfigError: for texts that are too short, an unknown study, or a folder that cannot be written to.
    """
    from coterie.report.page import graph_objects
    from coterie.study.widths.context import make_context

    graph_objects()  # refuses before the long work
    studies = chosen_studies(names)
    with prepared_folder(out):
        context = make_context(model, texts=texts, quick=quick, seed=seed, dtype=dtype, progress=progress)
        result = run_studies(context, studies)
        write_study(make_page(context, result, studies), result, out)
    return result
