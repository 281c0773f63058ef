"""Where the neurons of every expert lie in an expert store: records, blocks and their alignment."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from coterie.checkpoint.expert_tensors import FLOAT_BYTES
from coterie.errors import CheckpointError

EIGHT_BITS = "I8"  # rows of integers, each with a scale that is resident (`eight_bits.py`)
ELEMENT_BYTES = {**FLOAT_BYTES, EIGHT_BITS: 1}

ALIGNMENT = 4096  # what O_DIRECT asks of offsets, lengths and memory on every common disk; also a page
PARTS = 3  # gate row, up row, down column
_BLOCKS = 16  # about so many blocks in an expert


@dataclass(frozen=True)
class StoreLayout:
    """Records `[I, 3, H]`, one an expert, in order of layer, then expert; a record is cut into blocks of neurons.

    Blocks are the unit of reading, of checksums and of the cache. Each begins at a multiple of `ALIGNMENT`, so that any
    run of blocks is one read that goes where it is to stay; the last one may be shorter, and is padded.

    Attributes:
        num_layers: MoE layers, L.
        num_experts: experts in a layer, E.
        width: neurons of an expert, I.
        hidden_size: elements of a row, H.
        dtype: of the elements, as safetensors names it: "F32", "BF16", "F16", "F64" or "I8".
    """

    num_layers: int
    num_experts: int
    width: int
    hidden_size: int
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in ELEMENT_BYTES:
            raise CheckpointError(f"experts of {self.dtype} cannot be stored; known: {', '.join(ELEMENT_BYTES)}")
        for name in ("num_layers", "num_experts", "width", "hidden_size"):
            if getattr(self, name) < 1:
                raise CheckpointError(f"{name} = {getattr(self, name)} in a store; it must be at least 1")

    @cached_property
    def neuron_bytes(self) -> int:
        """Bytes of one neuron."""
        return PARTS * self.hidden_size * ELEMENT_BYTES[self.dtype]

    @cached_property
    def block_neurons(self) -> int:
        """Neurons in a block: a sixteenth of an expert, or as many more as alignment takes."""
        unit = ALIGNMENT // math.gcd(self.neuron_bytes, ALIGNMENT)
        return unit * math.ceil(self.width / _BLOCKS / unit)

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of a block, a multiple of `ALIGNMENT`."""
        return self.block_neurons * self.neuron_bytes

    @cached_property
    def blocks(self) -> int:
        """Blocks in an expert, B."""
        return math.ceil(self.width / self.block_neurons)

    @cached_property
    def record_bytes(self) -> int:
        """Bytes of an expert with its padding, a multiple of `ALIGNMENT`."""
        return math.ceil(self.width * self.neuron_bytes / ALIGNMENT) * ALIGNMENT

    @property
    def num_records(self) -> int:
        """Experts of all layers."""
        return self.num_layers * self.num_experts

    @property
    def scale_bytes(self) -> int:
        """Bytes of an expert's scales [3, I] in float32, which are no part of its record; 0 where it has none."""
        return PARTS * self.width * 4 if self.dtype == EIGHT_BITS else 0

    @property
    def total_bytes(self) -> int:
        """Bytes of all records."""
        return self.num_records * self.record_bytes

    def offset(self, layer: int, expert: int) -> int:
        """Where a record begins."""
        return (layer * self.num_experts + expert) * self.record_bytes

    def span(self, first: int, end: int) -> tuple[int, int]:
        """Offset within the record, and bytes, of the blocks from `first` to before `end`; 0 <= first <= end <= B."""
        start = first * self.block_bytes
        return start, min(end * self.block_bytes, self.record_bytes) - start

    def blocks_of(self, width: int) -> int:
        """The blocks that hold the first `width` neurons."""
        return -(-width // self.block_neurons)
