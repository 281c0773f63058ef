"""A checkpoint with the neurons of its experts in another order, written file by file without holding the model."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from coterie.checkpoint.expert_tensors import FLOAT_BYTES, Along, NeuronAxis, neuron_axes
from coterie.checkpoint.safetensors_io import StoredTensor, read_headers
from coterie.errors import CheckpointError, ConfigError
from coterie.families import read_config, text_part
from coterie.progress import Progress, silent
from coterie.units import format_bytes

Order = NDArray[np.integer[Any]]

_CHUNK_BYTES = 16 * 2**20
_OTHER_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack", ".npz"}


def reorder_files(
    source: Path, out: Path, order_LEI: Order, layer_ids: Iterable[int], changes: Mapping[str, Any],
    progress: Progress = silent,
) -> list[str]:  # fmt: skip
    """Write the checkpoint in `source` into the folder `out`, every expert's neurons in another order.

    Rows of gate and up, their biases and columns of down move alike; every other tensor and file is copied as it is,
    apart from weights in other formats, which would be in the old order. At most one expert's matrix is in memory.

    Source: CRISP §3.2, §4.1.

    Args:
        source: a model folder with safetensors weights.
        out: an empty folder.
        order_LEI: [L, E, I] integers: neuron r of the copy is neuron order[r] of the source.
        layer_ids: the model layer of each MoE layer.
        changes: keys to set in config.json.
        progress: told of every file of weights, in bytes.

    Returns:
        Files of the source that were left out, since they hold weights in another form.

    Raises:
        CheckpointError: when the weights are quantised, damaged, or hold experts that are not understood.
        ConfigError: when the disk has too little space.
    """
    config = read_config(source / "config.json")
    refuse_quantised(config, source, "reordered: reorder the unquantised checkpoint, then quantise it")
    tensors = read_headers(source)
    model_type = str(text_part(config).get("model_type"))
    axes = neuron_axes(tensors, model_type, layer_ids, (order_LEI.shape[0], order_LEI.shape[1], order_LEI.shape[2]))
    files = sorted({tensor.file for tensor in tensors.values()})
    others, left_out = other_files(source, files)
    check_space(out, [*files, *others], "the reordered checkpoint")
    done, total = 0, sum(file.stat().st_size for file in files)
    for file in files:
        held = {name: tensor for name, tensor in tensors.items() if tensor.file == file}
        _reorder_file(file, out / file.name, held, axes, order_LEI)
        done += file.stat().st_size
        progress("reordering", done, total)
    copy_others(source, others, out)
    text = json.dumps({**config, **changes}, indent=2) + "\n"
    (out / "config.json").write_text(text, encoding="utf-8")
    return left_out


def along_axis(order_I: Order, along: Along) -> Order:
    """The order of the elements along an axis of neurons (see `NeuronAxis.along`)."""
    order_I = np.asarray(order_I, dtype=np.int64)
    if along == "one":
        return order_I
    if along == "halves":
        return np.concatenate([order_I, order_I + len(order_I)])
    return np.stack([2 * order_I, 2 * order_I + 1], axis=1).reshape(-1)


def refuse_quantised(config: Mapping[str, Any], source: Path, what: str) -> None:
    """Refuse a checkpoint that its config calls quantised.

    Args:
        config: its config.json.
        source: its folder.
        what: what cannot be done with it, and the remedy.
    """
    for part in (config, text_part(config)):
        for key in ("quantization_config", "compression_config"):
            if part.get(key):
                method = part[key].get("quant_method") if isinstance(part[key], dict) else None
                raise CheckpointError(f"{source} is quantised ({method or key}); quantised weights cannot be {what}")


def other_files(source: Path, weights: list[Path]) -> tuple[list[Path], list[str]]:
    """The files to copy as they are, and the names of those to leave out."""
    copied, left_out = [], []
    for file in sorted(source.rglob("*")):
        inside = file.relative_to(source)
        hidden = any(part.startswith(".") for part in inside.parts)
        if hidden or not file.is_file() or file in weights or str(inside) == "config.json":
            continue
        if file.suffix.lower() in _OTHER_WEIGHTS:
            left_out.append(str(inside))
        else:
            copied.append(file)
    return copied, left_out


def copy_others(source: Path, files: Iterable[Path], out: Path) -> None:
    """Copy files of the folder `source`, and of folders in it, to their places in `out`."""
    for file in files:
        target = out / file.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)


def check_space(out: Path, files: Iterable[Path], what: str) -> None:
    """Refuse to begin a copy that the disk has no room for.

    Args:
        out: the folder it is written into, inside the scratch folder of `files.replacing_folder`.
        files: what it is made of.
        what: what to call it.

    Raises:
        ConfigError: telling what is needed and what is free.
    """
    needed, free = sum(file.stat().st_size for file in files), shutil.disk_usage(out).free
    if needed > free:
        raise ConfigError(
            f"{what} takes {needed:,} bytes ({format_bytes(needed)}), {free:,} "
            f"({format_bytes(free)}) are free in {out.parent.parent}; free some space or choose another disk"
        )


def _reorder_file(
    file: Path, target: Path, tensors: Mapping[str, StoredTensor], axes: Mapping[str, NeuronAxis], order_LEI: Order
) -> None:
    """Copy one file of weights; what is not an expert's, the header included, byte for byte."""
    with file.open("rb") as reader, target.open("wb") as writer:
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].start):
            axis = axes.get(name)
            if axis is None or axis.axis is None:
                continue
            copy_bytes(reader, writer, tensor.start - reader.tell())
            _reorder_tensor(reader, writer, tensor, axis, order_LEI[axis.layer])
        copy_bytes(reader, writer, os.fstat(reader.fileno()).st_size - reader.tell())


def _reorder_tensor(
    reader: BinaryIO, writer: BinaryIO, tensor: StoredTensor, axis: NeuronAxis, order_EI: Order
) -> None:
    assert axis.axis is not None
    experts = [axis.expert] if axis.expert is not None else range(len(order_EI))
    shape = tensor.shape if axis.expert is not None else tensor.shape[1:]
    element = np.dtype(f"u{FLOAT_BYTES[tensor.dtype]}")  # moved, never computed with
    for expert in experts:
        values = np.frombuffer(_read(reader, tensor.nbytes // len(experts)), element).reshape(shape)
        moved = np.take(values, along_axis(order_EI[expert], axis.along), axis=axis.axis)
        writer.write(moved.data)


def copy_bytes(reader: BinaryIO, writer: BinaryIO, nbytes: int) -> None:
    """Copy the next bytes of one file to another, a little at a time."""
    while nbytes > 0:
        part = _read(reader, min(nbytes, _CHUNK_BYTES))
        writer.write(part)
        nbytes -= len(part)


def _read(reader: BinaryIO, nbytes: int) -> bytes:
    data = reader.read(nbytes)
    if len(data) < nbytes:
        raise CheckpointError(f"{reader.name} became shorter while it was read; download it again")
    return data
