"""`coterie drift`: whether a placement still fits the traffic."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.cli.common import JsonOption, SeedOption, emit_json, progress, say, table, warnings_as_notes
from coterie.cli.place import COLUMNS, HEADERS, LEGEND, SPEEDS_LEGEND, FormatOption

_WORDS = {
    "then": "then (held out, as its file says)",
    "now": "this placement, now",
    "fresh": "a fresh one",
    "linear": "linear",
}


def drift(
    placement: Annotated[Path, typer.Argument(metavar="PLACEMENT", help="A placement made by coterie place.")],
    trace: Annotated[str, typer.Argument(metavar="NEW_TRACE", help="Routing recorded since, importable or shipped.")],
    heldout: Annotated[float, typer.Option(help="Share of the tokens, the latest sequences, that only measure.")] = 0.5,
    worth: Annotated[str, typer.Option(help="The least gain worth redoing it for, a share of the score.")] = "2%",
    method: Annotated[str | None, typer.Option("--method", help="Of the fresh placement; else the old one's.")] = None,
    format_name: FormatOption = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """What a placement costs on new routing, beside a fresh one made from its earlier part, and whether to redo it."""
    from coterie.placement.drift import drift as run
    from coterie.placement.placement import Placement
    from coterie.trace.open import open_trace
    from coterie.units import parse_fraction

    placed, least = Placement.load(placement), parse_fraction(worth)
    with warnings_as_notes(), progress() as listen:
        routing = open_trace(trace, format=format_name, progress=listen)
        result = run(placed, routing, heldout=heldout, worth=least, method=method, seed=seed, progress=listen)
    if as_json:
        emit_json({"placement": str(placement), **result})
    else:
        _show(placement, result)


def _show(file: Path, result: dict[str, Any]) -> None:
    about, made_from = result["trace"], result["made_from"] or {}
    say(f"{file}: measured on {about['heldout_tokens']:,} tokens; fresh: {result['method']} on {about['fit_tokens']:,}")
    if made_from.get("fingerprint") == about["fingerprint"]:
        say("it was made from this very trace, so that nothing here is new to it")
    rows = [
        [_WORDS[name], *(each[key] for key in COLUMNS), each.get("score", "-")]
        for name, each in result["placements"].items()
    ]
    table(["", *HEADERS, "score"], rows)
    say(LEGEND + "; score: what placing minimises, and B at its price")
    if result["topology"].get("speed_per_device"):
        say(SPEEDS_LEGEND)
    say(f"{'redo it' if result['redo'] else 'keep it'}: {result['reason']}")
