"""One rank's part of a model: its own experts, and everything that is not an expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.checkpoint.expert_records import ExpertRecords
from coterie.checkpoint.reorder import refuse_quantised
from coterie.checkpoint.safetensors_io import read_headers
from coterie.errors import CheckpointError
from coterie.families import read_config, text_part
from coterie.models.backend import import_transformers
from coterie.models.layers import expert_sizes, find_moe_layers, spec_of
from coterie.models.load import build_skeleton
from coterie.models.memory import available_bytes
from coterie.models.skeleton import load_skeleton
from coterie.parallel.layer_placement import experts_of_device
from coterie.placement.numbering import EXPERT_ORDER_KEY, expert_order_of_placement, require_same_numbering
from coterie.placement.placement import Placement
from coterie.units import format_bytes

_TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


@dataclass(frozen=True)
class RankModel:
    """What one rank holds.

    Attributes:
        model: a Transformers model whose experts modules hold this rank's experts alone, in the order of its slots.
        expert_bytes: bytes that they take.
        all_expert_bytes: bytes that all experts would take.
    """

    model: Any
    expert_bytes: int
    all_expert_bytes: int


def load_rank(folder: Path, placement: Placement, rank: int, dtype: torch.dtype | None = None) -> RankModel:
    """Read everything but the experts, and of the experts this rank's alone, one at a time.

    Args:
        folder: a checkpoint (safetensors).
        placement: of this model.
        rank: the device.
        dtype: element type; None: the checkpoint's own.

    Raises:
        BackendUnavailable: without torch or transformers.
        CheckpointError: when the experts are quantised, damaged or not understood, or do not fit.
        ConfigError: when the placement numbers experts in another way than the model (a baked one).
        InfeasiblePlacement: when the placement is for another model.
    """
    import_transformers()
    skeleton = build_skeleton(folder, dtype)
    spec, (width, hidden) = spec_of(skeleton), expert_sizes(skeleton)
    placement.require_model(spec, "the model")
    config = read_config(folder / "config.json")
    held = config.get(EXPERT_ORDER_KEY)
    require_same_numbering(expert_order_of_placement(placement.method), "the placement", held, "the model")
    refuse_quantised(config, folder, "spread over devices; use the unquantised checkpoint")
    shape = (spec.num_layers, spec.num_experts, width, hidden)
    records = ExpertRecords(read_headers(folder), str(text_part(config).get("model_type")), spec.layer_ids, shape)
    one = 3 * width * hidden * skeleton.dtype.itemsize
    own_L = [experts_of_device(placement, layer, rank) for layer in range(spec.num_layers)]
    _check_memory(folder, one * sum(map(len, own_L)))
    model = load_skeleton(folder, records.names, dtype)
    for layer in find_moe_layers(model):
        _fill(layer.experts, records, layer.index, own_L[layer.index], model.dtype)
    return RankModel(model, one * sum(map(len, own_L)), one * spec.num_layers * spec.num_experts)


def _fill(experts: Any, records: ExpertRecords, layer: int, own: Sequence[int], dtype: torch.dtype) -> None:
    """Give a module the weights of some experts, in this order and in the module's own layout."""
    width, hidden = records.layout.width, records.layout.hidden_size
    turned = bool(experts.is_transposed)
    gate_up = torch.empty((len(own), hidden, 2 * width) if turned else (len(own), 2 * width, hidden), dtype=dtype)
    down = torch.empty((len(own), width, hidden) if turned else (len(own), hidden, width), dtype=dtype)
    rows_N2IH, rows_NIH = gate_up.mT if turned else gate_up, down if turned else down.mT
    gate, up = (
        (slice(0, width), slice(width, None)) if experts.is_concatenated else (slice(0, None, 2), slice(1, None, 2))
    )
    for place, expert in enumerate(own):
        record_I3H = _floats(records, layer, expert)
        rows_N2IH[place, gate], rows_N2IH[place, up] = record_I3H[:, 0], record_I3H[:, 1]
        rows_NIH[place] = record_I3H[:, 2]
    experts.gate_up_proj = torch.nn.Parameter(gate_up, requires_grad=False)
    experts.down_proj = torch.nn.Parameter(down, requires_grad=False)
    for name in [name for name in experts._parameters if name.endswith("_bias")]:
        own_bias = experts._parameters[name][list(own)].to(dtype)
        experts._parameters[name] = torch.nn.Parameter(own_bias, requires_grad=False)


def _floats(records: ExpertRecords, layer: int, expert: int) -> Tensor:
    """One expert, [I, 3, H], in the checkpoint's own type."""
    return torch.from_numpy(records.record(layer, expert)).view(_TORCH_DTYPES[records.layout.dtype])


def _check_memory(folder: Path, needed: int) -> None:
    free = available_bytes()
    if needed > free:
        raise CheckpointError(
            f"this rank's experts of {folder} take {needed:,} bytes ({format_bytes(needed)}) of memory, {free:,} "
            f"({format_bytes(free)}) are free; use more devices or a smaller dtype"
        )
