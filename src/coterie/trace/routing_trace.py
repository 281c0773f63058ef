"""What was routed where: the one structure everything else reads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from coterie.errors import TraceError
from coterie.spec import MoESpec

SCHEMA_VERSION = 1
TOKEN_FIELDS = ("sequence_ids", "positions", "phase", "step", "home_ids")
PREFILL, DECODE = 0, 1

TokenSelector = slice | NDArray[np.int64]
"""Which tokens: a slice, or increasing indices."""
ALL_TOKENS = slice(None)


@dataclass(frozen=True)
class LayerRouting:
    """The routing of one MoE layer, in memory.

    Attributes:
        expert_ids_TK: [T, K] uint8 or uint16, logical experts.
        weights_TK: [T, K] float, routing weights as the router gave them, or None.
        kept_TK: [T, K] bool, false where pruned or where a token chose fewer than K, or None: all kept.
    """

    expert_ids_TK: NDArray[Any]
    weights_TK: NDArray[Any] | None
    kept_TK: NDArray[np.bool_] | None

    def kept(self) -> NDArray[np.bool_]:
        """`kept_TK`, all true when the trace holds none."""
        return self.kept_TK if self.kept_TK is not None else np.ones(self.expert_ids_TK.shape, dtype=np.bool_)


@dataclass(frozen=True)
class RoutingTrace:
    """Routing decisions of a model on real (or, if the provenance says so, synthetic) tokens.

    Arrays may be memory-mapped: read them a layer at a time (`layer`). L MoE layers, T tokens, K experts a token.

    Attributes:
        expert_ids: [L, T, K] uint8 or uint16, logical expert ids.
        spec: the model's shape.
        weights: [L, T, K] float, routing weights, or None.
        kept: [L, T, K] bool, false where pruned; every metric honours it; None: all kept.
        sequence_ids: [T] int, which sequence each token belongs to, or None.
        positions: [T] int, position in the sequence, or None.
        phase: [T] uint8, 0 prefill and 1 decode, or None.
        step: [T] int, the engine's batch, or None.
        home_ids: [T] int, device where the token's attention ran, or None: `sequence_id mod G`.
        weight_ordered: whether each token's experts are ordered by falling weight.
        provenance: where it came from: source, format, what was dropped, versions.
    """

    expert_ids: NDArray[Any]
    spec: MoESpec
    weights: NDArray[Any] | None = None
    kept: NDArray[Any] | None = None
    sequence_ids: NDArray[Any] | None = None
    positions: NDArray[Any] | None = None
    phase: NDArray[Any] | None = None
    step: NDArray[Any] | None = None
    home_ids: NDArray[Any] | None = None
    weight_ordered: bool = False
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ids = self.expert_ids
        if ids.dtype not in (np.uint8, np.uint16):
            raise TraceError(f"expert_ids has dtype {ids.dtype}; a trace stores uint8 or uint16")
        if ids.ndim != 3:
            raise TraceError(f"expert_ids has shape {ids.shape}; a trace stores [layers, tokens, top-k]")
        if 0 in ids.shape:
            raise TraceError(f"the trace is empty: expert_ids has shape {ids.shape}; record at least one token")
        if (ids.shape[0], ids.shape[2]) != (self.spec.num_layers, self.spec.top_k):
            expected = f"{self.spec.num_layers} layers and top-{self.spec.top_k}"
            raise TraceError(f"expert_ids has shape {ids.shape} but the spec says {expected}")
        for name in ("weights", "kept"):
            values = getattr(self, name)
            if values is not None and values.shape != ids.shape:
                raise TraceError(f"{name} has shape {values.shape}, expert_ids {ids.shape}; they must be equal")
        if self.weights is not None and self.weights.dtype.kind != "f":
            raise TraceError(f"weights has dtype {self.weights.dtype}; a trace stores floating-point weights")
        for name in TOKEN_FIELDS:
            values = getattr(self, name)
            if values is not None and values.shape != ids.shape[1:2]:
                raise TraceError(f"{name} has shape {values.shape}; it stores one for each of {ids.shape[1]} tokens")
            if values is not None and values.dtype.kind not in "iu":
                raise TraceError(f"{name} has dtype {values.dtype}; a trace stores integers")

    @property
    def num_layers(self) -> int:
        """MoE layers, L."""
        return int(self.expert_ids.shape[0])

    @property
    def num_tokens(self) -> int:
        """Tokens, T."""
        return int(self.expert_ids.shape[1])

    @property
    def num_sequences(self) -> int:
        """Distinct sequences; 0 when the trace holds none."""
        return 0 if self.sequence_ids is None else int(np.unique(self.sequence_ids).size)

    def layer(self, index: int, tokens: TokenSelector = ALL_TOKENS) -> LayerRouting:
        """The routing of MoE layer `index` for the selected tokens, read into memory."""
        weights = None if self.weights is None else np.asarray(self.weights[index, tokens])
        kept = None if self.kept is None else np.asarray(self.kept[index, tokens]).astype(np.bool_, copy=False)
        return LayerRouting(np.asarray(self.expert_ids[index, tokens]), weights, kept)

    def homes(self, num_devices: int, tokens: TokenSelector = ALL_TOKENS) -> NDArray[np.int64]:
        """The device where each selected token's attention ran, [T] within 0 .. num_devices-1.

        Recorded homes where the trace holds them (they must fit), else `sequence_id mod G`, else `token mod G`.

        Raises:
            TraceError: when a recorded home is no device of this many.
        """
        if self.home_ids is not None:
            homes = np.asarray(self.home_ids[tokens]).astype(np.int64)
            outside = (homes < 0) | (homes >= num_devices)
            if outside.any():
                raise TraceError(
                    f"the trace was recorded with home device {homes[outside][0]}, the topology has {num_devices}; "
                    "use the topology it was recorded on"
                )
            return homes
        if self.sequence_ids is not None:
            return np.asarray(self.sequence_ids[tokens]).astype(np.int64) % num_devices
        return np.arange(self.num_tokens, dtype=np.int64)[tokens] % num_devices

    def require_weights(self, what: str) -> NDArray[Any]:
        """The routing weights, or a clear error naming what needs them.

        Raises:
            TraceError: when the trace holds no weights.
        """
        if self.weights is None:
            raise TraceError(f"{what} needs routing weights and this trace has none; record them (topk_weights)")
        return self.weights

    def with_kept(self, kept: NDArray[np.bool_], provenance: Mapping[str, Any]) -> Self:
        """The same trace with another `kept` [L, T, K]; `provenance` is merged in."""
        return replace(self, kept=kept, provenance={**self.provenance, **provenance})

    def fingerprint(self) -> str:
        """Sixteen hex digits that tell this trace from another: shape, spec, and up to a MiB of the decisions."""
        digest = hashlib.sha256(json.dumps([self.expert_ids.shape, self.spec.to_json()]).encode())
        rows = max(1, min(self.num_tokens, 2**20 // (self.num_layers * self.spec.top_k)))
        stride = max(1, self.num_tokens // rows)
        digest.update(np.ascontiguousarray(self.expert_ids[:, ::stride]).tobytes())
        return digest.hexdigest()[:16]

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, whole or not at all."""
        from coterie.trace.storage import save_trace

        save_trace(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> RoutingTrace:
        """Memory-map a file that `save` wrote, and check every decision in it.

        Raises:
            TraceError: when the file is missing, damaged or no routing trace.
        """
        from coterie.trace.storage import load_trace

        return load_trace(Path(path))
