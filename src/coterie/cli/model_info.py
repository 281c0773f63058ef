"""`coterie model info`: what a model is made of and how many bytes that is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from coterie.cli.common import JsonOption, emit_json, say

if TYPE_CHECKING:
    from coterie.models.info import ModelInfo


def model_info(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A folder, a config.json, a shipped model's name, or a hub id.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Print a model's MoE layers, experts and widths, and the bytes of one expert, all experts and the rest."""
    from coterie.models.info import model_info as inspect

    info = inspect(model)
    if as_json:
        emit_json(info.to_json())
    else:
        _show(info)


def _show(info: ModelInfo) -> None:
    from coterie.units import format_bytes

    spec, values = info.spec, info.to_json()
    groups = f", from {spec.topk_groups} of {spec.num_groups} groups" if spec.num_groups > 1 else ""
    width = "of unknown width" if info.expert_width is None else f"of {info.expert_width:,} neurons"
    shared = "" if not info.shared_experts else f", {info.shared_experts} shared"
    say(f"{spec.model}: {info.family}")
    say(f"  {spec.num_layers} MoE layers of {spec.num_model_layers}, hidden size {spec.hidden_size:,}")
    say(f"  {spec.num_experts} experts {width}, top-{spec.top_k}{groups}{shared}")
    source = "the files" if info.measured else "the config"
    say(f"  experts in {info.dtype}; bytes from {source}:")
    for what in ("expert", "experts", "rest", "total"):
        label = {"expert": "one expert", "experts": "all experts", "rest": "the rest", "total": "in total"}[what]
        count = values[f"{what}_bytes"]
        say(f"  {label:>11}  {count:>18,}  {format_bytes(count)}")
    for note in info.notes:
        say(f"  note: {note}")
