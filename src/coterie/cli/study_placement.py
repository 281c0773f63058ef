"""`coterie study stability`, `transfer`, `pruning` and `tokens`: CAP's figures on recorded routing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli.common import JsonOption, SeedOption, emit_json, progress, say, table, warnings_as_notes
from coterie.cli.place import FormatOption, TraceArgument

if TYPE_CHECKING:
    from coterie.placement.candidates import Setting
    from coterie.progress import Progress
    from coterie.report.page import Page

TopologyOption = Annotated[str, typer.Option("--topology", help='"8", "2x4,inter=5" or a YAML file.')]
OutOption = Annotated[Path | None, typer.Option("--out", help="Folder for index.html and study.json; none without it.")]
MethodsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        help="linear, eplb, cap, cap-spectrum or coterie; may be repeated. Without it: cap and coterie, in transfer "
        "eplb too.",
    ),
]
HeldoutOption = Annotated[float, typer.Option(help="Share of the tokens, the latest sequences, that only measure.")]


def study_stability(
    source: TraceArgument,
    window: Annotated[int, typer.Option("--window", min=1, help="Tokens of a window.")] = 500,
    requests: Annotated[bool, typer.Option("--requests", help="Windows count sequences instead of tokens.")] = False,
    topology: TopologyOption = "8",
    method: MethodsOption = None,
    out: OutOption = None,
    format_name: FormatOption = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """How long a placement holds: fitted on three windows of a trace, measured on every window (CAP Fig. 15)."""
    from coterie.files import distinct
    from coterie.study.placement import stability

    with _prepared(out), warnings_as_notes(), progress() as listen:
        setting = _setting(source, topology, format_name, seed, listen)
        name = distinct([source], "traces")[0]
        methods = method or stability.METHODS
        result = stability.run(setting, name, window, requests=requests, methods=methods)
        _leave(result, out, f"Stability of placements, {name}", stability.remarks, stability.show)
    if as_json:
        emit_json(result)
        return
    windows, unit = len(result["windows"]), result["configuration"]["unit"]
    say(f"{name}: {windows} windows of {window} {unit}; each grouping on the windows it was not fitted on")
    headers = ["grouping", "devices", "varies", "below linear", "B", "varies", "peak", "varies", "below linear"]
    table(headers, [stability.table_row(name, each) for name, each in result["groupings"].items()])
    _said(out)


def study_transfer(
    sources: Annotated[list[str], typer.Argument(metavar="T1 T2 ...", help="Traces of one model, at least two.")],
    heldout: HeldoutOption = 0.5,
    topology: TopologyOption = "8",
    method: MethodsOption = None,
    out: OutOption = None,
    format_name: FormatOption = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Whether a placement for one workload serves another: fitted on the column, measured on the row.

    Source: CAP, Tables III and IV.
    """
    from coterie.files import distinct
    from coterie.study.placement import transfer
    from coterie.study.placement.common import MEASURES
    from coterie.trace.open import open_trace

    with _prepared(out), warnings_as_notes(), progress() as listen:
        setting = _setting(sources[0], topology, format_name, seed, listen)
        others = [open_trace(source, format=format_name, progress=listen) for source in sources[1:]]
        traces = dict(zip(distinct(sources, "traces"), [setting.trace, *others], strict=True))
        result = transfer.run(setting, traces, heldout=heldout, methods=method or transfer.METHODS)
        _leave(result, out, "Transfer of placements", transfer.remarks, transfer.show)
    if as_json:
        emit_json(result)
        return
    for name in result["methods"]:
        for measure in ("dpt", "balance", "peak_traffic"):
            title = f"{name}, {MEASURES[measure]}; fitted on the column"
            table(transfer.columns(result), transfer.rows(result, name, measure), title)
    for name, found in result["claims"].items():
        say(f"{name}: {transfer.verdict(found)}")
    _said(out)


def study_pruning(
    source: TraceArgument,
    heldout: HeldoutOption = 0.5,
    topology: TopologyOption = "8",
    method: Annotated[str, typer.Option("--method", help="Whose placements: linear, eplb, cap, coterie.")] = "coterie",
    out: OutOption = None,
    format_name: FormatOption = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """What pruning does to loads, whom it spares, and whether to place before or after it (CAP Figs. 9, 10)."""
    from coterie.files import distinct
    from coterie.study.placement import pruning

    with _prepared(out), warnings_as_notes(), progress() as listen:
        setting = _setting(source, topology, format_name, seed, listen)
        name = distinct([source], "traces")[0]
        result = pruning.run(setting, name, method=method, heldout=heldout)
        _leave(result, out, f"Pruning of {name}", pruning.remarks, pruning.show)
    if as_json:
        emit_json(result)
        return
    columns = ("p", "experts", "devices_linear", "devices_placed")
    rows = [[each[key] for key in columns] for each in result["imbalance"]]
    table(["p", "experts", "devices, linear", "devices, placed"], rows, "largest load over mean after CAP's rule")
    rows = [[each["decile"], f"{each['uses']:.1%}", each["weight"]] for each in result["popularity"]]
    table(["popularity decile", "uses", "weight when chosen"], rows)
    table(pruning.columns(), pruning.rows(result), "placed before or after pruning; held out")
    _said(out)


def study_tokens(
    source: TraceArgument,
    heldout: HeldoutOption = 0.5,
    topology: TopologyOption = "8",
    method: MethodsOption = None,
    out: OutOption = None,
    format_name: FormatOption = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """How many tokens a placement takes until more of them change little (CAP: about 8,000).

    Fitted on the first 250, 500, 1,000, ... of the earlier tokens, measured on the later ones.
    """
    from coterie.files import distinct
    from coterie.study.placement import tokens

    with _prepared(out), warnings_as_notes(), progress() as listen:
        setting = _setting(source, topology, format_name, seed, listen)
        name = distinct([source], "traces")[0]
        result = tokens.run(setting, name, heldout=heldout, methods=method or tokens.METHODS)
        _leave(result, out, f"Tokens that placing takes, {name}", tokens.remarks, tokens.show)
    if as_json:
        emit_json(result)
        return
    table(["fitted on", "devices", "nodes", "B", "peak"], tokens.rows(result))
    for name, each in result["methods"].items():
        say(tokens.settled(name, each))
    _said(out)


def _setting(source: str, topology: str, format_name: str | None, seed: int, listen: Progress) -> Setting:
    from coterie.placement.driver import prepare
    from coterie.topology import Topology
    from coterie.trace.open import open_trace

    parsed = Topology.parse(topology)
    return prepare(open_trace(source, format=format_name, progress=listen), parsed, seed=seed, progress=listen)


@contextmanager
def _prepared(out: Path | None) -> Iterator[None]:
    """A place to write to and a library to draw with, before the long work; nothing stays if that fails."""
    from coterie.study.output import prepared_folder

    if out is not None:
        from coterie.report.page import graph_objects

        graph_objects()
    with prepared_folder(out):
        yield


def _leave(result: dict[str, Any], out: Path | None, title: str, remarks: Any, show: Any) -> None:
    if out is not None:
        from coterie.report.page import Page
        from coterie.study.output import write_study

        page: Page = Page(title, remarks(result))
        show(page, result)
        write_study(page, result, out)


def _said(out: Path | None) -> None:
    if out is not None:
        say(f"{out / 'index.html'}: all of it; {out / 'study.json'}: the figures")
