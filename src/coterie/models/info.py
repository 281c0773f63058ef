"""What a model is made of and how many bytes that is, from its config and its files' headers; no weights are read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.checkpoint.safetensors_io import StoredTensor, has_weights, read_headers
from coterie.errors import CheckpointError
from coterie.families import EXPERT_KEYS, FAMILIES, model_name, read_config, shared_experts, spec_from_config, text_part
from coterie.models.layers import find_moe_layers, spec_of
from coterie.models.load import build_skeleton, resolve
from coterie.spec import MoESpec

# routed experts on disk: one by one, stacked, or (granitemoe) stacked under the block itself
_EXPERT_TENSOR = re.compile(r"\blayers\.(\d+)\..*(?:\bexperts\.|block_sparse_moe\.(?:in|out)put_linear\.)")
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


@dataclass(frozen=True)
class ModelInfo:
    """A model's shape and size.

    Attributes:
        spec: the shape of its routing.
        family: its `model_type`.
        expert_width: neurons of a routed expert; None when its config does not say.
        shared_experts: experts that every token passes; None when its config does not say.
        dtype: element type of the routed experts, or how they are quantized.
        measured: whether the bytes are those of the files; otherwise of the model its config describes.
        expert_bytes: one routed expert of one layer (of the largest, where layers differ).
        experts_bytes: all routed experts.
        rest_bytes: everything else.
        notes: what the reader of the figures should know.
    """

    spec: MoESpec
    family: str
    expert_width: int | None
    shared_experts: int | None
    dtype: str
    measured: bool
    expert_bytes: int
    experts_bytes: int
    rest_bytes: int
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary, ready for JSON."""
        spec = self.spec
        return {
            "model": spec.model, "family": self.family, "moe_layers": spec.num_layers,
            "model_layers": spec.num_model_layers, "layer_ids": list(spec.layer_ids), "experts": spec.num_experts,
            "top_k": spec.top_k, "num_groups": spec.num_groups, "topk_groups": spec.topk_groups,
            "shared_experts": self.shared_experts, "hidden_size": spec.hidden_size, "expert_width": self.expert_width,
            "dtype": self.dtype, "expert_bytes": self.expert_bytes, "experts_bytes": self.experts_bytes,
            "rest_bytes": self.rest_bytes, "total_bytes": self.experts_bytes + self.rest_bytes,
            "bytes_from": "files" if self.measured else "config", "notes": list(self.notes),
        }  # fmt: skip


def model_info(model: str | Path) -> ModelInfo:
    """The shape and size of a model: a folder, a config.json, a shipped model's name or a hub id.

    Sizes come from the headers of its safetensors files where it has them, else from building the model that the
    config describes without memory for its weights, which needs transformers; then routers and biases that
    Transformers always holds in float32 count as float32, though some published files hold them in 16 bits.

    Raises:
        BackendUnavailable: when the sizes have to come from the config and transformers is not installed.
        CheckpointError: when there is no such model, it has no MoE layers, or its files are damaged.
    """
    file = Path(model)
    if not file.is_file():
        file = resolve(model, weights=False) / "config.json"
    config = text_part(read_config(file))
    family = FAMILIES.get(str(config.get("model_type")))
    folder = file.parent if file.name == "config.json" and has_weights(file.parent) else None
    known = spec_from_config(config, model_name(file)) if family or not _has_experts(config) else None
    # an unknown family's config may call things anyhow: its modules tell its shape
    skeleton = build_skeleton(file) if folder is None or known is None else None
    spec = known or spec_of(skeleton)
    sizes = _from_headers(read_headers(folder), spec, folder) if folder else _from_skeleton(skeleton)
    quantization = config.get("quantization_config")
    notes: tuple[str, ...] = ()
    if quantization and folder is None:
        notes = ("the config names a quantization; the bytes are those of the unquantized weights",)
    elif isinstance(quantization, dict):
        sizes = (str(quantization.get("quant_method", sizes[0])), *sizes[1:])
    width = config.get(family.intermediate if family else "moe_intermediate_size")
    return ModelInfo(spec, str(config.get("model_type")), width, shared_experts(config, family), *sizes, notes=notes)


def _has_experts(config: Mapping[str, Any]) -> bool:
    return any(config.get(key) for key in EXPERT_KEYS)


def _from_headers(tensors: Mapping[str, StoredTensor], spec: MoESpec, folder: Path) -> tuple[str, bool, int, int, int]:
    """Element type, True, bytes of an expert, of all experts, and of the rest."""
    of_layer: Counter[int] = Counter()
    of_dtype: Counter[str] = Counter()
    for name, tensor in tensors.items():
        match = _EXPERT_TENSOR.search(name)
        if match and int(match[1]) in spec.layer_ids:
            of_layer[int(match[1])] += tensor.nbytes
            of_dtype[tensor.dtype] += tensor.nbytes
    if len(of_layer) != spec.num_layers:
        absent = sorted(set(spec.layer_ids) - set(of_layer))
        raise CheckpointError(
            f"{folder} holds experts of {len(of_layer)} of its {spec.num_layers} MoE layers, not of {absent[0]}; "
            "use the config.json and the files that belong together"
        )
    total = sum(tensor.nbytes for tensor in tensors.values())
    experts = sum(of_layer.values())
    dtype = of_dtype.most_common(1)[0][0]
    return _DTYPES.get(dtype, dtype), True, max(of_layer.values()) // spec.num_experts, experts, total - experts


def _from_skeleton(model: Any) -> tuple[str, bool, int, int, int]:
    """Element type, False, bytes of an expert, of all experts, and of the rest."""
    layers = find_moe_layers(model)
    of_layer = [_bytes(layer.experts) for layer in layers]
    dtype = str(next(layers[0].experts.parameters()).dtype).removeprefix("torch.")
    experts = sum(of_layer)
    return dtype, False, max(of_layer) // layers[0].num_experts, experts, _bytes(model) - experts


def _bytes(module: Any) -> int:
    """Bytes of what is saved of a module, shared tensors counted once."""
    tensors = {id(tensor): tensor for tensor in module.state_dict(keep_vars=True).values()}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
