"""`coterie trace info`: what a trace holds and how uneven its routing is."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from coterie.cli.common import JsonOption, emit_json, note, progress, say, table


def trace_info(
    trace: Annotated[str, typer.Argument(metavar="T", help="A trace, anything importable, or a shipped trace's name.")],
    as_json: JsonOption = False,
) -> None:
    """Print a trace's shape and origin, and how uneven its loads and combinations are."""
    from coterie.profile.from_histogram import REBUILT, rebuilt_from_histogram
    from coterie.profile.summary import summarise
    from coterie.trace.open import open_trace

    with progress() as listener:
        opened = open_trace(trace, progress=listener)
        summary = summarise(opened, listener)
    summary["rebuilt_from_histogram"] = rebuilt_from_histogram(opened)
    if as_json:
        emit_json(summary)
        return
    for line in _head(trace, summary):
        say(line)
    if summary["rebuilt_from_histogram"]:
        note(f"warning: it may be rebuilt from load histograms: {summary['rebuilt_from_histogram']}; {REBUILT}")
    say()
    say("Per layer: max over mean expert load; experts never chosen; share of the uses that the top 25% of")
    say(f"{summary['pairs']} hold; shares of all pairs that hold 60% and 90% of the uses")
    columns = ("layer", "model layer", "imbalance", "unused", "skew", "60% of uses", "90% of uses")
    table(columns, [_row(layer) for layer in summary["per_layer"]])


def _head(name: str, summary: dict[str, Any]) -> list[str]:
    lines = [f"{name}: {'SYNTHETIC, ' if summary['synthetic'] else ''}{summary['model']}"]
    lines.append(f"  {summary['layers']} MoE layers, {summary['experts']} experts, top-{summary['top_k']}")
    sequences = f"{summary['sequences']:,} sequences" if summary["sequences"] else "no sequences recorded"
    phases = summary["phases"]
    phase = "no phases recorded" if phases is None else f"{phases['prefill']:,} prefill, {phases['decode']:,} decode"
    lines.append(f"  {summary['tokens']:,} tokens, {sequences}, {phase}")
    order = "by falling weight" if summary["weight_ordered"] else "in no order"
    lines.append(f"  weights {'recorded' if summary['weights'] else 'not recorded'}, a token's experts {order}")
    if summary["kept"] < 1:
        lines.append(f"  pruned: {summary['kept']:.1%} of the decisions are kept, and only they are counted")
    lines.append(f"  load imbalance {summary['load_imbalance']:.3f} (max over mean expert load, mean over layers)")
    lines.append(f"  skew {_skew(summary)}")
    lines.append(f"  dropped on import: {_dropped(summary['dropped'])}")
    lines += [f"  {key}: {value}" for key, value in _origin(summary["provenance"]).items()]
    return lines


def _skew(summary: dict[str, Any]) -> str:
    if summary["skew"] is None:
        return "none: one expert a token makes no combinations"
    why = "" if summary["pairs"] == "anchor pairs" else "; no weights, so the anchor is unknown"
    return f"{summary['skew']:.1%} of the uses are held by the top 25% of {summary['pairs']} (mean over layers{why})"


def _dropped(dropped: dict[str, Any]) -> str:
    rows = [f"{count:,} rows of {reason.replace('_', ' ')}" for reason, count in dropped.items() if count]
    return ", ".join(rows) or "nothing"


def _origin(provenance: dict[str, Any]) -> dict[str, Any]:
    """The provenance, less what the lines above have said already."""
    flat: dict[str, Any] = {}
    for key, value in provenance.items():
        if key not in ("synthetic", "dropped"):
            text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
            if text not in ("", None, []):
                flat[key] = text
    return flat


def _row(layer: dict[str, Any]) -> list[object]:
    values = (layer["model_layer"], layer["load_imbalance"], layer["unused_experts"], layer["skew"])
    shares = (layer["pairs_for_60"], layer["pairs_for_90"])
    return [layer["layer"], *("-" if value is None else value for value in (*values, *shares))]
