"""Which combinations the unchanged model uses at every scored position of a bench's windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.calibration.dominance import anchor_pairs
from coterie.models.intercept import intercept
from coterie.models.layers import spec_of
from coterie.progress import Progress, silent


@dataclass(frozen=True, eq=False)
class Uses:
    """Routing of the unchanged model. A use is a token's highest-weighted expert with another one that it chose.

    Attributes:
        ids_LWSK: [L, W, S, K] uint16, chosen experts by falling weight, at the S positions of W windows whose next
            token is scored.
        weights_LWSK: [L, W, S, K] float32, their weights, normalised over K.
        num_experts: E.
    """

    ids_LWSK: NDArray[np.uint16]
    weights_LWSK: NDArray[np.float32]
    num_experts: int

    def look_up(self, table_LEE: NDArray[Any]) -> NDArray[Any]:
        """A table's entry for every use, [L, W, S, K-1]; the row is the anchor's, the column the other expert's."""
        ids = self.ids_LWSK.astype(np.int64)
        layers = np.arange(len(ids))[:, None, None, None]
        found: NDArray[Any] = table_LEE[layers, ids[..., :1], ids[..., 1:]]
        return found

    def counts(self) -> NDArray[np.int64]:
        """Uses of every combination in every window, [W, L, E, E], symmetric."""
        layers, windows = self.ids_LWSK.shape[:2]
        size = self.num_experts**2
        counts_WLEE = np.zeros((windows, layers, self.num_experts, self.num_experts), np.int64)
        for layer, ids_WSK in enumerate(self.ids_LWSK.astype(np.int64)):
            index_WSP = ids_WSK[..., :1] * self.num_experts + ids_WSK[..., 1:]
            for window, index in enumerate(index_WSP):
                flat = np.bincount(index.reshape(-1), minlength=size)
                counts_WLEE[window, layer] = flat.reshape(self.num_experts, self.num_experts)
        return counts_WLEE + counts_WLEE.transpose(0, 1, 3, 2)


def class_sums(member_LWSP: NDArray[np.bool_], value_WS: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of the uses that are members: the sum of their token's value, and their number, for every layer and window.

    Args:
        member_LWSP: [L, W, S, K-1].
        value_WS: [W, S] of every token.

    Returns:
        [L, W, 2] float64.
    """
    count_LWS = member_LWSP.sum(3)
    return np.stack([(count_LWS * value_WS).sum(2), count_LWS.sum(2).astype(np.float64)], axis=2)


def record_uses(model: Any, ids_WN: Any, batch: int = 8, progress: Progress = silent) -> Uses:
    """Run the unchanged model over windows and keep what its routers chose.

    Args:
        model: a Transformers model in eval mode.
        ids_WN: [W, N] token ids, windows of a `Bench`; the last position predicts no scored token and is left out.
        batch: windows to run at once.
        progress: told of every batch.
    """
    import torch

    spec = spec_of(model)
    num_windows, length = ids_WN.shape
    shape = (spec.num_layers, num_windows, length - 1, spec.top_k)
    ids_LWSK, weights_LWSK = np.zeros(shape, np.uint16), np.zeros(shape, np.float32)
    rows = slice(0, 0)

    def keep(layer: int, hidden_TH: Any, ids_TK: Any, weights_TK: Any) -> None:
        weights = weights_TK.detach().float().cpu().numpy()
        order_TK, ids = anchor_pairs(ids_TK.cpu().numpy(), weights)
        weights = np.take_along_axis(weights, order_TK, axis=1)
        weights /= np.maximum(weights.sum(1, keepdims=True), 1e-20)
        window_shape = (rows.stop - rows.start, length, spec.top_k)
        ids_LWSK[layer, rows] = ids.reshape(window_shape)[:, :-1]
        weights_LWSK[layer, rows] = weights.reshape(window_shape)[:, :-1]

    with intercept(model, keep), torch.inference_mode():
        for start in range(0, num_windows, batch):
            rows = slice(start, min(start + batch, num_windows))
            model.get_decoder()(input_ids=ids_WN[rows].to(model.device), use_cache=False)
            progress("the unchanged model's routing", rows.stop, num_windows)
    return Uses(ids_LWSK, weights_LWSK, spec.num_experts)
