"""From a model's folder to an expert store and a skeleton: what offloading runs from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import coterie
from coterie.checkpoint.eight_bits import in_eight_bits, require_bits
from coterie.checkpoint.expert_records import ExpertRecords
from coterie.checkpoint.expert_store import StoreHeader
from coterie.checkpoint.pack_store import pack_store
from coterie.checkpoint.reorder import refuse_quantised
from coterie.checkpoint.safetensors_io import read_headers
from coterie.checkpoint.store_layout import EIGHT_BITS, StoreLayout
from coterie.errors import CheckpointError, ConfigError
from coterie.families import read_config, text_part
from coterie.files import refuse_own_folder
from coterie.models.checkpoint_identity import identity_of_checkpoint
from coterie.models.identity import ORDER_KEY, order_digest
from coterie.models.layers import expert_sizes, spec_of
from coterie.models.load import resolve
from coterie.models.reorder import require_order
from coterie.profile.model_profile import ModelProfile
from coterie.progress import Progress, silent
from coterie.pruning.importance_order import NeuronOrder, neuron_order


@dataclass(frozen=True)
class Packed:
    """What `pack` wrote.

    Attributes:
        out: the store's folder.
        layout: of its records.
        order: digest of the order of neurons; None: the original's.
        variant: the importance it goes by.
        resumed: experts that an interrupted call had packed before.
    """

    out: Path
    layout: StoreLayout
    order: str | None
    variant: str | None
    resumed: int


def pack(
    model: str | Path, out: str | Path, *, profile: ModelProfile | None = None, variant: str | None = None,
    bits: int | None = None, progress: Progress = silent,
) -> Packed:  # fmt: skip
    """Write a store of a model's experts, each readable at any width in one read, and everything else beside it.

    One expert at a time is in memory. A call that was interrupted, killed or ran out of space is taken up again by the
    same call; until it ends well, nothing reads the store.

    Source: CRISP §3.4, §4; records with all parts of a neuron side by side go beyond the paper.

    Args:
        model: a folder, a shipped model's name, or a hub id.
        out: the store's folder: new, or one that this same call began.
        profile: of this model, for the order of neurons; None: they stay as they are, which is what a model that
            `coterie reorder` wrote needs.
        variant: the importance to go by; None: the default one.
        bits: 8: experts' weights are rounded to integers with one scale a row (`checkpoint/eight_bits.py`), which
            halves what is read of bfloat16 and changes outputs a little at any width; None: as they are.
        progress: told of every expert, in bytes.

    Raises:
        BackendUnavailable: without torch or transformers.
        CheckpointError: when the experts are quantised, damaged or not understood.
        ConfigError: for another model's profile, a folder that holds something else, too little space, or bits
            other than 8.
    """
    require_bits(bits)
    source, target = resolve(model), Path(out)
    refuse_own_folder(source, target)
    config = read_config(source / "config.json")
    refuse_quantised(config, source, "packed yet: pack the unquantised checkpoint")
    identity, skeleton = identity_of_checkpoint(source)
    spec, tensors = spec_of(skeleton), read_headers(source)
    shape = (spec.num_layers, spec.num_experts, *expert_sizes(skeleton))
    records = ExpertRecords(tensors, str(text_part(config).get("model_type")), spec.layer_ids, shape)
    _require_dtype(skeleton, records.layout.dtype, source)
    order = None if profile is None else _order(profile, variant, identity, config, source, records.layout)
    digest = config.get(ORDER_KEY) if order is None else order_digest(order.order_LEI)
    layout = records.layout if bits is None else replace(records.layout, dtype=EIGHT_BITS)
    header = StoreHeader(spec, identity, digest, None if order is None else order.variant, layout)
    resumed = pack_store(
        target, source, tensors, records, header, None if order is None else order.order_LEI,
        config if digest is None else {**config, ORDER_KEY: digest}, {"coterie": coterie.__version__}, progress,
        None if bits is None else partial(in_eight_bits, dtype=records.layout.dtype),
    )  # fmt: skip
    return Packed(target, layout, digest, header.variant, resumed)


def _require_dtype(skeleton: Any, stored: str, source: Path) -> None:
    import torch

    names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
    wanted = names.get(skeleton.dtype, str(skeleton.dtype))
    if wanted != stored:
        raise CheckpointError(
            f"{source} stores its experts as {stored}, and its config has the model run as {wanted}; set dtype in its "
            "config.json to the type of the weights"
        )


def _order(
    profile: ModelProfile, variant: str | None, identity: str, config: Mapping[str, Any], source: Path,
    layout: StoreLayout,
) -> NeuronOrder:  # fmt: skip
    """The order by a profile that is of this model, in the order its neurons are in."""
    held, profiled = config.get(ORDER_KEY), profile.provenance.get("neuron_order")
    if identity != profile.identity:
        raise ConfigError(
            f"the profile is of the model {profile.spec.model} with identity {profile.identity}, {source} has "
            f"{identity}; profile this model"
        )
    if held != profiled:
        raise ConfigError(
            f"{source} has its neurons in the order {held or 'of the original'}, the profile is of the model in the "
            f"order {profiled or 'of the original'}; pack the folder that was profiled"
        )
    order = neuron_order(profile, variant)
    require_order(order.order_LEI, (layout.num_layers, layout.num_experts, layout.width))
    return order
