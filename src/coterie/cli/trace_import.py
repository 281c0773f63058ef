"""`coterie trace import`: any known recording into one native trace file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli.common import JsonOption, emit_json, note, progress, say

if TYPE_CHECKING:
    from coterie.trace.routing_trace import RoutingTrace

_WORDS = {"warm_up": "warm-up", "repeated_by_rank": "ranks that repeat another"}


def trace_import(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A file or folder, or the name of a shipped trace.")],
    out: Annotated[Path, typer.Option("--out", help="The trace file to write, .safetensors.")],
    format: Annotated[
        str | None,
        typer.Option("--format", help="npz, jsonl, sglang, vllm or coterie; told from the content if absent."),
    ] = None,
    experts: Annotated[
        int | None, typer.Option("--experts", min=1, help="Experts in a layer; the largest id + 1 if nothing says it.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option("--model", help="The model's config.json: its layers, experts, top-k and groups.")
    ] = None,
    unbake: Annotated[
        Path | None,
        typer.Option("--unbake", help="The baked checkpoint that was recorded: write the published experts' ids."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Import a recording of routing; warm-up and padding rows are dropped and counted."""
    from coterie.families import load_spec
    from coterie.profile.from_histogram import REBUILT, rebuilt_from_histogram
    from coterie.trace.open import import_trace

    spec = None if model is None else load_spec(model)
    change = _numbering(model, unbake)
    with progress() as listener:
        trace = import_trace(source, out, format, spec, listener, num_experts=experts, change=change)
    suspicion = rebuilt_from_histogram(trace)
    if suspicion:
        note(f"warning: this may be rebuilt from load histograms: {suspicion}; {REBUILT}")
    dropped, inferred = trace.provenance.get("dropped", {}), trace.provenance.get("inferred", {})
    if as_json:
        emit_json(
            {
                "out": str(out), "format": trace.provenance.get("format"), "model": trace.spec.model,
                "layers": trace.num_layers, "tokens": trace.num_tokens, "experts": trace.spec.num_experts,
                "top_k": trace.spec.top_k, "sequences": trace.num_sequences, "weights": trace.weights is not None,
                "dropped": dropped, "inferred": inferred, "rebuilt_from_histogram": suspicion,
            }
        )  # fmt: skip
        return
    sequences = f" in {trace.num_sequences:,} sequences" if trace.num_sequences else ""
    weights = "with routing weights" if trace.weights is not None else "without routing weights"
    shape = f"{trace.num_layers} MoE layers, {trace.spec.num_experts} experts, top-{trace.spec.top_k}"
    say(f"{out}: {trace.spec.model}, {trace.num_tokens:,} tokens{sequences}, {shape}, {weights}")
    if dropped:
        say("dropped: " + ", ".join(f"{count:,} rows of {_WORDS.get(what, what)}" for what, count in dropped.items()))
    for what, why in inferred.items():
        note(f"inferred {what.replace('_', ' ')}: {why}")


def _numbering(model: Path | None, unbake: Path | None) -> Callable[[RoutingTrace], RoutingTrace] | None:
    """What tells the trace which numbers its experts bear, or gives them the published ones."""
    if unbake is not None:
        from coterie.models.baked import unbaked_trace

        return lambda trace: unbaked_trace(trace, unbake)
    if model is None:
        return None
    from coterie.models.baked import expert_order_of
    from coterie.placement.numbering import EXPERT_ORDER_KEY

    held = expert_order_of(model)
    return None if held is None else lambda trace: _marked(trace, {EXPERT_ORDER_KEY: held})


def _marked(trace: RoutingTrace, marks: Mapping[str, Any]) -> RoutingTrace:
    return replace(trace, provenance={**trace.provenance, **marks})
