"""Is a renumbered checkpoint the original, tensor by tensor? Told from what was written, not from how."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coterie.checkpoint.expert_axis import ExpertTensor, expert_tensors, renamed
from coterie.checkpoint.safetensors_io import StoredTensor, read_headers
from coterie.errors import CheckpointError
from coterie.progress import Progress, silent

_CHUNK_BYTES = 16 * 2**20


@dataclass(frozen=True)
class SameTensors:
    """What was compared, all of it equal.

    Attributes:
        tensors: all.
        renamed: of these, whose names changed.
        moved: of these, tensors of all experts whose slices were compared one by one.
        nbytes: bytes compared.
    """

    tensors: int
    renamed: int
    moved: int
    nbytes: int


def compare_renumbered(
    source: Path, out: Path, map_LE: NDArray[np.int64], layer_ids: Iterable[int], progress: Progress = silent
) -> SameTensors:
    """Compare two checkpoints byte by byte, a little at a time.

    Args:
        source: the original's folder.
        out: the renumbered one's; its expert s must be expert map[s] of the original.
        map_LE: [L, E].
        layer_ids: the model layer of each MoE layer.
        progress: told of every tensor, in bytes.

    Raises:
        CheckpointError: naming the first tensor that differs or is absent.
    """
    originals, copies = read_headers(source), read_headers(out)
    own = expert_tensors(copies, layer_ids, map_LE.shape[1])
    done, total, changed, moved, seen = 0, sum(tensor.nbytes for tensor in copies.values()), 0, 0, set()
    for name, copy in sorted(copies.items(), key=lambda item: (str(item[1].file), item[1].start)):
        expert = own.get(name)
        original_name = _original_name(name, expert, map_LE)
        original = originals.get(original_name)
        if original is None or (original.dtype, original.shape) != (copy.dtype, copy.shape):
            raise CheckpointError(f"{out} has {name} where {source} has no {original_name} of that type and shape")
        if not _equal(original, copy, None if expert is None or expert.expert is not None else map_LE[expert.layer]):
            raise CheckpointError(f"{name} in {out} is not {original_name} of {source}")
        seen.add(original_name)
        changed += name != original_name
        moved += expert is not None and expert.expert is None
        done += copy.nbytes
        progress("comparing", done, total)
    if len(seen) < len(originals):
        raise CheckpointError(f"{out} lacks {min(originals.keys() - seen)} of {source}")
    return SameTensors(len(copies), changed, moved, total)


def _original_name(name: str, tensor: ExpertTensor | None, map_LE: NDArray[np.int64]) -> str:
    if tensor is None or tensor.expert is None:
        return name
    return renamed(name, int(map_LE[tensor.layer, tensor.expert]))


def _equal(original: StoredTensor, copy: StoredTensor, map_E: NDArray[np.int64] | None) -> bool:
    """Whether the bytes are the same, slice by slice in the order of `map_E` if given."""
    order = [0] if map_E is None else map_E.tolist()
    size = copy.nbytes // len(order)
    with original.file.open("rb") as first, copy.file.open("rb") as second:
        for slot, expert in enumerate(order):
            for start in range(0, size, _CHUNK_BYTES):
                nbytes = min(_CHUNK_BYTES, size - start)
                before = os.pread(first.fileno(), nbytes, original.start + expert * size + start)
                after = os.pread(second.fileno(), nbytes, copy.start + slot * size + start)
                if before != after or len(after) < nbytes:
                    return False
    return True
