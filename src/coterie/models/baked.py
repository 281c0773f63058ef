"""What a baked checkpoint says of itself, and what it takes to use its traces with the original."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from coterie.checkpoint.renumber import FileHeader, headers_from_json
from coterie.errors import CheckpointError, ConfigError
from coterie.families import read_config
from coterie.files import parse_json, read_text
from coterie.placement.numbering import EXPERT_ORDER_KEY, expert_order_digest, unbaked_ids
from coterie.placement.placement import Placement
from coterie.trace.routing_trace import RoutingTrace

RECORD_FILE, PLACEMENT_FILE = "coterie_bake.json", "coterie_placement.json"
KIND = "coterie.bake"


def baked_placement(folder: Path) -> Placement:
    """The placement that a baked checkpoint is numbered by, whose ids are the published ones.

    Raises:
        CheckpointError: when the folder is no baked checkpoint, or its parts do not belong together.
    """
    return read_record(folder)[0]


def expert_order_of(model: Path) -> str | None:
    """The numbering that a config.json, or the one in a folder, tells; None: the published one."""
    held = read_config(model / "config.json" if model.is_dir() else model).get(EXPERT_ORDER_KEY)
    return None if held is None else str(held)


def unbaked_trace(trace: RoutingTrace, folder: Path) -> RoutingTrace:
    """A trace that was recorded with a baked checkpoint, with the published ids of the experts.

    Args:
        trace: recorded by Coterie, which marks it, or by an engine, which does not.
        folder: the baked checkpoint.

    Raises:
        CheckpointError: when the folder is no baked checkpoint.
        InfeasiblePlacement: when the trace is of another model.
        ConfigError: when the trace says that it is of another numbering.
    """
    placement, order = baked_placement(folder), expert_order_of(folder)
    placement.require_model(trace.spec, "the trace")
    held = trace.provenance.get(EXPERT_ORDER_KEY)
    if held not in (None, order) or "unbaked" in trace.provenance:
        said = f"by {held}" if held else f"as published again (it was by {trace.provenance.get('unbaked')})"
        raise ConfigError(
            f"the trace numbers experts {said}, {folder} by {order}; use the checkpoint that was recorded"
        )
    return replace(
        trace, expert_ids=unbaked_ids(trace.expert_ids, placement.physical_to_logical_map),
        provenance={**trace.provenance, EXPERT_ORDER_KEY: None, "unbaked": order},
    )  # fmt: skip


def read_record(folder: Path) -> tuple[Placement, dict[str, FileHeader], str]:
    """What a baked checkpoint was made by: the placement, the headers before, and the text of config.json before.

    Raises:
        CheckpointError: when the folder is no baked checkpoint, or its parts do not belong together.
    """
    file = folder / RECORD_FILE
    if not file.is_file():
        raise CheckpointError(
            f"{folder} is no baked checkpoint: it holds no {RECORD_FILE}; name one that coterie bake wrote"
        )
    record = parse_json(read_text(file, CheckpointError), file, CheckpointError)
    placement = Placement.load(folder / PLACEMENT_FILE)
    try:
        headers, text, digest = headers_from_json(record["headers"]), str(record["config"]), str(record["expert_order"])
        kind = record["kind"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{file} is damaged ({error}); bake the original again") from error
    held = read_config(folder / "config.json").get(EXPERT_ORDER_KEY)
    if kind != KIND or not digest == held == expert_order_digest(placement.physical_to_logical_map):
        raise CheckpointError(
            f"{file}, {PLACEMENT_FILE} and config.json in {folder} do not belong together (expert order {held} and "
            f"{digest}); bake the original again"
        )
    return placement, headers, text
