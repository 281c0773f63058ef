"""What an importer is: it recognises a source, describes it, then fills memory-mapped arrays piece by piece."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from coterie.errors import TraceError
from coterie.progress import Progress
from coterie.spec import MoESpec

MAX_EXPERTS = 2**16
"""A trace stores ids as uint16 at most."""
MAX_LAYERS = 4096
PIECE_BYTES = 2**24
"""How much of a source is held at once."""


@dataclass(frozen=True)
class Layout:
    """What a source holds, known before its decisions are read.

    Attributes:
        num_layers: MoE layers, L.
        num_tokens: tokens, T, warm-up and padding included.
        top_k: experts a token, K.
        dtypes: the dtype of each trace array that the source fills; "expert_ids" is always one of them.
        spec: the model's shape, where the source says it.
        num_experts: experts in a layer, where the source says only that; 0: it does not.
        layer_ids: for each MoE layer its index among all layers, where the source says it.
        num_model_layers: all layers, dense ones included, where the source says it; 0: it does not.
        provenance: what the source says of its origin.
        inferred: what was concluded rather than read, and from what.
        dropped: rows left out already, by reason.
    """

    num_layers: int
    num_tokens: int
    top_k: int
    dtypes: Mapping[str, Any]
    spec: MoESpec | None = None
    num_experts: int = 0
    layer_ids: tuple[int, ...] = ()
    num_model_layers: int = 0
    provenance: Mapping[str, Any] = field(default_factory=dict)
    inferred: Mapping[str, str] = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if min(self.num_layers, self.num_tokens, self.top_k) < 1:
            shape = f"{self.num_layers} layers, {self.num_tokens} tokens, top-{self.top_k}"
            raise TraceError(f"it holds {shape}; record at least one token")

    def arrays(self) -> dict[str, tuple[Any, tuple[int, ...]]]:
        """Dtype and shape of every array to fill: [L, T, K] for decisions, [T] for what a token has once."""
        decisions = (self.num_layers, self.num_tokens, self.top_k)
        per_decision = ("expert_ids", "weights", "kept")
        return {
            name: (dtype, decisions if name in per_decision else decisions[1:2]) for name, dtype in self.dtypes.items()
        }


class Source(Protocol):
    """An open source."""

    @property
    def layout(self) -> Layout:
        """What it holds."""

    def fill(self, target: Mapping[str, NDArray[Any]], progress: Progress) -> None:
        """Write every array of `layout.arrays()`, holding a bounded piece at a time.

        Raises:
            TraceError: for a value that no trace can hold.
        """


class Importer(Protocol):
    """A format that traces come in."""

    name: str

    def sniff(self, path: Path) -> bool:
        """Whether the file or folder is of this format, by its content; reads little and raises nothing."""

    def open(self, path: Path, spec: MoESpec | None) -> AbstractContextManager[Source]:
        """Read as much of the source as its layout takes.

        Args:
            path: a file or folder that exists.
            spec: the model's shape, where the caller knows it: it settles what the source leaves open.

        Raises:
            TraceError: when the source is damaged, hostile or of another format.
            BackendUnavailable: when reading it takes a package that is not there.
        """


def id_dtype(num_experts: int) -> type[np.uint8] | type[np.uint16]:
    """The narrowest dtype that holds the ids 0 .. num_experts-1."""
    return np.uint8 if num_experts <= 2**8 else np.uint16


def check_range(ids_LTK: NDArray[Any], limit: int, first_layer: int, first_token: int) -> None:
    """Raise for an id outside 0 .. limit-1, before a narrower dtype could wrap it into a valid one.

    Args:
        ids_LTK: a piece of a trace, any integer dtype.
        limit: ids must be below it.
        first_layer: MoE layer of the piece's first row, for the message.
        first_token: token of the piece's first row, for the message.
    """
    if ids_LTK.size == 0 or (int(ids_LTK.min()) >= 0 and int(ids_LTK.max()) < limit):
        return
    layer, token, slot = np.argwhere((ids_LTK < 0) | (ids_LTK >= limit))[0]
    raise TraceError(
        f"expert id {int(ids_LTK[layer, token, slot])} in layer {first_layer + layer}, token {first_token + token}; "
        f"ids run from 0 to {limit - 1}: mark unused slots in `kept`, and import logical ids, not physical ones"
    )
