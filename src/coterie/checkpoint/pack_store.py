"""Writing an expert store, expert by expert; what a kill or a full disk interrupts, the same call takes up again.

`checksums.bin` is the journal: an expert's checksums are appended once its record has reached the disk, so their number
says how many experts are done. `store.json`, which makes the folder a store, is written last.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from coterie.checkpoint.expert_store import (
    CHECKSUMS_FILE,
    EXPERTS_FILE,
    HEADER_FILE,
    PACKING_FILE,
    SCALES_FILE,
    SKELETON_FOLDER,
    StoreHeader,
    block_checksums,
    header_text,
)
from coterie.checkpoint.reorder import copy_bytes, other_files
from coterie.checkpoint.safetensors_io import SINGLE_FILE, StoredTensor
from coterie.checkpoint.store_layout import StoreLayout
from coterie.errors import CheckpointError, ConfigError
from coterie.files import parse_json, read_text, write_text
from coterie.progress import Progress, silent
from coterie.units import format_bytes

_OWN_FILES = {CHECKSUMS_FILE, EXPERTS_FILE, HEADER_FILE, PACKING_FILE, SCALES_FILE, SKELETON_FOLDER}
Encode = Callable[[NDArray[Any]], tuple[NDArray[Any], NDArray[np.float32]]]
"""A record [I, 3, H] as the source has it -> as the store has it, and its scales [3, I]."""


class Records(Protocol):
    """Where a store's experts come from, one at a time: a checkpoint (`ExpertRecords`), or anything alike."""

    @property
    def names(self) -> frozenset[str]:
        """The tensors of the source that are the experts'."""
        ...

    def record(self, layer: int, expert: int, order_I: NDArray[Any] | None = None) -> NDArray[Any]:
        """[I, 3, H], of elements of the layout's size."""
        ...

    def ordered_biases(self, order_LEI: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """Biases along neurons by name, moved to this order [L, E, I]; they stay in the skeleton."""
        ...


def pack_store(
    out: Path, source: Path, tensors: Mapping[str, StoredTensor], records: Records, header: StoreHeader,
    order_LEI: NDArray[Any] | None, config: Mapping[str, Any], about: Mapping[str, Any], progress: Progress = silent,
    encode: Encode | None = None,
) -> int:  # fmt: skip
    """Write a store, or the rest of one that an earlier call began.

    One expert is in memory at a time.

    Args:
        out: the folder to write.
        source: the model's folder.
        tensors: its tensors, by name.
        records: its experts.
        header: what the store is of.
        order_LEI: the order of neurons; None: as they are.
        config: what to write as the skeleton's config.json.
        about: further keys of the header file.
        progress: told of every expert, in bytes.
        encode: for a layout with scales; None: records are written as they are.

    Returns:
        Experts that an earlier call had written.

    Raises:
        CheckpointError: when the source is damaged.
        ConfigError: when the folder holds something else, cannot be written, or the disk is too small.
    """
    layout = header.layout
    done = _begin(out, header, _fingerprint(tensors))
    rest = {name: tensor for name, tensor in tensors.items() if name not in records.names}
    _check_space(
        out,
        (layout.num_records - done) * (layout.record_bytes + layout.scale_bytes)
        + sum(each.nbytes for each in rest.values()),
    )
    resumed = done
    try:
        moved = {} if order_LEI is None else records.ordered_biases(order_LEI)
        _write_skeleton(out / SKELETON_FOLDER, source, tensors, rest, moved, config)
        for done in _write_experts(out, resumed, records, layout, order_LEI, encode):
            progress("packing", done * layout.record_bytes, layout.total_bytes)
    except OSError as error:
        raise ConfigError(
            f"cannot write {out}: {error.strerror or error}; {done} of {layout.num_records} experts are packed: free "
            "some space and run the same command again to continue"
        ) from error
    checksums, scales_bytes = (out / CHECKSUMS_FILE).read_bytes(), (out / SCALES_FILE).read_bytes()
    write_text(out / HEADER_FILE, header_text(header, checksums, scales_bytes, about))
    if not layout.scale_bytes:
        (out / SCALES_FILE).unlink()
    (out / PACKING_FILE).unlink()
    return resumed


def is_finished(out: Path) -> bool:
    """Whether a folder holds a finished store."""
    return (out / HEADER_FILE).is_file()


def experts_packed(out: Path) -> tuple[int, int] | None:
    """How many experts of an unfinished store are packed, and of how many; None where there is none."""
    try:
        layout = StoreLayout(**json.loads((out / PACKING_FILE).read_text(encoding="utf-8"))["layout"])
        return _written(out, layout), layout.num_records
    except (OSError, ValueError, KeyError, TypeError, CheckpointError):
        return None


def _written(out: Path, layout: StoreLayout) -> int:
    written = {CHECKSUMS_FILE: layout.blocks * 4, EXPERTS_FILE: layout.record_bytes, SCALES_FILE: layout.scale_bytes}
    return min((out / name).stat().st_size // each for name, each in written.items() if each)


def _write_experts(
    out: Path, done: int, records: Records, layout: StoreLayout, order_LEI: NDArray[Any] | None, encode: Encode | None
) -> Iterator[int]:
    """Write the experts from number `done` on; yields how many there are after each."""
    with (
        (out / EXPERTS_FILE).open("r+b") as experts,
        (out / CHECKSUMS_FILE).open("r+b") as journal,
        (out / SCALES_FILE).open("r+b") as scales,
    ):
        sizes = (layout.record_bytes, layout.blocks * 4, layout.scale_bytes)
        for file, each in zip((experts, journal, scales), sizes, strict=True):
            file.truncate(done * each)
            file.seek(0, os.SEEK_END)
        for number in range(done, layout.num_records):
            layer, expert = divmod(number, layout.num_experts)
            record = records.record(layer, expert, None if order_LEI is None else order_LEI[layer, expert])
            if encode is not None:
                record, scale_3I = _encoded(record, encode, layer, expert)
                _write_through(scales, scale_3I)
            _append(experts, journal, record, layout)
            yield number + 1


def _append(experts: BinaryIO, journal: BinaryIO, record_I3H: NDArray[Any], layout: StoreLayout) -> None:
    """Write one record, then, when it is on the disk, its checksums."""
    padded = np.zeros(layout.record_bytes, np.uint8)
    padded[: record_I3H.nbytes] = record_I3H.reshape(-1).view(np.uint8)
    _write_through(experts, padded)
    _write_through(journal, np.array(block_checksums(padded.data, layout), "<u4"))


def _encoded(record_I3H: NDArray[Any], encode: Encode, layer: int, expert: int) -> tuple[Any, NDArray[np.float32]]:
    try:
        return encode(record_I3H)
    except CheckpointError as error:
        raise CheckpointError(f"layer {layer}, expert {expert} {error}") from error


def _write_through(file: BinaryIO, values: NDArray[Any]) -> None:
    file.write(np.ascontiguousarray(values).data)
    file.flush()
    os.fsync(file.fileno())


def _begin(out: Path, header: StoreHeader, fingerprint: str) -> int:
    """Make the folder, or find how many experts of this same store are in it."""
    settings = json.loads(json.dumps({**header.to_json(), "source": fingerprint}))
    packing = out / PACKING_FILE
    try:
        out.mkdir(exist_ok=True)
        strangers = {found.name for found in out.iterdir() if not found.name.startswith(".")} - _OWN_FILES
    except OSError as error:
        raise ConfigError(
            f"cannot write {out}: {error.strerror}; choose a folder that exists and is writable"
        ) from error
    if is_finished(out):
        raise ConfigError(f"{out} holds a finished store already; remove it or name another folder")
    if not packing.is_file():
        if strangers or any((out / name).exists() for name in _OWN_FILES):
            raise ConfigError(f"{out} holds {min(strangers or _OWN_FILES)}; name a new folder")
        write_text(packing, json.dumps(settings, indent=1) + "\n")
    elif parse_json(read_text(packing, ConfigError), packing, ConfigError) != settings:
        raise ConfigError(
            f"{out} holds an unfinished store of another model, order or number of bits; remove it or name a new folder"
        )
    for name in (EXPERTS_FILE, CHECKSUMS_FILE, SCALES_FILE):
        (out / name).touch()
    return _written(out, header.layout)


def _fingerprint(tensors: Mapping[str, StoredTensor]) -> str:
    """Which files the weights come from: names, sizes and times, so that half of one model is not joined to another."""
    files = sorted({tensor.file for tensor in tensors.values()})
    return " ".join(f"{file.name}:{file.stat().st_size}:{file.stat().st_mtime_ns}" for file in files)


def _write_skeleton(
    folder: Path, source: Path, tensors: Mapping[str, StoredTensor], rest: Mapping[str, StoredTensor],
    moved: Mapping[str, NDArray[Any]], config: Mapping[str, Any],
) -> None:  # fmt: skip
    """Everything but the experts' weights: the tensors in one file, some `moved`, and the small files as they are."""
    folder.mkdir(exist_ok=True)
    copied, _ = other_files(source, sorted({tensor.file for tensor in tensors.values()}))
    for file in copied:
        if file.name != "model.safetensors.index.json":
            target = folder / file.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
    with (folder / SINGLE_FILE).open("wb") as writer:
        writer.write(_safetensors_header(rest.items()))
        for name, tensor in rest.items():
            if name in moved:
                writer.write(moved[name].tobytes())
                continue
            with tensor.file.open("rb") as reader:
                reader.seek(tensor.start)
                copy_bytes(reader, writer, tensor.nbytes)


def _safetensors_header(tensors: Iterable[tuple[str, StoredTensor]]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, tensor in tensors:
        offsets = [start, start + tensor.nbytes]
        entries[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        start += tensor.nbytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _check_space(out: Path, needed: int) -> None:
    free = shutil.disk_usage(out).free
    if needed > free:
        raise ConfigError(
            f"the store takes {needed:,} bytes ({format_bytes(needed)}) more, {free:,} ({format_bytes(free)}) are free "
            f"in {out}; free some space or choose another disk"
        )
