"""`coterie trace prune`: drop the destinations that are not worth their traffic."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli.common import JsonOption, emit_json, note, progress, say, table
from coterie.cli.pruning_options import AUTO, FLOOR_HELP, parse_floor, topology_of
from coterie.errors import ConfigError
from coterie.units import parse_fraction

if TYPE_CHECKING:
    from coterie.pruning.report import PruneReport
    from coterie.topology import Topology
    from coterie.trace.routing_trace import RoutingTrace

_COLUMNS = ("part", "tokens", "kept weight", "remote DPT", "before", "remote peak", "before")


def trace_prune(
    trace: Annotated[Path, typer.Argument(metavar="T", help="A routing trace, or any file that can be imported.")],
    out: Annotated[Path, typer.Option("--out", help="The pruned trace to write, .safetensors.")],
    topology: Annotated[str | None, typer.Option(help='Devices, like "8" or "2x8,inter=5".')] = None,
    placement: Annotated[Path | None, typer.Option(help="Where experts live; without it: in order.")] = None,
    rule: Annotated[str, typer.Option(help="cap, naive or priced.")] = "cap",
    p: Annotated[str | None, typer.Option("-p", help="Share of a token's routing weight that may be dropped.")] = None,
    peak: Annotated[str | None, typer.Option(help="Remote visits per token to the busiest device to reach.")] = None,
    heldout: Annotated[str, typer.Option(help="Share of the tokens that only measure.")] = "0.5",
    floor: Annotated[str, typer.Option(help=FLOOR_HELP)] = AUTO,
    as_json: JsonOption = False,
) -> None:
    """Drop, token by token, the devices that hold too little routing weight to be worth a visit.

    With --rule priced, -p means: down to the peak traffic that CAP's rule would reach with that p. Everything that is
    fitted is fitted on the earlier sequences and reported on the others too.
    """
    from coterie.pruning.fitting import RuleChoice
    from coterie.pruning.prune import prune_trace_to
    from coterie.trace.open import open_trace

    choice = RuleChoice(rule, _fraction(p), _fraction(peak), parse_floor(floor))
    share = parse_fraction(heldout)
    with progress() as listen:
        routing = open_trace(trace, progress=listen)
        routing.require_weights("pruning")
        device_LE, devices, name = _devices(routing, topology, placement)
        report = prune_trace_to(out, routing, device_LE, devices, choice, share, name, listen)
    if as_json:
        emit_json({**report.to_json(), "topology": devices.to_json(), "placement": name, "out": str(out)})
    else:
        _show(report, devices, name, out)


def _fraction(text: str | None) -> float | None:
    return None if text is None else parse_fraction(text)


def _devices(routing: RoutingTrace, topology: str | None, placement: Path | None) -> tuple[Any, Topology, str]:
    """The device of every expert [L, E], the topology, and a name for where they come from."""
    from coterie.pruning.routed import linear_devices
    from coterie.topology import Topology

    if placement is None:
        if topology is None:
            raise ConfigError("pruning needs devices; give --topology, e.g. --topology 8, or --placement")
        devices = Topology.parse(topology)
        return linear_devices(routing.spec, devices), devices, "linear"
    from coterie.placement.numbering import EXPERT_ORDER_KEY, expert_order_of_placement, require_same_numbering
    from coterie.placement.placement import Placement

    placed = Placement.load(placement)
    placed.require_model(routing.spec, "the trace")
    held = routing.provenance.get(EXPERT_ORDER_KEY)
    require_same_numbering(expert_order_of_placement(placed.method), "the placement", held, "the trace")
    devices = topology_of(placed, topology, placement)
    return placed.device_of_expert(), devices, placement.name


def _show(report: PruneReport, topology: Topology, placement: str, out: Path) -> None:
    strength = {name: value for name, value in report.rule.items() if name not in ("rule", "theta")}
    words = ", ".join(f"{name} = {value:g}" for name, value in strength.items())
    title = f"rule {report.rule['rule']} ({words}), topology {topology}, placement {placement}; means over layers"
    rows = [
        (
            label, part.num_tokens, part.mean("kept_weight"),
            part.mean("remote_dpt"), part.mean("unpruned_remote_dpt"),
            part.mean("remote_peak_traffic"), part.mean("unpruned_remote_peak_traffic"),
        )
        for label, part in (("fit", report.fit), ("held out", report.heldout))
    ]  # fmt: skip
    table(_COLUMNS, rows, title)
    if report.heldout.mean("emptied") > 0:
        share = report.heldout.mean("emptied")
        note(f"{share:.2%} of the held-out tokens keep no expert in a layer, on average; --floor prevents it (priced)")
    say(f"wrote {out}")
