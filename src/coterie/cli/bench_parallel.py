"""`coterie bench parallel`: placements and pruning timed between real processes behind emulated links."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.cli.common import JsonOption, SeedOption, emit_json, note, progress, say, table, warnings_as_notes
from coterie.errors import ConfigError


def bench_parallel(
    replay: Annotated[
        str, typer.Option("--replay", metavar="TRACE", help="Routing with weights: a shipped trace or a file.")
    ] = "dsv2lite-law",
    classes: Annotated[
        str, typer.Option(help="Emulated machines, with commas: A, B, C, cluster A, cluster B.")
    ] = "A,B,C,cluster A,cluster B",
    spectrum: Annotated[int, typer.Option(min=1, help="Points of our spectrum.")] = 5,
    thresholds: Annotated[str, typer.Option(help="p of the pruning rules, with commas.")] = "0.1,0.2,0.3",
    batch: Annotated[int, typer.Option(min=1, help="Tokens of each of the 8 ranks in a step.")] = 64,
    layers: Annotated[int, typer.Option(min=1, help="MoE layers of a step, spaced over the model's.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which all lines take turns, a step each.")] = 3,
    redundant: Annotated[
        int, typer.Option("--redundant", min=0, help="Time EPLB's and our pick with so many copies a layer, too.")
    ] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Two machines, fewer lines and rounds.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the results there too, .json.")] = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Time placements and pruning rules on 8 ranks, each a process with its own link: CAP's Figs. 11, 12, 14, Table II.

    Every rank has a network namespace and a rate limit both ways; experts' time is modelled and slept through.
    Placements and rules are fitted, and the pick is tuned, on the earlier half of the trace; the later half is timed.
    Needs root.
    """
    from coterie.bench.parallel.network import unavailable
    from coterie.files import replacing
    from coterie.units import parse_fraction

    reason = unavailable()
    if reason is not None:
        if as_json:
            emit_json({"skipped": reason, "rows": []})
        else:
            say(f"skipped: {reason}")
        return
    from coterie.bench.parallel.run import Setting
    from coterie.bench.parallel.run import bench_parallel as run

    listed = tuple(parse_fraction(text) for text in thresholds.split(",") if text.strip())
    if any(p >= 1 for p in listed):
        raise ConfigError(f"--thresholds {thresholds}: p is the share of weight to drop, below 1")
    names = tuple(name.strip() for name in classes.split(",") if name.strip())
    setting = Setting(replay, names, spectrum, listed, batch, layers, rounds, seed=seed, redundant=redundant)
    setting = setting.quick() if quick else replace(setting)
    if out is not None:
        with replacing(out) as place:  # a place to write to, before the work
            place.write_text("{}", encoding="utf-8")
    with warnings_as_notes(), progress() as listen:
        result = run(setting, listen)
    if out is not None:
        import json

        with replacing(out) as place:
            place.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if as_json:
        emit_json(result)
    else:
        _show(result)


def _show(result: dict[str, Any]) -> None:
    note(result["about"])
    slow = {each["class"]: each for each in result["machines"]}
    for name in dict.fromkeys(row["class"] for row in result["rows"]):
        rows, about = [row for row in result["rows"] if row["class"] == name], slow[name]
        rates = about["rates"]
        links = f"links of {rates['device'] / 1e6:g} MB/s each way"
        if rates["uplink"]:
            links += f", {rates['uplink'] / 1e6:g} MB/s between nodes"
        slower = about["expert_slowdown"]
        say(f"{name}: {about['stands_for']}; {links}; experts {slower:.2f} times as slow as one core here")
        table(
            ["", "tokens/s", "model", "x linear", "model", "x eplb", "remote", "peak", "nodes", "weight", "MB",
             "headers"],
            [_line(row) for row in rows],
        )  # fmt: skip
    say(
        "x: speed over that placement, median over rounds; model: what the step-time model predicts\n"
        "remote: other devices a token visits; peak: share of the tokens that visit the busiest one; nodes: others a "
        "token visits\nweight: routing weight kept; MB: on all links in a step; headers: beyond what ranks sent"
    )
    for each in result["tuning"]:
        beaten = "" if each["beats_linear"] else "; nothing beats linear"
        say(f"{each['class']}: tuned on the earlier half, picks {each['pick']}{beaten}")
    say()
    lines = []
    for each in result["checks"]:
        shown = each["shown"] + ("" if each["met"] else ": not met")
        lines.append([each["class"], each["what"], f"{each['found']:.3f}", f"{each['asked']:g}", shown])
    table(["class", "what", "found", "asked", ""], lines)
    say(f"{result['seconds']['all']:.0f} s in all")


def _line(row: dict[str, Any]) -> list[object]:
    name = row["placement"] + (f" ({row['point']})" if "point" in row else "")
    name += "" if row["rule"] == "none" else f", {row['rule']} {row['p']:g}"
    return [
        name, f"{row['tokens_per_s']:.0f}", f"{row['predicted_tokens_per_s']:.0f}",
        f"{row['speedup_over_linear']:.2f}x", f"{row['predicted_speedup_over_linear']:.2f}x",
        f"{row['speedup_over_eplb']:.2f}x", row["remote_dpt"], row["peak_traffic"], row["remote_npt"],
        row["kept_weight"],
        f"{row['bytes_on_wire'] / 1e6:.1f}", f"{row['wire_overhead']:+.1%}",
    ]  # fmt: skip
