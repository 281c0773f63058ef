"""How wide a live model's experts run, summed up beside the model without waiting for it."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class WidthStats:
    """Figures of a run with widths; arrays are [L], means over tokens, padding included.

    Attributes:
        num_tokens: tokens that each layer saw.
        share: neurons that a token runs, of those of its K experts: the share of full width, and of expert bytes.
        skipped: share of the K experts that do not run at all.
        expert_bytes: bytes of the neurons that a token runs in a layer.
    """

    num_tokens: int
    share: NDArray[np.float64]
    skipped: NDArray[np.float64]
    expert_bytes: NDArray[np.float64]

    def to_json(self) -> dict[str, Any]:
        """Means over layers, and the per-layer values under "layers"."""
        arrays = {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        means = {name: float(value.mean()) for name, value in arrays.items()}
        layers = {name: value.tolist() for name, value in arrays.items()}
        return {"num_tokens": self.num_tokens, **means, "layers": layers}


class WidthCounter:
    """Sums over tokens, layer by layer, on the layers' devices; read by `stats`."""

    def __init__(self) -> None:
        self._width = self._neuron_bytes = self._top_k = 0
        self._tokens_L: list[int] = []
        self._sums_L: list[Tensor] = []  # [2]: neurons run, experts skipped

    def attach(self, devices: Sequence[Any], width: int, neuron_bytes: int) -> None:
        """Make room for the sums, unless an earlier block did.

        Raises:
            ConfigError: when that block ran a model of another shape.
        """
        if self._sums_L:
            if (len(devices), width) != (len(self._sums_L), self._width):
                raise ConfigError("a counter sums up blocks of one model; take a new one for another model")
            return
        torch = importlib.import_module("torch")
        self._width, self._neuron_bytes = width, neuron_bytes
        self._tokens_L = [0] * len(devices)
        self._sums_L = [torch.zeros(2, dtype=torch.int64, device=device) for device in devices]

    def add(self, layer: int, widths_TK: Tensor) -> None:
        """Count the tokens of one forward call in one layer."""
        torch = importlib.import_module("torch")
        tokens, self._top_k = widths_TK.shape
        self._tokens_L[layer] += tokens
        self._sums_L[layer] += torch.stack([widths_TK.sum(dtype=torch.int64), (widths_TK == 0).sum()])

    def stats(self) -> WidthStats:
        """The means so far; zeros before the first token."""
        tokens = self._tokens_L[0] if self._tokens_L else 0
        sums_LS = np.array([sums.cpu().numpy() for sums in self._sums_L], np.float64).reshape(-1, 2) / max(1, tokens)
        slots = max(1, self._top_k)
        return WidthStats(
            tokens, sums_LS[:, 0] / (slots * max(1, self._width)), sums_LS[:, 1] / slots,
            sums_LS[:, 0] * self._neuron_bytes,
        )  # fmt: skip
