"""`coterie report`: a trace and its placements on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.common import JsonOption, SeedOption, emit_json, progress, say, table, warnings_as_notes
from coterie.cli.place import COLUMNS, COPIES_LEGEND, HEADERS, LEGEND, SPEEDS_LEGEND, FormatOption, TraceArgument


def report(
    source: TraceArgument,
    out: Annotated[Path, typer.Option("--out", help="The page to write, .html.")],
    placement: Annotated[
        list[Path] | None, typer.Option("--placement", help="A placement to show; may be repeated.")
    ] = None,
    topology: Annotated[
        str | None, typer.Option("--topology", help="Devices; without it the placements', or 8.")
    ] = None,
    heldout: Annotated[float, typer.Option(help="Share of the tokens, the latest sequences, that only measure.")] = 0.2,
    redundant: Annotated[
        int | None,
        typer.Option("--redundant", min=0, help="Slots of a layer for copies; without it the first placement's, or 0."),
    ] = None,
    dispatch: Annotated[
        str | None,
        typer.Option(
            "--dispatch",
            help="How tokens choose copies: fewest-devices, nearest or random; without it the first placement's.",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Without Coterie's own search.")] = False,
    format_name: FormatOption = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Write one page: company, loads, the spectrum, traffic, stability and skew of a trace and its placements."""
    from coterie.files import distinct, replacing
    from coterie.placement.copies import rule_of
    from coterie.placement.driver import prepare
    from coterie.placement.placement import Placement
    from coterie.report.page import graph_objects
    from coterie.report.placement_data import gather
    from coterie.report.placement_page import placement_page
    from coterie.topology import Topology
    from coterie.trace.open import open_trace

    graph_objects()  # refuses before the long work
    names = distinct([str(file) for file in placement or []], "placements")
    given = {name: Placement.load(file) for name, file in zip(names, placement or [], strict=True)}
    first = next(iter(given.values()), None)
    devices = first.topology if first else Topology.parse("8")
    devices = devices if topology is None else Topology.parse(topology)
    if redundant is None:
        redundant = first.num_copies if first else 0
    rule = dispatch or rule_of(first.method if first else {})
    with replacing(out) as temporary, warnings_as_notes(), progress() as listen:
        routing = open_trace(source, format=format_name, progress=listen)
        setting = prepare(routing, devices, seed=seed, progress=listen, redundant=redundant, dispatch=rule)
        found = gather(setting, given, heldout=heldout, quick=quick)
        page = placement_page(found, distinct([source], "traces")[0])
        temporary.write_text(page.html(), encoding="utf-8")
    means = {name: shown.means() for name, shown in found.placements.items()}
    if as_json:
        emit_json({
            "out": str(out), "bytes": out.stat().st_size, "placements": means, "spectra": found.spectra,
            "fit_tokens": found.parts.num_first, "heldout_tokens": found.parts.num_second,
            "redundant": redundant, "dispatch": rule, "topology": devices.to_json(), "seed": seed,
            "by_rule": {name: shown.by_rule for name, shown in found.placements.items() if shown.by_rule},
        })  # fmt: skip
        return
    table(["held out", *HEADERS], [[name, *(each[key] for key in COLUMNS)] for name, each in means.items()])
    say(LEGEND)
    if devices.speed_per_device:
        say(SPEEDS_LEGEND)
    if redundant:
        say(f"{COPIES_LEGEND}; here: {rule}")
    say(f"wrote {out} ({out.stat().st_size / 1e6:.1f} MB)")
