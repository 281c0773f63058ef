"""From a model's folder and its profile to a standard checkpoint whose neurons stand in order of importance."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import coterie
from coterie.checkpoint.reorder import reorder_files
from coterie.errors import ConfigError
from coterie.families import read_config
from coterie.files import refuse_own_folder, replacing_folder
from coterie.models.checkpoint_identity import identity_of_checkpoint
from coterie.models.identity import ORDER_KEY, order_digest
from coterie.models.layers import spec_of
from coterie.models.load import resolve
from coterie.models.reorder import require_order
from coterie.profile.model_profile import ModelProfile
from coterie.progress import Progress, silent
from coterie.pruning.importance_order import neuron_order

RECORD_FILE = "coterie_reorder.json"  # in a reordered checkpoint: what it was made from


@dataclass(frozen=True)
class Reordered:
    """What `reorder` wrote.

    Attributes:
        out: the folder.
        digest: `order_digest` of the order, as its config.json tells it.
        variant: the importance it goes by.
        left_out: files of the source that were not copied, since they hold the weights in another form.
        check: what `check` returned.
    """

    out: Path
    digest: str
    variant: str
    left_out: tuple[str, ...]
    check: Any = None


def reorder(
    model: str | Path,
    profile: ModelProfile,
    out: str | Path,
    *,
    variant: str | None = None,
    check: Callable[[Path, Path], Any] | None = None,
    progress: Progress = silent,
) -> Reordered:
    """Write a copy of a checkpoint whose experts have their most important neurons first; it computes the same.

    Only routers and one expert's matrix at a time are in memory. The folder appears when it is complete.

    Source: CRISP §3.2, §4.1.

    Args:
        model: a folder, a shipped model's name, or a hub id.
        profile: of this model.
        out: the folder to write; one that an earlier call wrote is replaced.
        variant: the importance to go by; None: the default one.
        check: called with the source and the new folder before that takes its place; what it raises, nothing is
            written.
        progress: told of every file of weights, in bytes.

    Raises:
        BackendUnavailable: without torch or transformers.
        CheckpointError: when the weights are quantised, damaged, or hold experts that are not understood.
        ConfigError: for another model's profile, an unknown variant, a model that is reordered already, or too little
            space.
    """
    source, target = resolve(model), Path(out)
    refuse_own_folder(source, target)
    order = neuron_order(profile, variant)
    order_LEI = order.order_LEI
    digest, held = order_digest(order_LEI), read_config(source / "config.json").get(ORDER_KEY)
    profiled = profile.provenance.get("neuron_order")  # None: the model was as published
    if held != profiled:
        raise ConfigError(
            f"{source} has its neurons in the order {held or 'of the original'}, the profile is of the model in the "
            f"order {profiled or 'of the original'}; reorder the folder that was profiled"
        )
    with replacing_folder(target, RECORD_FILE) as folder:
        identity, skeleton = identity_of_checkpoint(source)
        if identity != profile.identity:
            raise ConfigError(
                f"the profile is of the model {profile.spec.model} with identity {profile.identity}, {source} has "
                f"{identity}; profile this model"
            )
        spec = spec_of(skeleton)
        require_order(order_LEI, (spec.num_layers, spec.num_experts, profile.width))
        left_out = reorder_files(
            source, folder, order_LEI, spec.layer_ids or range(spec.num_layers), {ORDER_KEY: digest}, progress
        )
        record = {
            "kind": "coterie.reorder", "model": spec.model, "identity": identity, "order": digest,
            "variant": order.variant, "profile": dict(profile.provenance), "coterie": coterie.__version__,
        }  # fmt: skip
        (folder / RECORD_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        found = None if check is None else check(source, folder)
    return Reordered(target, digest, order.variant, tuple(left_out), found)
