"""A store of experts on disk: `[I, 3, H]` records of which any width is one read, with a checksum for every block."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.checkpoint.store_layout import PARTS, StoreLayout
from coterie.errors import CheckpointError, ConfigError
from coterie.files import parse_json, read_text
from coterie.spec import MoESpec

KIND, SCHEMA_VERSION, SCALED_VERSION = "expert_store", 1, 2  # the later one for stores with scales alone
HEADER_FILE, EXPERTS_FILE, CHECKSUMS_FILE = "store.json", "experts.bin", "checksums.bin"
SCALES_FILE, PACKING_FILE, SKELETON_FOLDER = "scales.bin", "packing.json", "model"


@dataclass(frozen=True)
class StoreHeader:
    """What a store is of.

    Attributes:
        spec: the model's routing.
        identity: which weights (`models/identity.py`).
        order: digest of the order of neurons; None: the original's.
        variant: the importance that the order goes by; None: unknown, or the original order.
        layout: where everything lies.
    """

    spec: MoESpec
    identity: str
    order: str | None
    variant: str | None
    layout: StoreLayout

    def to_json(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "kind": KIND, "schema_version": _version(self.layout), "spec": self.spec.to_json(),
            "identity": self.identity, "order": self.order, "variant": self.variant, "layout": asdict(self.layout),
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StoreHeader:
        """The inverse of `to_json`."""
        return cls(
            MoESpec.from_json(data["spec"]), str(data["identity"]), data["order"], data["variant"],
            StoreLayout(**data["layout"]),
        )  # fmt: skip


@dataclass(frozen=True)
class ExpertStore:
    """A finished store that was opened; reading blocks is `offloading`'s.

    Attributes:
        folder: where it is.
        header: what it is of.
        checksums_LEB: [L, E, B] uint32, zlib.crc32 of every block, padding included.
        scale_LE3I: [L, E, 3, I] float32, the scale of every gate row, up row and down column of experts in eight bits;
            None: experts have none.
    """

    folder: Path
    header: StoreHeader
    checksums_LEB: NDArray[np.uint32]
    scale_LE3I: NDArray[np.float32] | None = None

    @property
    def layout(self) -> StoreLayout:
        """Where everything lies."""
        return self.header.layout

    @property
    def experts_file(self) -> Path:
        """The file of records."""
        return self.folder / EXPERTS_FILE

    @property
    def skeleton(self) -> Path:
        """The folder of everything but the experts: config, tokenizer, `model.safetensors`."""
        return self.folder / SKELETON_FOLDER

    def check_block(self, layer: int, expert: int, block: int, data: Any) -> None:
        """Refuse a block whose bytes are not those that were written.

        Raises:
            CheckpointError: naming the block.
        """
        if zlib.crc32(data) != int(self.checksums_LEB[layer, expert, block]):
            raise CheckpointError(
                f"{self.experts_file} is corrupted in layer {layer}, expert {expert}, block {block}: its checksum is "
                "another; pack the model again, and check the disk"
            )


def open_store(folder: str | Path) -> ExpertStore:
    """Open a store that `coterie pack` finished.

    Raises:
        CheckpointError: when it is none, unfinished, truncated or damaged.
    """
    folder = Path(folder)
    header_file = folder / HEADER_FILE
    if not header_file.is_file():
        if (folder / PACKING_FILE).is_file():
            raise CheckpointError(f"{folder} is a store that is not finished; run the same coterie pack again")
        raise CheckpointError(f"{folder} is no expert store; make one with coterie pack")
    remedy = "pack the model again"
    text = read_text(header_file, CheckpointError, remedy=remedy)
    document = parse_json(text, header_file, CheckpointError, remedy=remedy)
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise CheckpointError(f"{header_file} does not describe an expert store; make one with coterie pack")
    if document.get("schema_version") not in (SCHEMA_VERSION, SCALED_VERSION):
        raise CheckpointError(
            f"{folder} has schema {document.get('schema_version')!r} of expert stores, this version reads "
            f"{SCHEMA_VERSION} and {SCALED_VERSION}; pack the model again"
        )
    try:
        header = StoreHeader.from_json(document)
        checksum = int(document["checksums_crc32"])
        scales_checksum = int(document["scales_crc32"]) if header.layout.scale_bytes else None
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        raise CheckpointError(f"{header_file} is damaged ({error}); pack the model again") from error
    _check_sizes(folder, header.layout)
    checksums_LEB = _checksums(folder / CHECKSUMS_FILE, header.layout, checksum)
    scale_LE3I = None if scales_checksum is None else _scales(folder / SCALES_FILE, header.layout, scales_checksum)
    return ExpertStore(folder, header, checksums_LEB, scale_LE3I)


def header_text(header: StoreHeader, checksums: bytes, scales: bytes, about: Mapping[str, Any]) -> str:
    """The text of a finished store's header file; `scales` are empty where experts have none."""
    document = {**header.to_json(), "checksums_crc32": zlib.crc32(checksums), **about}
    if header.layout.scale_bytes:
        document["scales_crc32"] = zlib.crc32(scales)
    return json.dumps(document, indent=1) + "\n"


def block_checksums(record: memoryview, layout: StoreLayout) -> list[int]:
    """The checksum of each block of one record, padding included."""
    spans = [layout.span(block, block + 1) for block in range(layout.blocks)]
    return [zlib.crc32(record[start : start + nbytes]) for start, nbytes in spans]


def _check_sizes(folder: Path, layout: StoreLayout) -> None:
    sizes = {EXPERTS_FILE: layout.total_bytes, CHECKSUMS_FILE: layout.num_records * layout.blocks * 4}
    if layout.scale_bytes:
        sizes[SCALES_FILE] = layout.num_records * layout.scale_bytes
    for name, wanted in sizes.items():
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing; it has {wanted:,} bytes; pack the model again")
        size = file.stat().st_size
        if size != wanted:
            what = "truncated" if size < wanted else "too long"
            raise CheckpointError(
                f"{file} is {what}: it has {size:,} bytes instead of {wanted:,}; pack the model again"
            )


def _checksums(file: Path, layout: StoreLayout, expected: int) -> NDArray[np.uint32]:
    data = file.read_bytes()
    if zlib.crc32(data) != expected:
        raise CheckpointError(f"{file} is damaged, so blocks cannot be checked; pack the model again")
    shape = (layout.num_layers, layout.num_experts, layout.blocks)
    return np.frombuffer(data, "<u4").reshape(shape).astype(np.uint32)


def _scales(file: Path, layout: StoreLayout, expected: int) -> NDArray[np.float32]:
    data = file.read_bytes()
    if zlib.crc32(data) != expected:
        raise CheckpointError(f"{file} is damaged: its checksum is another; pack the model again, and check the disk")
    shape = (layout.num_layers, layout.num_experts, PARTS, layout.width)
    return np.frombuffer(data, "<f4").reshape(shape).astype(np.float32)


def _version(layout: StoreLayout) -> int:
    """Stores without scales are what they always were, and older versions read them."""
    return SCALED_VERSION if layout.scale_bytes else SCHEMA_VERSION
