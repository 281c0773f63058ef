"""A trace whose length nobody knows yet: chunks of tokens in a scratch file, from which the trace file is streamed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError
from coterie.spec import MoESpec
from coterie.trace.check import check_ids, check_weights
from coterie.trace.importers.base import id_dtype
from coterie.trace.routing_trace import RoutingTrace
from coterie.trace.storage import describe, writing

COLUMNS: dict[str, Any] = {"sequence_ids": np.int32, "positions": np.int32, "phase": np.uint8, "step": np.int32}
"""What a token has once, and how it is stored."""


class GrowingTrace:
    """Takes chunks of tokens, each with the decisions of every layer, and writes the trace that they make.

    Memory holds one layer of a chunk at a time. The scratch file has no name: it vanishes with the process, whatever
    happens to it.

    Args:
        spec: the model's shape.
        folder: where the scratch file is made; None: the system's temporary folder.
        zero_is_dropped: whether a weight of zero means that pruning dropped the expert.

    Attributes:
        num_tokens: tokens appended so far.
        weight_ordered: whether every token's weights so far fall from slot to slot.

    Raises:
        ConfigError: when the scratch file cannot be made.
    """

    def __init__(self, spec: MoESpec, folder: Path | None = None, zero_is_dropped: bool = False) -> None:
        self.num_tokens = 0
        self.weight_ordered = True
        self._spec, self._folder, self._zero_is_dropped = spec, folder, zero_is_dropped
        self._chunks: list[int] = []
        try:
            self._file = tempfile.TemporaryFile(dir=folder, prefix=".coterie-")  # noqa: SIM115 - `close` closes it
        except OSError as error:
            raise self._cannot_write(error) from error

    def append(
        self, layers: Iterable[tuple[NDArray[Any], NDArray[np.float32]]], columns: Mapping[str, NDArray[Any]]
    ) -> None:
        """Add a chunk; after an error the chunk is not there.

        Args:
            layers: for each layer in turn ids [R, K], any integer dtype, and weights [R, K].
            columns: [R] each, named as in `COLUMNS`.

        Raises:
            TraceError: for an impossible decision (the token is named by its place in the trace).
            ConfigError: when the disk is full.
        """
        count = len(columns["step"])
        if count == 0:
            return
        ordered = self.weight_ordered
        end = self._file.seek(0, 2)
        try:
            for layer, (ids, weights) in enumerate(layers):
                kept = weights != 0 if self._zero_is_dropped else None
                check_ids(ids, kept, self._spec.num_experts, layer, self.num_tokens)
                check_weights(weights, kept, layer, self.num_tokens)
                ordered = ordered and not (weights[:, 1:] > weights[:, :-1]).any()
                ids.astype(id_dtype(self._spec.num_experts)).tofile(self._file)
                weights.astype(np.float32, copy=False).tofile(self._file)
            for name, dtype in COLUMNS.items():
                columns[name].astype(dtype, copy=False).tofile(self._file)
        except BaseException as error:
            self._file.seek(end)
            self._file.truncate()
            if isinstance(error, OSError):
                raise self._cannot_write(error) from error
            raise
        self.weight_ordered = bool(ordered)
        self._chunks.append(count)
        self.num_tokens += count

    def save(self, path: Path, provenance: Mapping[str, Any]) -> None:
        """Write the trace so far, whole or not at all; more may be appended after it.

        Raises:
            TraceError: when there are no tokens.
            ConfigError: when the file cannot be written.
        """
        arrays = self._arrays()
        empty: dict[str, Any] = {
            name: np.broadcast_to(np.zeros((), dtype), shape) for name, (dtype, shape) in arrays.items()
        }
        outline = RoutingTrace(spec=self._spec, weight_ordered=self.weight_ordered, provenance=provenance, **empty)
        with writing(path, arrays, describe(outline)) as target:
            for tokens, name, layer, values in self._read():
                where = tokens if layer is None else (layer, tokens)
                target[name][where] = values
                if name == "weights" and self._zero_is_dropped:
                    target["kept"][where] = values != 0

    def close(self) -> None:
        """Give the scratch file back."""
        self._file.close()

    def _arrays(self) -> dict[str, tuple[Any, tuple[int, ...]]]:
        """Dtype and shape of every array of the trace."""
        decisions = (self._spec.num_layers, self.num_tokens, self._spec.top_k)
        kept = {"kept": (np.bool_, decisions)} if self._zero_is_dropped else {}
        return {
            "expert_ids": (id_dtype(self._spec.num_experts), decisions),
            "weights": (np.float32, decisions),
            **kept,
            **{name: (dtype, decisions[1:2]) for name, dtype in COLUMNS.items()},
        }

    def _read(self) -> Iterator[tuple[slice, str, int | None, NDArray[Any]]]:
        """The scratch file, an array at a time: its tokens, its name, its layer, its values."""
        id_type, top_k, start = id_dtype(self._spec.num_experts), self._spec.top_k, 0
        self._file.seek(0)
        for count in self._chunks:
            tokens, start = slice(start, start + count), start + count
            for layer in range(self._spec.num_layers):
                for name, dtype in (("expert_ids", id_type), ("weights", np.float32)):
                    values: NDArray[Any] = np.fromfile(self._file, dtype, count * top_k)
                    yield tokens, name, layer, values.reshape(count, top_k)
            for name, dtype in COLUMNS.items():
                yield tokens, name, None, np.fromfile(self._file, dtype, count)

    def _cannot_write(self, error: OSError) -> ConfigError:
        where = self._folder or f"{tempfile.gettempdir()} (TMPDIR)"
        return ConfigError(
            f"cannot keep the recording in {where}: {error.strerror or error}; it needs a writable folder with space"
        )
