"""From a model's folder and a placement to a standard checkpoint that is placed by its numbers, and back."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import coterie
from coterie.checkpoint.renumber import FileHeader, headers_to_json, renumber_files
from coterie.checkpoint.reorder import check_space, copy_others, other_files
from coterie.checkpoint.safetensors_io import INDEX_FILE, read_files
from coterie.errors import CheckpointError, ConfigError, InfeasiblePlacement
from coterie.families import load_spec, read_config
from coterie.files import read_text, refuse_own_folder, replacing_folder
from coterie.models.baked import KIND, PLACEMENT_FILE, RECORD_FILE, read_record
from coterie.models.load import resolve
from coterie.models.reorder_checkpoint import reorder
from coterie.placement.numbering import (
    EXPERT_ORDER_KEY,
    expert_order_digest,
    expert_order_of_placement,
    require_same_numbering,
    require_whole_groups,
)
from coterie.placement.placement import Placement
from coterie.profile.model_profile import ModelProfile
from coterie.progress import Progress, silent
from coterie.spec import MoESpec

_CONFIGS = ("config.json", "quantize_config.json", "quant_config.json", "hf_quant_config.json")
# "experts.7", "experts\\.(3|4)"; not "experts\\.\\d+" nor "experts.[0-9]+", which are of all
_NUMBERED_EXPERT = re.compile(r"(?<!_)experts\\?\.(?:\d|[(\[](?!0-9\][+*]))")

Check = Callable[[Path, Path, NDArray[np.int64], MoESpec], Any]


@dataclass(frozen=True)
class Baked:
    """What `bake` or `unbake` wrote.

    Attributes:
        out: the folder.
        spec: of the model.
        expert_order: which numbering its experts bear, as its config.json tells it; None: the published one.
        num_devices: expert-parallel ranks that it is made for.
        moved: experts, of all layers, whose number changed.
        left_out: files of the source that were not copied, since they hold the weights in another form.
        check: what `check` returned.
    """

    out: Path
    spec: MoESpec
    expert_order: str | None
    num_devices: int
    moved: int
    left_out: tuple[str, ...]
    check: Any = None


def bake(
    model: str | Path,
    placement: Placement,
    out: str | Path,
    *,
    profile: ModelProfile | None = None,
    check: Check | None = None,
    progress: Progress = silent,
) -> Baked:
    """Write a copy of a checkpoint whose experts are numbered by the slots of a placement; it computes the same.

    Every engine puts expert e of E on rank e // (E / ranks) unless told otherwise. In the copy that is the placement,
    so no engine needs a placement file. Numbered experts' tensors are renamed in the headers and their data copied
    undecoded; tensors of all experts and routers are written slice by slice. The folder appears when it is complete.

    Args:
        model: a folder, a shipped model's name, or a hub id.
        placement: of this model's experts by their published numbers, with as many slots on every device.
        out: the folder to write; one that an earlier call wrote is replaced.
        profile: also put every expert's neurons in order of importance, as `reorder` does (unquantised models; for the
            time being the disk holds the model once more).
        check: called with the source, the new folder, the map [L, E] and the spec before the folder takes its place;
            what it raises, nothing is written.
        progress: told of every file of weights, in bytes.

    Raises:
        CheckpointError: when the weights are damaged or hold what is not understood.
        ConfigError: for a model that is baked already, a placement in another numbering, or too little space.
        InfeasiblePlacement: when the placement is of another model, uneven, or takes router groups apart.
    """
    source, target = resolve(model), Path(out)
    refuse_own_folder(source, target)
    spec, config = load_spec(source), read_config(source / "config.json")
    if config.get(EXPERT_ORDER_KEY) is not None:
        raise ConfigError(
            f"{source} is baked already (its experts are numbered by {config[EXPERT_ORDER_KEY]}); bake the original, "
            "or this after coterie bake --undo"
        )
    map_LE = _checked_map(placement, spec, source)
    _refuse_numbered_configs(source)
    with replacing_folder(target, RECORD_FILE) as folder:
        origin = source
        if profile is not None:
            origin = reorder(source, profile, folder.parent / "reordered", progress=progress).out
        headers, left_out = _write(origin, folder, map_LE, spec, None, progress)
        text = read_text(origin / "config.json", CheckpointError)
        digest = expert_order_digest(map_LE)
        _write_json(folder / "config.json", {**read_config(origin / "config.json"), EXPERT_ORDER_KEY: digest}, 2)
        (folder / PLACEMENT_FILE).write_text(replace(placement, spec=spec).to_json(), encoding="utf-8")
        record = {
            "kind": KIND, "model": spec.model, "expert_order": digest, "coterie": coterie.__version__,
            "headers": headers_to_json(headers), "config": text,
        }  # fmt: skip
        _write_json(folder / RECORD_FILE, record, 1)
        found = None if check is None else check(origin, folder, map_LE, spec)
    moved = int((map_LE != np.arange(spec.num_experts)).sum())
    return Baked(target, spec, digest, placement.topology.num_devices, moved, tuple(left_out), found)


def unbake(model: str | Path, out: str | Path, *, check: Check | None = None, progress: Progress = silent) -> Baked:
    """Write the checkpoint that a baked one was made from, bit for bit, its config.json included.

    With a profile, `bake` renumbers the reordered checkpoint: that is what it was made from.

    Args:
        model: a folder that `bake` wrote.
        out: the folder to write.
        check: as in `bake`; the map leads back.
        progress: told of every file of weights, in bytes.

    Raises:
        CheckpointError: when it is no baked checkpoint, or was changed since.
        ConfigError: when the folder cannot be written, or the disk has too little space.
    """
    source, target = resolve(model), Path(out)
    refuse_own_folder(source, target)
    placement, headers, text = read_record(source)
    map_LE, spec = placement.physical_to_logical_map, placement.spec
    back_LE = np.argsort(map_LE, axis=1)
    with replacing_folder(target, RECORD_FILE) as folder:
        _, left_out = _write(source, folder, back_LE, spec, headers, progress)
        (folder / "config.json").write_text(text, encoding="utf-8", newline="")
        found = None if check is None else check(source, folder, back_LE, spec)
    moved = int((map_LE != np.arange(spec.num_experts)).sum())
    return Baked(target, spec, None, placement.topology.num_devices, moved, tuple(left_out), found)


def _checked_map(placement: Placement, spec: MoESpec, source: Path) -> NDArray[np.int64]:
    placement.require_model(spec, str(source))
    require_same_numbering(expert_order_of_placement(placement.method), "the placement", None, "the model")
    ids = placement.spec.layer_ids
    if ids and ids != spec.layer_ids:
        raise InfeasiblePlacement(
            f"the placement is for other MoE layers ({ids[0]} to {ids[-1]}) than {source} has ({spec.layer_ids[0]} to "
            f"{spec.layer_ids[-1]}); use a placement made from this model's trace"
        )
    slots = placement.slots_per_device.tolist()
    if len(set(slots)) > 1 or sum(slots) != spec.num_experts:
        raise InfeasiblePlacement(
            f"the placement has {min(slots)} to {max(slots)} slots a device for {spec.num_experts} experts; engines "
            "give every rank one number and no copies by default: place without --redundant and slots_per_device, on "
            "a number of devices that divides the experts, or use an engine's file (coterie export)"
        )
    require_whole_groups(placement.physical_to_logical_map, spec.num_groups)
    return placement.physical_to_logical_map


def _write(
    source: Path, folder: Path, map_LE: NDArray[np.int64], spec: MoESpec, headers: Mapping[str, FileHeader] | None,
    progress: Progress,
) -> tuple[dict[str, FileHeader], list[str]]:  # fmt: skip
    """Everything but config.json and what `bake` adds; the headers before, and the names of what was left out."""
    files = read_files(source)
    weights = list(files)
    others, left_out = other_files(
        source, [*weights, *(source / name for name in (INDEX_FILE, RECORD_FILE, PLACEMENT_FILE))]
    )
    check_space(folder, [*weights, *others], "the new checkpoint")
    before = renumber_files(files, folder, map_LE, spec.layer_ids, headers, progress)
    copy_others(source, others, folder)
    return before, left_out


def _refuse_numbered_configs(source: Path) -> None:
    """Refuse configs that name single experts, such as those left unquantised: they would name others."""
    for file in (source / name for name in _CONFIGS):
        if not file.is_file():
            continue
        named = next((text for text in _strings(read_config(file)) if _NUMBERED_EXPERT.search(text)), None)
        if named is not None:
            raise CheckpointError(
                f"{file} names experts by number ({named[:80]!r}); such a checkpoint cannot be renumbered: use an "
                "engine's file (coterie export)"
            )


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _write_json(file: Path, document: Mapping[str, Any], indent: int) -> None:
    file.write_text(json.dumps(document, indent=indent) + "\n", encoding="utf-8")
