"""`coterie compare` and `coterie place`: placements from a trace, and what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli.common import JsonOption, SeedOption, emit_json, progress, say, table, warnings_as_notes

if TYPE_CHECKING:
    from coterie.placement.candidates import Setting
    from coterie.placement.placement import Placement
    from coterie.progress import Progress

TraceArgument = Annotated[str, typer.Argument(metavar="TRACE", help="A trace, an importable file or a shipped name.")]
TopologyOption = Annotated[str, typer.Option("--topology", help='"8", "2x4,inter=5" or a YAML file.')]
FormatOption = Annotated[str | None, typer.Option("--format", help="Format of an imported trace; detected otherwise.")]
GroupsOption = Annotated[
    bool | None,
    typer.Option("--keep-groups/--no-keep-groups", help="Keep router groups whole; on by itself for n_group > 1."),
]
RedundantOption = Annotated[
    int, typer.Option("--redundant", min=0, help="Slots of a layer for copies of experts, on all devices together.")
]
DispatchOption = Annotated[
    str,
    typer.Option("--dispatch", help="How tokens choose copies: fewest-devices, or as engines do: nearest, random."),
]
COLUMNS = ("dpt", "npt", "balance", "peak_traffic", "remote_peak_traffic")
LEGEND = (
    "devices, nodes: distinct ones a token visits; B: largest device load / mean; peak: share of the tokens that visit "
    "the busiest device (remote: from other devices); means over layers"
)
SPEEDS_LEGEND = "devices differ in speed: B is the longest time that one computes over the time in perfect balance"
COPIES_LEGEND = (
    "copies: a token takes the one that adds no device, else the one whose device has the least to do so far "
    "(fewest-devices); engines: nearest (SGLang's static), random (its dynamic)"
)
HEADERS = ("devices", "nodes", "B", "peak", "remote peak")


def compare(
    source: TraceArgument,
    topology: TopologyOption,
    heldout: Annotated[float, typer.Option(help="Share of the tokens, the latest sequences, that only measure.")] = 0.5,
    format_name: FormatOption = None,
    keep_groups: GroupsOption = None,
    redundant: RedundantOption = 0,
    dispatch: DispatchOption = "fewest-devices",
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Compare linear, EPLB, CAP and Coterie on the fitting part and on held-out sequences."""
    from coterie.placement.driver import compare as run

    with warnings_as_notes(), progress() as listen:
        setting = _setting(source, topology, format_name, keep_groups, seed, listen, redundant, dispatch)
        result = run(setting, heldout)
    if as_json:
        emit_json(result)
    else:
        show_comparison(result)


def show_comparison(result: dict[str, Any]) -> None:
    """Print a comparison: held-out figures, the same as a share of linear's, and what they were fitted on."""
    rows, about = result["methods"], result["trace"]
    base = rows["linear"]["heldout"]
    lines = []
    for name, row in rows.items():
        held = row["heldout"]
        shares = [f"{held[key] / base[key]:.2f}x" if base[key] else "-" for key in ("dpt", "peak_traffic")]
        lines.append([name, *(held[key] for key in COLUMNS), *shares, f"{row['seconds']:.2f} s"])
    say(
        f"{about['model']} on {result['topology']['num_nodes']} x {result['topology']['devices_per_node']} devices: "
        f"fitted on {about['fit_tokens']:,} tokens, measured on {about['heldout_tokens']:,} later ones"
    )
    table(["held out", *HEADERS, "devices vs linear", "peak vs linear", "time"], lines)
    say(LEGEND)
    if result.get("redundant"):
        say(COPIES_LEGEND)
    if result["topology"].get("speed_per_device"):
        say(SPEEDS_LEGEND)
    if "link_cost" in base:
        costs = ", ".join(f"{name} {row['heldout']['link_cost']:.3f}" for name, row in rows.items())
        say(f"cost of links, of a token and layer: {costs}")


