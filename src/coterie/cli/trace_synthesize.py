"""`coterie trace synthesize`: a trace of any shape with realistic skew and co-activation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.common import JsonOption, SeedOption, emit_json, progress, say


def trace_synthesize(
    layers: Annotated[int, typer.Option("--layers", help="MoE layers.")],
    experts: Annotated[int, typer.Option("--experts", help="Experts of a layer.")],
    top_k: Annotated[int, typer.Option("--top-k", help="Experts a token chooses.")],
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens.")],
    out: Annotated[Path, typer.Option("--out", help="The trace file to write, .safetensors.")],
    like: Annotated[str, typer.Option("--like", help="Whose routing to resemble: deepseek or gpt-oss.")] = "deepseek",
    sequence_tokens: Annotated[int, typer.Option("--sequence-tokens", help="Mean length of a sequence.")] = 256,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Write a synthetic trace; its provenance says that it is synthetic."""
    from coterie.trace.synthetic import Recipe

    recipe = Recipe(layers, experts, top_k, tokens, seed, like, sequence_tokens)
    with progress() as listener:
        recipe.save(out, listener)
    if as_json:
        emit_json(
            {
                "out": str(out), "synthetic": True, "like": like, "layers": layers, "experts": experts,
                "top_k": top_k, "tokens": tokens, "sequence_tokens": sequence_tokens, "seed": seed,
            }
        )  # fmt: skip
        return
    say(f"{out}: synthetic routing, {recipe.model.name}, seed {seed}")
    say(f"  {layers} MoE layers, {experts} experts, top-{top_k}, {tokens:,} tokens")
