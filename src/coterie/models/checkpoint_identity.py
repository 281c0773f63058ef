"""The identity of a checkpoint's weights, from its routers alone."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from coterie.checkpoint.safetensors_io import read_headers
from coterie.errors import CheckpointError
from coterie.models.backend import import_transformers
from coterie.models.identity import identity_of
from coterie.models.layers import find_moe_layers
from coterie.models.load import build_skeleton


def identity_of_checkpoint(folder: Path) -> tuple[str, Any]:
    """What `identity_of` says of the loaded model, reading nothing but its routers; and the model without weights.

    Args:
        folder: a model folder with safetensors weights.

    Raises:
        CheckpointError: when it has no MoE layers that are recognised, or lacks a router's weights.
    """
    import_transformers()
    safetensors = importlib.import_module("safetensors")
    skeleton = build_skeleton(folder)
    routers = {id(layer.router): layer.router for layer in find_moe_layers(skeleton)}
    wanted: dict[str, tuple[Any, str]] = {}  # the tensors of the routers, by their names in the model
    for path, module in skeleton.named_modules():
        if id(module) in routers:
            wanted |= {f"{path}.{name}": (module, name) for name in module.state_dict()}
    found: dict[int, dict[str, Any]] = {key: {} for key in routers}
    rename = renaming(skeleton)
    for name, tensor in read_headers(folder).items():
        target = rename(name)
        if target in wanted:
            module, own = wanted.pop(target)
            with safetensors.safe_open(tensor.file, framework="pt") as file:
                found[id(module)][own] = file.get_tensor(name)
    if wanted:
        raise CheckpointError(
            f"{folder} lacks {len(wanted)} tensors of routers, {min(wanted)} for one; download it again"
        )
    for key, state in found.items():
        routers[key].load_state_dict(state, assign=True)
    return identity_of(skeleton), skeleton


def renaming(skeleton: Any) -> Any:
    """From a tensor's name in the checkpoint to its name in the model, by Transformers' own table."""
    conversion = importlib.import_module("transformers.conversion_mapping")
    loading = importlib.import_module("transformers.core_model_loading")
    table = conversion.get_model_conversion_mapping(skeleton)
    converters = [step for step in table if isinstance(step, loading.WeightConverter)]
    renamings = [step for step in table if not isinstance(step, loading.WeightConverter)]
    names = skeleton.state_dict()
    prefix = skeleton.base_model_prefix
    return lambda name: loading.rename_source_key(name, renamings, converters, prefix, names)[0]
