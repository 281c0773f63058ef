"""`coterie study`: what papers' tables and figures show, measured on a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.cli.common import JsonOption, SeedOption, emit_json, progress, say, table, warnings_as_notes


def study_widths(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, a shipped model or a hub id.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for index.html and study.json.")],
    quick: Annotated[bool, typer.Option("--quick", help="About a minute: less text, one seed.")] = False,
    only: Annotated[list[str] | None, typer.Option("--only", help="Only this study; may be repeated.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16 to hold the model in.")] = "float32",
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """What narrower experts cost, by every policy: CRISP's tables and figures on this model, on one page.

    Profiles and chooses on the first half of every shipped text, and measures on the second.
    """
    from coterie import data
    from coterie.study.widths.run import study_widths as run

    texts = {name: data.text(name) for name in data.text_names()}
    with warnings_as_notes(), progress() as listen:
        result = run(
            model, texts, out, quick=quick, seed=seed, dtype=dtype, names=only or [], progress=listen
        )  # fmt: skip
    if as_json:
        emit_json(result)
    else:
        _show(result, out)


def _show(result: dict[str, Any], out: Path) -> None:
    model = result["model"]
    trained = model["tokens_trained"]
    say(
        f"{model['model']}: {model['parameters'] / 1e6:.1f} million parameters"
        + (f", trained on {trained / 1e6:.1f} million tokens" if trained else "")
        + f"; perplexity {result['full_perplexity']:.3f} at full width"
    )
    if "ordering" in result:
        _show_ordering(result["ordering"])
    say(f"{out / 'index.html'}: all of it; {out / 'study.json'}: the figures")


def _show_ordering(found: dict[str, Any]) -> None:
    rows = [[name, _interval(each)] for name, each in found["importance"].items()]
    rows += [["original order", _interval(found["original"])], ["random order", f"{found['random']['mean']:+.2%}"]]
    table(["half width, neurons in order of", "perplexity (95%)"], rows)


def _interval(each: dict[str, Any]) -> str:
    low, high = each["interval_95"]
    return f"{each['value']:+.2%} ({low:+.2%} to {high:+.2%})"
