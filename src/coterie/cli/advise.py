"""`coterie advise`: whether placing experts pays here, and how to use what is recommended."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli.common import JsonOption, SeedOption, emit_json, note, progress, say, table, warnings_as_notes
from coterie.cli.place import COLUMNS, HEADERS, LEGEND, SPEEDS_LEGEND, FormatOption, TopologyOption, TraceArgument

if TYPE_CHECKING:
    from coterie.models.expert_shape import ExpertSizes
    from coterie.trace.routing_trace import RoutingTrace

_MODEL, _FILE = "MODEL", "placement.json"


def advise(
    source: TraceArgument,
    topology: TopologyOption,
    engine: Annotated[str, typer.Option("--engine", help="vllm, sglang or tensorrt-llm.")],
    model: Annotated[
        str | None, typer.Option("--model", help="The model's config.json, folder or name: sizes for times and memory.")
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option("--backend", help="The engine's all-to-all backend, by its name; none where it has none."),
    ] = None,
    redundant: Annotated[
        int, typer.Option("--redundant", min=0, help="Slots of a layer for copies: what they bring and take.")
    ] = 0,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Tokens of each rank in a step.")] = 64,
    out: Annotated[Path | None, typer.Option("--out", help="Write the recommended placement there, .json.")] = None,
    heldout: Annotated[float, typer.Option(help="Share of the tokens, the latest sequences, that only measure.")] = 0.2,
    format_name: FormatOption = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Say whether placing experts pays on these devices, what it changes, and the commands to use it.

    Times need a topology from coterie calibrate; without one, placements are compared by counts.
    """
    from coterie.files import replacing
    from coterie.models.expert_shape import expert_sizes
    from coterie.placement.copies import FEWEST_DEVICES
    from coterie.placement.driver import prepare
    from coterie.report.advice import Situation
    from coterie.report.advice import advise as run
    from coterie.report.advice_engines import BACKENDS, DISPATCH, backend_of, how_to_use, refusals, require_one_to_write
    from coterie.topology import Topology
    from coterie.trace.open import open_trace

    chosen = backend_of(engine, backend)
    if chosen not in BACKENDS[engine]:
        note(
            f"{engine} is not known to have a backend {chosen!r} (known: {', '.join(BACKENDS[engine])}); taken as one "
            "that sends tokens only where they are needed"
        )
    devices = Topology.parse(topology)
    sizes = None if model is None else expert_sizes(model)
    with warnings_as_notes(), progress() as listen:
        trace = open_trace(source, format=format_name, progress=listen)
        _require_same(trace, sizes)
        rule = DISPATCH.get(engine, FEWEST_DEVICES)
        setting = prepare(trace, devices, seed=seed, progress=listen, redundant=redundant, dispatch=rule)
        refused = refusals(engine, setting)
        if out is not None:
            require_one_to_write(refused, redundant)
        situation = Situation(chosen, sizes, batch, refused)
        with nullcontext(None) if out is None else replacing(out) as place:  # a place to write to, before the work
            advice = run(setting, situation, heldout)
            if place is not None:
                advice.placement.save(place)
    use = how_to_use(engine, advice.placement, str(out or _FILE), model or _MODEL, chosen)
    if as_json:
        used = use.to_json() if advice.found["use"] else {"commands": [], "notes": []}
        emit_json({"engine": engine, "out": None if out is None else str(out), **advice.found, **used})
        return
    _show(advice.found, engine)
    if advice.found["use"]:
        say("to use it:" if out is not None else f"to use it, write it with --out {_FILE}, and then:")
        for command in use.commands:
            say(f"  {command}")
        for line in use.notes:
            say(f"note: {line}")
    if out is not None:
        say(f"wrote {out}")


def _require_same(trace: RoutingTrace, sizes: ExpertSizes | None) -> None:
    from coterie.errors import TraceError

    if sizes is None:
        return
    mine, theirs = trace.spec, sizes.spec
    if (mine.num_layers, mine.num_experts, mine.top_k) != (theirs.num_layers, theirs.num_experts, theirs.top_k):
        raise TraceError(
            f"the trace is of {mine.model} ({mine.num_layers} layers, {mine.num_experts} experts, top-{mine.top_k}), "
            f"--model is {theirs.model} ({theirs.num_layers}, {theirs.num_experts}, top-{theirs.top_k}); give its own"
        )


def _show(found: Mapping[str, Any], engine: str) -> None:
    about = found["trace"]
    say(
        f"{about['model']}, {engine} with {found['backend']}: fitted on {about['fit_tokens']:,} tokens, chosen on "
        f"{about['choice_tokens']:,} by {found['compared_by']}, judged on {about['judging_tokens']:,}, measured on "
        f"{about['heldout_tokens']:,}"
    )
    rows = []
    timed = all("step_s" in each for each in found["expected"].values())
    for name, each in found["expected"].items():
        times = [f"{each[key] * 1e3:.2f} ms" for key in ("compute_s", "communication_s", "step_s")] if timed else []
        rows.append([name, *(each[key] for key in COLUMNS), *times])
    table(["expected", *HEADERS, *(["experts", "exchanges", "step"] if timed else [])], rows)
    say(LEGEND)
    if found["topology"].get("speed_per_device"):
        say(SPEEDS_LEGEND)
    if timed:
        note("times are predicted from the topology's measured numbers, all MoE layers together, not measured")
    else:
        note("no times: the topology is not calibrated (coterie calibrate), or the hidden size unknown (--model)")
    _show_memory(found["memory"])
    if found["copies"] is not None:
        _show_copies(found["copies"], engine)
    say(
        found["reason"]
        if not found["use"]
        else f"use {found['recommended']}, by {found['compared_by']}: {found['reason']}"
    )


def _show_memory(memory: Mapping[str, Any]) -> None:
    slots, each = memory["redundant"], memory["expert_bytes"]
    said = [] if each is None else [f"one expert takes {each / 1e6:.1f} MB in each layer"]
    if slots:
        taken = memory["redundant_bytes_per_device"]
        size = "" if taken is None else f", {taken / 1e9:.2f} GB there"
        said.append(
            f"{slots} redundant slots a layer are {memory['redundant_share']:.1%} more expert memory, at most "
            f"{memory['redundant_slots_per_device']} a layer on a device{size}"
        )
    if said:
        say("; ".join(said))


def _show_copies(copies: Mapping[str, Any], engine: str) -> None:
    if copies["refused"] is not None:
        say(f"no copies: {copies['refused']}")
        return
    if copies["best"] is None:
        return
    change = f"{abs(copies['gain']):.1%} {'less' if copies['gain'] > 0 else 'more'}"
    verdict = "used" if copies["used"] else "not used"
    if copies["needed"]:
        verdict = f"used, since {engine} loads no placement here without them"
    say(
        f"copies: chosen as {engine} does ({copies['dispatch']}), {copies['best']} costs {change} than "
        f"{copies['against']} (chance alone makes {2 * copies['standard_error']:.1%}): {verdict}"
    )
