"""From a model's name to a model in memory; what cannot work is refused before weights are read."""

from __future__ import annotations

import importlib
import re
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.checkpoint.safetensors_io import read_headers
from coterie.errors import CheckpointError, ConfigError
from coterie.families import FAMILIES, read_config
from coterie.models.backend import import_transformers, quiet
from coterie.models.layers import find_moe_layers
from coterie.models.memory import available_bytes
from coterie.units import format_bytes

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

SHIPPED_MODELS = ("tiny-mixtral", "tiny-qwen3-moe")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


def resolve(model: str | Path, *, weights: bool = True) -> Path:
    """The folder of a model.

    Args:
        model: a folder, the name of a shipped model, or a hub id ("owner/name"), which is downloaded unless it is in
            the local cache.
        weights: False fetches nothing but config.json from the hub.

    Raises:
        CheckpointError: when it is none of these, or the hub cannot be reached.
    """
    path, text = Path(model), str(model)
    if text and path.is_dir():
        return path
    if text in SHIPPED_MODELS:
        shipped = Path(str(files("coterie.data") / "models" / text))
        if not shipped.is_dir():
            raise CheckpointError(
                f"the shipped model {text} is not in this installation ({shipped}); reinstall coterie"
            )
        return shipped
    if isinstance(model, Path) or path.exists() or _HUB_ID.fullmatch(text) is None:
        raise CheckpointError(
            f"no model {text!r}: it is no folder, no shipped model ({', '.join(SHIPPED_MODELS)}) and no hub id "
            "(owner/name)"
        )
    return _from_hub(text, _HUB_FILES if weights else ("config.json",))


def load_model(model: str | Path, dtype: torch.dtype | str | None = None) -> PreTrainedModel:
    """A model in main memory, in eval mode, ready to run.

    Args:
        model: see `resolve`.
        dtype: element type to hold it in, "float32" or torch.float32; None: the checkpoint's own.

    Raises:
        BackendUnavailable: without torch or transformers.
        CheckpointError: when the model has no MoE layers, is larger than the free memory, has missing, truncated or
            damaged files, lacks tensors, or cannot be run by this version of Transformers.
        ConfigError: for an unknown dtype.
    """
    import_transformers()
    wanted = parse_dtype(dtype)
    folder = resolve(model)
    skeleton = build_skeleton(folder, wanted)
    find_moe_layers(skeleton)
    read_headers(folder)
    _check_memory(folder, skeleton)
    return _load(folder, wanted)


def load_tokenizer(model: str | Path) -> Any:
    """The model's tokenizer (`PreTrainedTokenizerBase`).

    Raises:
        BackendUnavailable: without torch or transformers.
        CheckpointError: when the model's folder holds none, or a damaged one.
    """
    transformers = import_transformers()
    folder = resolve(model)
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise CheckpointError(
            f"{folder} holds no tokenizer ({', '.join(_TOKENIZER_FILES)}); copy the model's tokenizer files there"
        )
    try:
        with quiet():
            return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # what foreign code raises on foreign files can be anything
        raise CheckpointError(f"cannot load the tokenizer in {folder}: {_line(error)}") from error


def load_config(model: Path) -> Any:
    """The Transformers configuration of a model folder, or of a config.json.

    Raises:
        CheckpointError: when the file is missing or damaged, or Transformers does not know the architecture.
    """
    transformers = import_transformers()
    file = model / "config.json" if model.is_dir() else model
    model_type = read_config(file).get("model_type")
    if model_type == "deepseek":
        importlib.import_module("coterie.models.deepseek").register()
    elif model_type not in transformers.CONFIG_MAPPING:
        raise CheckpointError(
            f"{file} has the model_type {model_type!r}, which transformers {transformers.__version__} does not know; "
            f"known MoE families: {', '.join(FAMILIES)}"
        )
    try:
        with quiet():
            return transformers.AutoConfig.from_pretrained(file, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # what foreign code raises on foreign files can be anything
        raise CheckpointError(f"{file} is no config that Transformers can read: {_line(error)}") from error


def build_skeleton(model: Path, dtype: torch.dtype | None = None) -> Any:
    """The model that a config.json describes, by Transformers' own class on the meta device: shapes, no memory.

    Args:
        model: a model folder, or a config.json.
        dtype: element type; None: the config's, or float32 where it names none.

    Raises:
        CheckpointError: when the config cannot be read or built.
    """
    transformers, backend = import_transformers(), importlib.import_module("torch")
    config = load_config(model)
    try:
        with quiet(), backend.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(
                config, dtype=dtype or config.dtype or backend.float32, trust_remote_code=False
            )
    except Exception as error:  # what foreign code raises on foreign files can be anything
        raise CheckpointError(f"cannot build the model that {model} describes: {_line(error)}") from error


def tensor_bytes(model: Any) -> int:
    """Bytes of a model's parameters and buffers, shared ones counted once."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _check_memory(folder: Path, skeleton: Any) -> None:
    needed, free = tensor_bytes(skeleton), available_bytes()
    if needed > free:
        raise CheckpointError(
            f"{folder} needs {needed:,} bytes ({format_bytes(needed)}) of memory as {skeleton.dtype}, "
            f"{free:,} ({format_bytes(free)}) are free; use a smaller model, a smaller dtype or a larger machine"
        )


def _load(folder: Path, dtype: torch.dtype | None) -> PreTrainedModel:
    transformers = import_transformers()
    try:
        with quiet():
            loaded, found = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype or "auto", local_files_only=True, trust_remote_code=False, use_safetensors=True,
                ignore_mismatched_sizes=True, output_loading_info=True,
            )  # fmt: skip
    except Exception as error:  # what foreign code raises on foreign files can be anything
        raise CheckpointError(f"cannot load the model in {folder}: {_line(error)}") from error
    wrong = sorted(name for name, *_ in found["mismatched_keys"]) or sorted(found["missing_keys"])
    if wrong:
        what = "in another shape than its config says" if found["mismatched_keys"] else "not at all"
        raise CheckpointError(
            f"{folder} holds {len(wrong)} tensors {what}, {wrong[0]} for one; use the config.json and the files that "
            "belong together"
        )
    model: PreTrainedModel = loaded.eval()
    return model


def _from_hub(name: str, patterns: tuple[str, ...]) -> Path:
    import_transformers()  # huggingface_hub comes with it
    hub = importlib.import_module("huggingface_hub")
    try:
        return Path(hub.snapshot_download(name, allow_patterns=list(patterns)))
    except Exception as error:  # the network's errors are of many kinds
        raise CheckpointError(
            f"cannot get {name} from the hub, and it is not in the local cache ({_line(error)}); download it elsewhere "
            "and give its folder"
        ) from error


def parse_dtype(dtype: torch.dtype | str | None) -> Any:
    """A floating-point type, by its name too; None stays None.

    Raises:
        ConfigError: for anything else.
    """
    if dtype is None:
        return None
    types = importlib.import_module("torch")
    value: Any = getattr(types, dtype, None) if isinstance(dtype, str) else dtype
    if isinstance(value, types.dtype) and value.is_floating_point:
        return value
    raise ConfigError(f"dtype {dtype!r} is no floating-point type; choose float32, bfloat16 or float16")


def _line(error: BaseException) -> str:
    """The first line of an error's text, which can be a page; with the second where the first only announces it."""
    first, _, rest = str(error).strip().partition("\n")
    return f"{first} {rest.strip().partition(chr(10))[0]}" if first.endswith(":") else first or type(error).__name__
