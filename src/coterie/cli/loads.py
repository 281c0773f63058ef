"""`coterie loads`: what tables of loads can say, and what they cannot."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli.common import JsonOption, emit_json, note, say, table

if TYPE_CHECKING:
    from coterie.spec import MoESpec
    from coterie.trace.load_table import LoadTable


def loads(
    source: Annotated[str, typer.Argument(metavar="LOADS", help="A table of loads, or TensorRT-LLM's folder.")],
    topology: Annotated[str, typer.Option("--topology", help='"8", "2x4,inter=5" or a YAML file.')] = "8",
    out: Annotated[Path | None, typer.Option("--out", help="Write EPLB's placement there, .json.")] = None,
    format_name: Annotated[
        str | None, typer.Option("--format", help="sglang-stat, tensorrt-llm, vllm-ascend or eplb; told if absent.")
    ] = None,
    expert_map: Annotated[
        Path | None, typer.Option("--expert-map", help="vllm-ascend's or TensorRT-LLM's map of its slots.")
    ] = None,
    model: Annotated[Path | None, typer.Option("--model", help="The model's config.json; --out needs it.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show how even loads are on devices, under linear and EPLB, and place by load alone.

    Loads without tokens say nothing of traffic; the command says so each time.
    """
    from coterie.errors import ConfigError
    from coterie.families import load_spec
    from coterie.placement.by_load import place_by_load
    from coterie.profile.load import imbalance
    from coterie.topology import Topology
    from coterie.trace.load_table import NOT_ENOUGH, open_loads

    if out is not None and model is None:
        raise ConfigError("a placement says which model it is for; give its config.json as --model")
    devices = Topology.parse(topology)
    held = open_loads(source, format_name, expert_map)
    spec = _spec(held, None if model is None else load_spec(model))
    placement, figures = place_by_load(held, devices, spec)
    if out is not None:
        placement.save(out)
    uneven = [imbalance(load_E) for load_E in held.load_LE]
    if as_json:
        emit_json({
            "format": held.format, "layers": spec.num_layers, "experts": spec.num_experts,
            "steps": len(held.load_SLE), "layer_ids": list(held.layer_ids), "total": float(held.load_LE.sum()),
            "expert_imbalance": sum(uneven) / len(uneven), "balance": figures, "topology": devices.to_json(),
            "co_activation": False, "out": None if out is None else str(out), "provenance": dict(held.provenance),
        })  # fmt: skip
        return
    say(
        f"{source}: {held.format}, {spec.num_layers} layers of {spec.num_experts} experts, {len(held.load_SLE):,} "
        f"steps; busiest expert {sum(uneven) / len(uneven):.2f} times the mean"
    )
    parts = list(figures["linear"])
    table(["B", *("later half" if part == "heldout" else "fitted" for part in parts)],
          [[name, *(each[part] for part in parts)] for name, each in figures.items()])  # fmt: skip
    note(NOT_ENOUGH)
    if held.format == "tensorrt-llm" and expert_map is None:
        note("TensorRT-LLM counts slots where a load balancer runs: of such counts give its file as --expert-map")
    if out is not None:
        say(f"wrote {out}")


def _spec(held: LoadTable, spec: MoESpec | None) -> MoESpec:
    """The model of a table; without a config only its shape is known."""
    from coterie.errors import TraceError
    from coterie.spec import MoESpec

    _, layers, experts = held.load_SLE.shape
    if spec is None:
        shape: Any = {"num_layers": layers, "num_experts": experts, "top_k": max(held.top_k, 1)}
        return MoESpec("unknown", **shape)
    if (spec.num_layers, spec.num_experts) != (layers, experts):
        raise TraceError(
            f"the loads are of {layers} layers of {experts} experts, --model has {spec.num_layers} of "
            f"{spec.num_experts}; give the config.json of the model that was recorded"
        )
    return spec
