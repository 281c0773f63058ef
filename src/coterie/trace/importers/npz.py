"""Traces as .npz: plain arrays in either axis order, streamed."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, TraceError
from coterie.progress import Progress
from coterie.spec import MoESpec
from coterie.trace.importers.archives import DAMAGE, begins_as_archive, member_names
from coterie.trace.importers.axes import Axes, find_axes, offsets
from coterie.trace.importers.base import MAX_EXPERTS, Layout, check_range
from coterie.trace.importers.zip_members import ZipMembers

WEIGHTS = ("weights", "gate_weights", "probs")
SEQUENCES = ("sequence_ids", "seq_starts", "example", "prompt")
_PER_TOKEN = {"positions": np.int32, "phase": np.uint8, "step": np.int64, "home_ids": np.int32}
_COUNT_TOKENS = ("sequence_ids", "example", "prompt", "token", *_PER_TOKEN)


class NpzImporter:
    """`expert_ids` and, where they are there, the other arrays that `NpzSource` names."""

    name = "npz"

    def sniff(self, path: Path) -> bool:
        """A zip archive of .npy members, or the beginning of one that calls itself .npz."""
        if not path.is_file() or not begins_as_archive(path):
            return False
        names = member_names(path)
        return any(name.endswith(".npy") for name in names) or (not names and path.suffix == ".npz")

    @contextmanager
    def open(self, path: Path, spec: MoESpec | None) -> Iterator[NpzSource]:
        """Read the members' headers."""
        try:
            archive = zipfile.ZipFile(path)
        except DAMAGE as error:
            raise TraceError(f"it is truncated or no .npz archive ({error}); copy or record it again") from error
        with archive:
            yield _source(ZipMembers(archive), spec)


@dataclass(frozen=True)
class NpzSource:
    """An open archive.

    Read are `expert_ids` [L, T, K] or [T, L, K]; one of `weights`, `gate_weights`, `probs`, and `kept`, of the same
    shape; `seq_starts` (offsets, [S] or [S+1]) or one of `sequence_ids`, `example`, `prompt` [T]; `positions`,
    `phase`, `step`, `home_ids` [T]; and two JSON strings, `spec` and `provenance`. Other members are left alone.
    """

    members: ZipMembers
    axes: Axes
    layout: Layout
    weights: str | None
    sequences: str | None

    def fill(self, target: Mapping[str, NDArray[Any]], progress: Progress) -> None:
        """Write the arrays, each in the order it is stored in."""
        self._copy("expert_ids", target["expert_ids"], progress)
        if self.weights is not None:
            self._copy(self.weights, target["weights"], progress)
        if "kept" in target:
            self._copy("kept", target["kept"], progress)
        for name in _PER_TOKEN:
            if name in target:
                self.members.copy_integers(name, target[name], 1 if name == "phase" else None)
        if self.sequences == "seq_starts":
            starts = _starts(self.members)
            bounds = offsets(starts, self.axes.num_tokens)
            for sequence, (begin, end) in enumerate(pairwise(bounds.tolist())):
                target["sequence_ids"][begin:end] = sequence
        elif self.sequences is not None:
            self.members.copy_integers(self.sequences, target["sequence_ids"])

    def _copy(self, name: str, target: NDArray[Any], progress: Progress) -> None:
        blocks = list(self.axes.blocks(self.members.header(name).dtype.itemsize))
        width = self.axes.top_k * (1 if self.axes.layers_first else self.axes.num_layers)
        counts = (width * (tokens.stop - tokens.start) for _, tokens in blocks)
        for done, ((layers, tokens), flat) in enumerate(zip(blocks, self.members.pieces(name, counts), strict=True)):
            values = self.axes.to_decisions(flat)
            if name == "expert_ids":
                check_range(values, MAX_EXPERTS, layers.start, tokens.start)
            target[layers, tokens] = values
            progress(f"reading {name}", done + 1, len(blocks))


def _source(members: ZipMembers, spec: MoESpec | None) -> NpzSource:
    if "expert_ids" not in members:
        raise TraceError("it holds no expert_ids [layers, tokens, top-k]; a trace needs each token's experts")
    ids = members.header("expert_ids")
    if ids.dtype.kind not in "iu":
        raise TraceError(f"expert_ids has dtype {ids.dtype}; expert ids are integers: save them as uint8 or uint16")
    dtypes: dict[str, Any] = {"expert_ids": np.uint8 if ids.dtype.itemsize == 1 else np.uint16}
    weights = members.first(*WEIGHTS)
    for name, field, kinds in ((weights, "weights", "f"), ("kept" if "kept" in members else None, "kept", "b")):
        if name is not None:
            header = members.header(name)
            if header.dtype.kind not in kinds or header.dtype.itemsize > 8 or header.shape != ids.shape:
                what = "floating-point" if kinds == "f" else "bool"
                found = f"{list(header.shape)} {header.dtype}"
                raise TraceError(f"{name} is {found}; it is {what}, and {list(ids.shape)} as expert_ids")
            dtypes[field] = header.dtype.newbyteorder("=")
    sequences = members.first(*SEQUENCES)
    if sequences is not None:
        members.integers(sequences)
        dtypes["sequence_ids"] = np.int32
    dtypes |= {name: dtype for name, dtype in _PER_TOKEN.items() if name in members}
    said = _spec(members)
    known = spec or said
    tokens = {name: members.integers(name).shape[0] for name in _COUNT_TOKENS if name in members}
    starts = _starts(members) if sequences == "seq_starts" else None
    axes = find_axes(ids.shape, tokens, starts, known.num_layers if known else 0)
    provenance = members.text("provenance") if "provenance" in members else {}
    if not isinstance(provenance, dict):
        raise TraceError(f"provenance is a JSON {type(provenance).__name__}; it is an object")
    layout = Layout(
        axes.num_layers, axes.num_tokens, axes.top_k, dtypes,
        spec=said, provenance=provenance, inferred={"axes": axes.inferred} if axes.inferred else {},
    )  # fmt: skip
    return NpzSource(members, axes, layout, weights, sequences)


def _spec(members: ZipMembers) -> MoESpec | None:
    if "spec" not in members:
        return None
    value = members.text("spec")
    if not isinstance(value, dict):
        raise TraceError(f"spec is a JSON {type(value).__name__}; it is an object")
    try:
        return MoESpec.from_json(value)
    except ConfigError as error:
        raise TraceError(str(error)) from error


def _starts(members: ZipMembers) -> NDArray[Any]:
    """The offsets as stored; there are at most as many as tokens, and each is held once."""
    size = members.integers("seq_starts").shape[0]
    if size == 0:
        raise TraceError("seq_starts is empty; it holds the offset of each sequence's start")
    (starts,) = members.pieces("seq_starts", [size])
    return starts
