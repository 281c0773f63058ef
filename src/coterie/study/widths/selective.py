"""Widths by any rule, and experts left out of some tokens, as changes that a bench can measure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from coterie.evaluate.change import Change, changed
from coterie.evaluate.logits import evaluating, negative_log_likelihoods, require_numbers, scored_logits
from coterie.evaluate.windows import Window
from coterie.models.intercept import intercept
from coterie.models.widths import Widths, apply_widths

if TYPE_CHECKING:
    from torch import Tensor

    from coterie.study.measure import Bench


def by_rule(name: str, rule: Widths) -> Change:
    """Experts as wide as a rule says, of neurons in the order in which they are (see `models.reorder.reordered`)."""

    @contextmanager
    def apply(model: Any, sequences: Sequence[int] | None) -> Iterator[None]:
        with apply_widths(model, rule, count=False):
            yield

    return Change(name, apply)


def half_width_where(member_LEE: NDArray[np.bool_], width: int, layers: Collection[int]) -> Widths:
    """Half the neurons for both experts of the combinations that are members, in some layers; else all neurons.

    Where a token has several combinations (top-k above 2), its anchor, which is in all of them, loses half of its
    neurons times the share of them that are members: a use costs the same wherever it stands.

    Args:
        member_LEE: [L, E, E] symmetric.
        width: I.
        layers: which layers to narrow.
    """
    import torch

    tables = {layer: torch.tensor(member_LEE[layer] & ~np.eye(member_LEE.shape[1], dtype=np.bool_)) for layer in layers}

    def rule(layer: int, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        full_TK = torch.full_like(ids_TK, width, dtype=torch.int64)
        if layer not in tables:
            return full_TK
        slot_T1, member_TK = _members(tables[layer], ids_TK, weights_TK)
        cut_TK = member_TK.long() * (width // 2)
        anchors_T1 = cut_TK.sum(1, keepdim=True) // (ids_TK.shape[1] - 1)
        return full_TK - cut_TK.scatter(1, slot_T1, anchors_T1)

    return rule


def leave_out(layer: int, masked: int, company: int) -> Change:
    """One expert's weight is zero in the tokens that use it with another; nothing is renormalised.

    Source: CRISP §2.2.
    """
    import torch

    def decide(at: int, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor] | None:
        if at != layer:
            return None
        anchor_T = ids_TK.gather(1, weights_TK.argmax(1, keepdim=True))[:, 0]
        one_T = (anchor_T == masked) & (ids_TK == company).any(1)
        other_T = (anchor_T == company) & (ids_TK == masked).any(1)
        gone_TK = (one_T | other_T)[:, None] & (ids_TK == masked)
        return ids_TK, torch.where(gone_TK, torch.zeros_like(weights_TK), weights_TK)

    @contextmanager
    def apply(model: Any, sequences: Sequence[int] | None) -> Iterator[None]:
        with intercept(model, decide):
            yield

    return Change(f"without expert {masked} in company of {company}, layer {layer}", apply)


def rise_in(bench: Bench, change: Change, rows: NDArray[np.integer[Any]]) -> float:
    """How much a change raises the summed loss of some of a bench's windows, nats."""
    num_rows, length = len(rows), bench.ids_WN.shape[1]
    ids_WN = bench.ids_WN[rows]
    windows = [Window(row * length, (row + 1) * length, row * length + 1) for row in range(num_rows)]
    with evaluating(bench.model), changed(bench.model, [change]):
        logits_RV = scored_logits(bench.model, ids_WN.reshape(-1), windows)
    nll_R = negative_log_likelihoods(logits_RV, ids_WN[:, 1:].reshape(-1))
    require_numbers(nll_R, f"the model {change.name}", "the study's text", windows)
    return float(nll_R.sum()) - float(bench.base_WS[rows].sum())


def _members(table_EE: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Where the anchor stands, [T, 1], and which slots make a member combination with it, [T, K]."""
    slot_T1 = weights_TK.argmax(1, keepdim=True)
    anchor_T1 = ids_TK.gather(1, slot_T1).long()
    table = table_EE.to(ids_TK.device)
    return slot_T1, table[anchor_T1, ids_TK.long()]