def place(
    source: TraceArgument,
    topology: TopologyOption,
    out: Annotated[Path, typer.Option(help="The placement's JSON file; with --spectrum a folder.")],
    method: Annotated[str, typer.Option(help="linear, eplb, cap, cap-spectrum or coterie.")] = "coterie",
    balance: Annotated[float | None, typer.Option(help="Largest B (device load over the mean) wanted.")] = None,
    spectrum: Annotated[
        int | None, typer.Option(help="Write so many placements, least traffic to best balance.")
    ] = None,
    heldout: Annotated[float, typer.Option(help="Share of the tokens that only measure; 0: fit on all.")] = 0.2,
    also: Annotated[
        list[str] | None,
        typer.Option("--also", help="A further workload's trace, to serve all of them; may be repeated."),
    ] = None,
    format_name: FormatOption = None,
    keep_groups: GroupsOption = None,
    redundant: RedundantOption = 0,
    dispatch: DispatchOption = "fewest-devices",
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Decide where experts live, and write it down."""
    from coterie.errors import ConfigError
    from coterie.files import replacing, replacing_folder
    from coterie.placement import driver
    from coterie.placement.spectrum_files import INDEX, index_entry, write_spectrum

    if spectrum is not None and balance is not None:
        raise ConfigError("--spectrum and --balance exclude each other: a spectrum holds every balance; give one")
    target = replacing(out) if spectrum is None else replacing_folder(out, INDEX)
    with target as temporary, warnings_as_notes(), progress() as listen:  # a place to write to, before the work
        setting = _setting(
            source, topology, format_name, keep_groups, seed, listen, redundant, dispatch, also or ()
        )  # fmt: skip
        if spectrum is None:
            placements = [driver.place(setting, method, balance, heldout)]
            placements[0].save(temporary)
            summary: dict[str, Any] = index_entry(placements[0])
        else:
            placements = driver.spectrum(setting, spectrum, method, heldout)
            summary = write_spectrum(placements, temporary)
    summary = {"out": str(out), **summary}
    if as_json:
        emit_json(summary)
    else:
        show_placements(placements)
        say(f"wrote {out}")


def show_placements(placements: list[Placement]) -> None:
    """Print the metrics of placements, held-out ones where there are any."""
    lines = []
    for number, placement in enumerate(placements):
        for part, metrics in placement.metrics.items():
            lines.append([f"{number} {placement.method['name']} ({part})", *(metrics[key] for key in COLUMNS)])
            for rule, values in metrics.get("by_rule", {}).items():
                lines.append([f"  dispatched by {rule}", *(values[key] for key in COLUMNS)])
    table(["placement", *HEADERS], lines)
    say(LEGEND)
    if any(placement.num_copies for placement in placements):
        say(COPIES_LEGEND)
    if any(placement.topology.speed_per_device for placement in placements):
        say(SPEEDS_LEGEND)
    for number, placement in enumerate(placements):
        costs = [f"{each['link_cost']:.3f} ({part})" for part, each in placement.metrics.items() if "link_cost" in each]
        if costs:
            say(f"cost of links, of a token and layer: {number} {placement.method['name']} {', '.join(costs)}")


def _setting(
    source: str,
    topology: str,
    format_name: str | None,
    keep_groups: bool | None,
    seed: int,
    listen: Progress,
    redundant: int,
    dispatch: str,
    also: Sequence[str] = (),
) -> Setting:
    from coterie.placement.driver import prepare
    from coterie.topology import Topology
    from coterie.trace.open import open_trace

    parsed = Topology.parse(topology)
    traces = [open_trace(each, format=format_name, progress=listen) for each in (source, *also)]
    options: dict[str, Any] = {
        "seed": seed, "keep_groups": keep_groups, "progress": listen, "redundant": redundant, "dispatch": dispatch,
    }  # fmt: skip
    if len(traces) == 1:
        return prepare(traces[0], parsed, **options)
    from coterie.placement.mixture import prepare_mixture

    return prepare_mixture(traces, parsed, **options)
