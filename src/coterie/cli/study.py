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
    if "at_crisp_loss" in result:
        _show_curves(result)
    if "iso_memory" in result:
        _show_memory(result["iso_memory"])
    say(f"{out / 'index.html'}: all of it; {out / 'study.json'}: the figures")


def _show_ordering(found: dict[str, Any]) -> None:
    rows = [[name, _interval(each)] for name, each in found["importance"].items()]
    rows += [["original order", _interval(found["original"])], ["random order", f"{found['random']['mean']:+.2%}"]]
    table(["half width, neurons in order of", "perplexity (95%)"], rows)


def _show_curves(result: dict[str, Any]) -> None:
    rows = [
        [policy, each["settings"], f"{each['bytes']:.1%}", _interval(_increase(each)), f"{each['kl']:.4f}"]
        for policy, points in result["curves"].items()
        for each in points
    ]
    table(["policy", "setting, or bytes asked for", "bytes", "perplexity (95%)", "KL"], rows)
    at, fair = result["at_crisp_loss"], result["policies"]["crisp_against_uniform"]
    say(f"at the paper's policy's loss ({at['perplexity_increase']:+.2%} with {at['crisp_bytes']:.1%} of the bytes)")
    for name, each in ((at["value_policy"], at), ("value, by importance alone", at["value_by_importance"])):
        low, high = each["ratio"]["interval_95"]
        say(
            f"  {name} needs {each['value_bytes']:.1%}: {each['ratio']['value']:.2f} ({low:.2f} to {high:.2f}) times "
            "the bytes"
        )
    equal = fair["uniform_at_equal_bytes"]
    say(f"uniform width with as many bytes, {equal['bytes']:.1%}: {_interval(_increase(equal))}")
    for name, key in (("value", "against_value"), (at["value_policy"], "against_learnt")):
        others = result["policies"][key]
        say(
            f"of {len(others['points'])} points of other policies, at equal bytes {others['value_below']} lose more "
            f"than {name}, {others['within_noise']} as much within noise, {others['value_above']} less"
        )


def _show_memory(found: dict[str, Any]) -> None:
    names = list(found["budgets"][0]["policies"])
    rows = [
        [f"{row['budget']:.0%}", *(_interval(_increase(row["policies"][name])) for name in names)]
        for row in found["budgets"]
    ]
    table(["share of all experts' bytes", *names], rows)


def _increase(each: dict[str, Any]) -> dict[str, Any]:
    return {"value": each["perplexity_increase"], "interval_95": each["interval_95"]}


def _interval(each: dict[str, Any]) -> str:
    low, high = each["interval_95"]
    return f"{each['value']:+.2%} ({low:+.2%} to {high:+.2%})"
