"""Which expert of a pair is needed more, by leaving each out in turn: exact and slow.

Source: CRISP section 3.3.2 (offline ablation); here on a budget of pairs, the most frequent warm and cold ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from coterie.calibration.dominance import anchor_pairs
from coterie.calibration.text_windows import TextWindow, window_loss
from coterie.models.intercept import intercept
from coterie.pruning.tiers import COLD, WARM, tiers

if TYPE_CHECKING:
    from torch import Tensor

MAX_WINDOWS = 8  # a pair is ablated in the windows that use it most, at most so many

Pair = tuple[int, int, int]  # layer, one expert, the other


def choose_pairs(pairs_LEE: NDArray[np.int64], budget: int) -> list[Pair]:
    """The most frequent warm and cold pairs, layers and tiers taking turns.

    Args:
        pairs_LEE: [L, E, E] uses.
        budget: pairs, over all layers.
    """
    lists = []
    for layer, (counts_EE, tier_EE) in enumerate(zip(pairs_LEE, tiers(pairs_LEE), strict=True)):
        rows, columns = np.triu_indices(len(counts_EE), 1)
        uses, tier = counts_EE[rows, columns], tier_EE[rows, columns]
        falling = np.argsort(-uses, kind="stable")
        lists += [
            [(layer, int(rows[at]), int(columns[at])) for at in falling if tier[at] == wanted and uses[at] > 0]
            for wanted in (WARM, COLD)
        ]
    turns = range(max(map(len, lists), default=0))
    return [each[turn] for turn in turns for each in lists if turn < len(each)][:budget]


class Ablation:
    """The losses of a text as it is, and with an expert left out of one pair's tokens.

    Args:
        model: a Transformers model in eval mode.
        windows: the text.
        pairs: the pairs that `measure` will be asked for.
        told: called with the windows done and their number while the text is run as it is.
    """

    def __init__(
        self, model: Any, windows: Sequence[TextWindow], pairs: Sequence[Pair], told: Callable[[int, int], None]
    ) -> None:
        self._model, self._windows = model, windows
        self._losses = np.zeros(len(windows))
        self._uses = {pair: np.zeros(len(windows), np.int64) for pair in pairs}
        self._at = 0
        with intercept(model, self._count):
            for self._at, window in enumerate(windows):
                self._losses[self._at] = self._loss(window)
                told(self._at + 1, len(windows))

    def measure(self, pair: Pair) -> tuple[float, float]:
        """How much the loss rises, in nats a use, without the pair's first and without its second expert.

        The weight of the one left out becomes zero in the tokens that use the pair; nothing is renormalised. NaN where
        the text does not use the pair.
        """
        uses = self._uses[pair]
        most = np.argsort(-uses, kind="stable")[:MAX_WINDOWS]
        chosen = np.sort(most[uses[most] > 0])
        if not chosen.size:
            return float("nan"), float("nan")
        rises = []
        for masked in pair[1:]:
            with intercept(self._model, _without(masked, pair)):
                losses = np.array([self._loss(self._windows[at]) for at in chosen])
            rises.append(float((losses - self._losses[chosen]).sum() / uses[chosen].sum()))
        return rises[0], rises[1]

    def _count(self, layer: int, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None:
        for pair, uses in self._uses.items():
            if pair[0] == layer:
                uses[self._at] = _uses_pair(ids_TK, weights_TK, *pair[1:]).sum()

    def _loss(self, window: TextWindow) -> float:
        import torch

        with torch.inference_mode():
            return float(window_loss(self._model, window))


def _without(masked: int, pair: Pair) -> Callable[..., tuple[Tensor, Tensor] | None]:
    """Decisions with one expert's weight zero where a token uses the pair."""

    def decide(layer: int, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor] | None:
        if layer != pair[0]:
            return None
        used_T = ids_TK.new_tensor(_uses_pair(ids_TK, weights_TK, *pair[1:])).bool()
        return ids_TK, weights_TK.masked_fill(used_T[:, None] & (ids_TK == masked), 0.0)

    return decide


def _uses_pair(ids_TK: Tensor, weights_TK: Tensor, first: int, second: int) -> NDArray[np.bool_]:
    """[T] whether a token's highest-weighted expert is one of the pair and another of its experts the other."""
    ids = ids_TK.cpu().numpy()
    _, ordered = anchor_pairs(ids, weights_TK.detach().float().cpu().numpy())
    anchor, others = ordered[:, 0], ordered[:, 1:]
    with_first = (anchor == first) & (others == second).any(axis=1)
    return np.asarray(with_first | ((anchor == second) & (others == first).any(axis=1)))
