"""A routing trace of what the engine serves, with weights; the decisions wait on the device until the step has run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.spec import MoESpec
from coterie.trace.growing import GrowingTrace


@dataclass(frozen=True)
class RequestRows:
    """A request's part of a step, in the order of the step's rows.

    Attributes:
        request: its name.
        start: position of the first of its tokens.
        count: how many.
        prompt: tokens of its prompt.
    """

    request: str
    start: int
    count: int
    prompt: int


class StepRecorder:
    """Copies every layer's decisions of a step, and appends them to a trace when the step has run.

    Sequences are numbered as they come. A token that is computed again (after preemption) is not recorded again; one
    that the engine finds in its prefix cache is not computed, so not recorded.

    Attributes:
        num_tokens: tokens recorded so far.
        full: whether the limit is reached.
    """

    def __init__(
        self, path: Path, spec: MoESpec, limit: int, max_tokens: int, provenance: Mapping[str, Any],
        pruned: bool, device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        self.path, self.num_tokens = path, 0
        self._limit, self._provenance = limit, provenance
        shape = (spec.num_layers, max_tokens, spec.top_k)
        self._ids_LTK = torch.zeros(shape, dtype=torch.int32, device=device)
        self._weight_LTK = torch.zeros(shape, dtype=torch.float32, device=device)
        self._growing = GrowingTrace(spec, path.parent, zero_is_dropped=pruned)
        self._sequences: dict[str, tuple[int, int]] = {}  # number, and the next position, of requests under way
        self._num_sequences = 0
        self._step = 0
        self._saved = 0  # tokens in the file

    @property
    def full(self) -> bool:
        """Whether the limit is reached."""
        return self.num_tokens >= self._limit

    def put(self, layer: int, weight_TK: Tensor, ids_TK: Tensor) -> None:
        """Copy a layer's decisions; graph safe."""
        rows = min(len(ids_TK), self._ids_LTK.shape[1])
        self._ids_LTK[layer, :rows].copy_(ids_TK[:rows])
        self._weight_LTK[layer, :rows].copy_(weight_TK[:rows])

    def end_step(self, requests: Sequence[RequestRows], finished: Sequence[str] = ()) -> None:
        """The step has run: append its tokens. Waits for the device.

        Args:
            requests: whose tokens its rows are.
            finished: requests that have ended before the step.

        Raises:
            ConfigError: when the disk is full.
            TraceError: for an impossible decision.
        """
        for name in finished:
            self._sequences.pop(name, None)
        parts = [self._columns(rows) for rows in requests]
        self._step += 1
        if self.full or not parts:
            return
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        keep_T = columns.pop("new")
        keep_T &= np.cumsum(keep_T) <= self._limit - self.num_tokens
        self._growing.append(self._layers(keep_T), {name: values[keep_T] for name, values in columns.items()})
        self.num_tokens = self._growing.num_tokens

    def save(self) -> None:
        """Write what was recorded so far, whole or not at all; nothing when nothing is new.

        Raises:
            ConfigError: when it cannot be written.
        """
        if self.num_tokens > self._saved:
            self._growing.save(self.path, {**self._provenance, "tokens": self.num_tokens})
            self._saved = self.num_tokens

    def close(self) -> None:
        """Give the scratch file back."""
        self._growing.close()

    def _columns(self, rows: RequestRows) -> dict[str, NDArray[Any]]:
        """Of each of a request's rows; "new": whether the token is computed for the first time."""
        number, seen = self._sequences.get(rows.request, (self._num_sequences, 0))
        self._num_sequences = max(self._num_sequences, number + 1)
        position_R = np.arange(rows.start, rows.start + rows.count)
        self._sequences[rows.request] = number, max(seen, rows.start + rows.count)
        return {
            "new": position_R >= seen,
            "sequence_ids": np.full(rows.count, number),
            "positions": position_R,
            "phase": (position_R >= rows.prompt).astype(np.uint8),
            "step": np.full(rows.count, self._step),
        }

    def _layers(self, keep_T: NDArray[np.bool_]) -> Iterator[tuple[NDArray[np.int32], NDArray[np.float32]]]:
        for ids_TK, weight_TK in zip(self._ids_LTK, self._weight_LTK, strict=True):
            yield tuple(values[: len(keep_T)].cpu().numpy()[keep_T] for values in (ids_TK, weight_TK))
