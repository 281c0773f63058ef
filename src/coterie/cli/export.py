"""`coterie export` and `coterie validate`: placements into engines' files, and whether such files are sound."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.cli.common import JsonOption, emit_json, say
from coterie.errors import ConfigError, InfeasiblePlacement

if TYPE_CHECKING:
    from coterie.engines.validate import Report

ModelOption = Annotated[
    Path | None, typer.Option("--model", help="The model's config.json, or the folder that holds it.")
]


def export(
    placement_file: Annotated[Path, typer.Argument(metavar="PLACEMENT", help="A placement made by coterie place.")],
    to: Annotated[str, typer.Option("--to", help="sglang, vllm-ascend, tensorrt-llm or json.")],
    out: Annotated[Path, typer.Option("--out", help="The file to write.")],
    model: ModelOption = None,
    json_output: JsonOption = False,
) -> None:
    """Write a placement as the file a serving engine reads, and say how to start the engine with it."""
    from coterie.engines.base import export_file
    from coterie.engines.registry import get_exporter
    from coterie.families import load_spec
    from coterie.models.baked import expert_order_of
    from coterie.placement.numbering import expert_order_of_placement, require_same_numbering
    from coterie.placement.placement import Placement

    exporter = get_exporter(to)
    placement = Placement.load(placement_file)
    spec = load_spec(model) if model else None
    if model is not None:
        held = expert_order_of(model)
        require_same_numbering(expert_order_of_placement(placement.method), "the placement", held, str(model))
    if out.exists() and any(source is not None and out.samefile(source) for source in (placement_file, model)):
        raise ConfigError(f"--out {out} would overwrite an input; choose another name")
    exported = export_file(exporter, placement, out, spec)
    used = spec or placement.spec
    if json_output:
        emit_json(
            {
                "engine": exporter.name,
                "file": str(exported.path),
                "flags": list(exported.flags),
                "notes": list(exported.notes),
                "model": used.to_json(),
                "devices": placement.topology.num_devices,
            }
        )
        return
    say(
        f"wrote {out} for {exporter.name}: {used.num_layers} MoE layers, {used.num_experts} experts, "
        f"{placement.topology.num_devices} devices"
    )
    if exported.flags:
        say(f"start with: {shlex.join(exported.flags)}")
    for line in exported.notes:
        say(f"note: {line}")


def validate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A placement, or a file made for an engine.")],
    model: ModelOption = None,
    topology: Annotated[
        str | None, typer.Option("--topology", help="The devices it should fit, like 8 or 2x8.")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Check a placement or an engine's file: shape, ids, every expert present, even ranks, the model's layers."""
    from coterie.engines.validate import validate as check
    from coterie.families import load_spec
    from coterie.topology import Topology

    report = check(file, load_spec(model) if model else None, Topology.parse(topology) if topology else None)
    if json_output:
        _emit(report)
    if not report.valid:
        more = len(report.problems) - 1
        rest = f" (and {more} more; --json lists them)" if more and not json_output else ""
        raise InfeasiblePlacement(f"{file}: {report.problems[0]}{rest}")
    if not json_output:
        devices = f", {report.num_devices} devices" if report.num_devices else ""
        say(
            f"{file} is a sound {report.format} file: {report.num_layers} layers of {report.num_slots} slots, "
            f"{report.num_experts} experts{devices}"
        )
        for line in report.notes:
            say(f"note: {line}")


def _emit(report: Report) -> None:
    emit_json(
        {
            "file": report.path,
            "format": report.format,
            "valid": report.valid,
            "layers": report.num_layers,
            "slots": report.num_slots,
            "experts": report.num_experts,
            "devices": report.num_devices,
            "problems": list(report.problems),
            "notes": list(report.notes),
        }
    )
