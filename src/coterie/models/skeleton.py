"""A model without its routed experts' weights: the rest in memory, their biases too, as Transformers loads it."""

from __future__ import annotations

import importlib
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from coterie.checkpoint.safetensors_io import read_headers
from coterie.errors import CheckpointError
from coterie.models.backend import import_transformers, quiet
from coterie.models.checkpoint_identity import renaming
from coterie.models.layers import find_moe_layers
from coterie.models.load import build_skeleton
from coterie.models.memory import available_bytes
from coterie.units import format_bytes


def load_skeleton(folder: Path, leave: Collection[str] = (), dtype: Any = None) -> Any:
    """The model without its routed experts, in eval mode, its experts modules without weights but with their biases.

    Args:
        folder: with config.json and every tensor but the routed experts' weights: a store's skeleton, or a whole
            checkpoint.
        leave: names of tensors not to read: the experts' of a whole checkpoint.
        dtype: element type; None: the checkpoint's own.

    Raises:
        BackendUnavailable: without torch or transformers.
        CheckpointError: when tensors are missing, of other shapes, or larger than the free memory.
    """
    import_transformers()
    torch, safetensors = importlib.import_module("torch"), importlib.import_module("safetensors")
    tensors = {name: tensor for name, tensor in read_headers(folder).items() if name not in leave}
    needed, free = sum(tensor.nbytes for tensor in tensors.values()), available_bytes()
    if needed > free:
        raise CheckpointError(
            f"all but the experts of {folder} takes {needed:,} bytes ({format_bytes(needed)}) of memory, {free:,} "
            f"({format_bytes(free)}) are free; use a smaller model or a larger machine"
        )
    model = build_skeleton(folder, dtype)
    for layer in find_moe_layers(model):
        for name in [name for name in layer.experts._parameters if not name.endswith("_bias")]:
            del layer.experts._parameters[name]
    rename, shapes, dtype_of = renaming(model), model.state_dict(), _dtypes(model)
    state: dict[str, Any] = {}
    for file in sorted({tensor.file for tensor in tensors.values()}):
        names = [name for name, tensor in tensors.items() if tensor.file == file and rename(name) in shapes]
        with safetensors.safe_open(file, framework="pt") as opened:
            for name in names:
                target, tensor = rename(name), opened.get_tensor(name)
                if tensor.shape != shapes[target].shape:
                    raise CheckpointError(
                        f"{folder} holds {name} in the shape {list(tensor.shape)}, its config says "
                        f"{list(shapes[target].shape)}; use the config.json and the files that belong together"
                    )
                state[target] = tensor.to(dtype_of(target)) if tensor.is_floating_point() else tensor
    with quiet(), torch.no_grad():
        model.load_state_dict(state, strict=False, assign=True)
        model.tie_weights()
        _rebuild_buffers(model)
    _require_whole(model, folder)
    model.requires_grad_(False)
    model.generation_config = _generation_config(model, folder)
    return model.eval()


def _dtypes(model: Any) -> Any:
    """From a tensor's name to the type it is held in: the model's, but where its class wants float32."""
    kept = {re.compile(pattern): dtype for pattern, dtype in model._get_dtype_plan(model.dtype).items()}

    def dtype_of(name: str) -> Any:
        return next((dtype for pattern, dtype in kept.items() if pattern.search(name)), model.dtype)

    return dtype_of


def _rebuild_buffers(model: Any) -> None:
    """Buffers that checkpoints do not hold, such as the frequencies of rotary embeddings, from the config."""
    torch = importlib.import_module("torch")
    for module in model.modules():
        own = [name for name in module._non_persistent_buffers_set if getattr(module, name).is_meta]
        if not own:
            continue
        for name in own:
            module._buffers[name] = torch.empty_like(module._buffers[name], device="cpu")
        model._init_weights(module)


def _require_whole(model: Any, folder: Path) -> None:
    missing = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if missing:
        raise CheckpointError(f"{folder} lacks {len(missing)} tensors, {missing[0]} for one; download or pack it again")


def _generation_config(model: Any, folder: Path) -> Any:
    transformers = import_transformers()
    if not (folder / "generation_config.json").is_file():
        return model.generation_config
    with quiet():
        return transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
