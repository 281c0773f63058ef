"""`coterie report`: a trace and its placements on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.common import JsonOption, SeedOption, emit_json, progress, say, table, warnings_as_notes
from coterie.cli.place import COLUMNS, HEADERS, LEGEND, FormatOption, TraceArgument


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
    quick: Annotated[bool, typer.Option("--quick", help="Without Coterie's own search.")] = False,
    format_name: FormatOption = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Write one page: company, loads, the spectrum, traffic, stability and skew of a trace and its placements."""
    from coterie.files import distinct, replacing
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
    devices = next((one.topology for one in given.values()), Topology.parse("8"))
    devices = devices if topology is None else Topology.parse(topology)
    with replacing(out) as temporary, warnings_as_notes(), progress() as listen:
        routing = open_trace(source, format=format_name, progress=listen)
        setting = prepare(routing, devices, seed=seed, progress=listen)
        found = gather(setting, given, heldout=heldout, quick=quick)
        page = placement_page(found, distinct([source], "traces")[0])
        temporary.write_text(page.html(), encoding="utf-8")
    means = {name: shown.means() for name, shown in found.placements.items()}
    if as_json:
        emit_json({
            "out": str(out), "bytes": out.stat().st_size, "placements": means, "spectra": found.spectra,
            "fit_tokens": found.parts.num_first, "heldout_tokens": found.parts.num_second,
            "topology": devices.to_json(), "seed": seed,
        })  # fmt: skip
        return
    table(["held out", *HEADERS], [[name, *(each[key] for key in COLUMNS)] for name, each in means.items()])
    say(LEGEND)
    say(f"wrote {out} ({out.stat().st_size / 1e6:.1f} MB)")
