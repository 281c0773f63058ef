"""How wide each chosen expert of each token runs, by every policy: plain NumPy, and what the torch form is held to.

A policy sees a layer's decisions and looks into a plan's small tables. All arithmetic on routing weights is float32,
one operation after the other, so that `ops/widths.py` gives the same widths bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coterie.pruning.width_plan import WidthPlan
from coterie.pruning.width_tables import is_priced, least_anchor_width

Widths = NDArray[Any]


def widths(plan: WidthPlan, layer: int, ids_TK: ArrayLike, weights_TK: ArrayLike) -> Widths:
    """The width of every chosen expert of a layer's tokens.

    Policies, with w a token's routing weights divided by their sum:

    - `value`: neuron i of expert e runs iff w_e v_{e,i} >= threshold, or threshold x the price of the combination's
      tier; where an expert is in several combinations (the anchor of K > 2), the lowest price counts.
    - `crisp`, `symmetric`: what the pair's tier and the expert's role in it say. For K > 2 a token is read as its
      anchor pairs; an expert gets the largest width that any of them gives it, and the anchor is never dropped: if
      all of them say 0, it runs as the auxiliary of the coldest tier that runs one at all.
    - `uniform`: one width.
    - `by-weight`: I x min(1, w / (threshold x the token's largest w)) ^ gamma.
    - `drop`: 0 for dropped experts, also where a token has no other: they are not there. Weights stay as they are.
    - `skip`: 0 where w < F / K, as skip-on-miss does when every expert misses.

    Widths are rounded up to multiples of the plan's step, and at most I.

    Source: CRISP §3.3 (`crisp`), A.5 (`symmetric`), baselines of §5; `value` and `by-weight` go beyond the paper.

    Args:
        plan: a plan.
        layer: MoE layer.
        ids_TK: [T, K] chosen experts, distinct within a token.
        weights_TK: [T, K] their routing weights, not negative, normalised or not.

    Returns:
        [T, K] int64, neurons, within [0, I].
    """
    ids = np.asarray(ids_TK, dtype=np.int64)
    weights = np.asarray(weights_TK, dtype=np.float32)
    return np.minimum(_BY_POLICY[plan.policy](plan, layer, ids, weights), plan.width)


def widest(plan: WidthPlan) -> int:
    """The widest that a plan runs any expert, whatever the decisions: neurons, within [0, I].

    Args:
        plan: a plan.
    """
    tables, most = plan.tables, plan.width
    if plan.policy in ("crisp", "symmetric"):
        most = int(tables["width_CR"].max())  # the least of an anchor is one of them
    elif plan.policy == "uniform":
        most = int(tables["width"])
    elif plan.policy == "drop":
        most = int(tables["width_LE"].max())
    elif plan.policy == "value":  # with all of a token's weight
        lowest = tables["price_C"].min() if is_priced(plan) else np.float32(1)
        most = int((tables["value_LES"] >= tables["threshold"] * lowest).sum(-1).max()) * int(tables["step"])
    elif plan.policy == "by-weight":
        most = int((tables["cut_S"] < 1).sum()) * int(tables["step"])
    return min(most, plan.width)


def normalised(weights_TK: NDArray[np.float32]) -> NDArray[np.float32]:
    """Weights divided by their token's sum, added in the order of slots; equal shares where all are zero."""
    total_T = weights_TK[:, 0].copy()
    for slot in range(1, weights_TK.shape[1]):
        total_T += weights_TK[:, slot]
    empty_T = total_T == 0
    share_TK = weights_TK / np.where(empty_T, np.float32(1), total_T)[:, None]
    return np.where(empty_T[:, None], np.float32(1 / weights_TK.shape[1]), share_TK)


def _value(plan: WidthPlan, layer: int, ids_TK: Widths, weights_TK: NDArray[np.float32]) -> Widths:
    threshold = plan.tables["threshold"]
    worth_TKS = normalised(weights_TK)[:, :, None] * plan.tables["value_LES"][layer, ids_TK]
    if not is_priced(plan):
        return _neurons(plan, worth_TKS >= threshold)
    anchor_T1, is_anchor_TK = _anchors(ids_TK, weights_TK)
    price_TK = plan.tables["price_C"][plan.tables["code_LEE"][layer][anchor_T1, ids_TK] >> 1]
    lowest_T1 = np.where(is_anchor_TK, np.float32(np.inf), price_TK).min(1, keepdims=True)
    bound_TK = threshold * np.where(is_anchor_TK, lowest_T1, price_TK)
    return _neurons(plan, worth_TKS >= bound_TK[:, :, None])


def _crisp(plan: WidthPlan, layer: int, ids_TK: Widths, weights_TK: NDArray[np.float32]) -> Widths:
    anchor_T1, is_anchor_TK = _anchors(ids_TK, weights_TK)
    code_TK = plan.tables["code_LEE"][layer][anchor_T1, ids_TK]
    tier_TK, higher_dominates_TK = code_TK >> 1, (code_TK & 1).astype(np.bool_)
    width_CR = plan.tables["width_CR"].astype(np.int64)
    own_TK = width_CR[tier_TK, ((ids_TK > anchor_T1) != higher_dominates_TK).astype(np.int64)]
    anchors_TK = width_CR[tier_TK, ((anchor_T1 > ids_TK) != higher_dominates_TK).astype(np.int64)]
    anchor_width_T1 = np.where(is_anchor_TK, 0, anchors_TK).max(1, keepdims=True)
    if ids_TK.shape[1] > 2:
        anchor_width_T1 = np.where(anchor_width_T1 > 0, anchor_width_T1, least_anchor_width(plan))
    width_TK: Widths = np.where(is_anchor_TK, anchor_width_T1, own_TK)
    return width_TK


def _uniform(plan: WidthPlan, layer: int, ids_TK: Widths, weights_TK: NDArray[np.float32]) -> Widths:
    return np.full(ids_TK.shape, int(plan.tables["width"]), dtype=np.int64)


def _by_weight(plan: WidthPlan, layer: int, ids_TK: Widths, weights_TK: NDArray[np.float32]) -> Widths:
    largest_T1 = weights_TK.max(1, keepdims=True)
    relative_TK = np.where(largest_T1 > 0, weights_TK / np.where(largest_T1 > 0, largest_T1, 1), np.float32(1))
    return _neurons(plan, relative_TK[:, :, None] > plan.tables["cut_S"])


def _drop(plan: WidthPlan, layer: int, ids_TK: Widths, weights_TK: NDArray[np.float32]) -> Widths:
    width_TK: Widths = plan.tables["width_LE"][layer][ids_TK].astype(np.int64)
    return width_TK


def _skip(plan: WidthPlan, layer: int, ids_TK: Widths, weights_TK: NDArray[np.float32]) -> Widths:
    runs_TK = normalised(weights_TK) * np.float32(ids_TK.shape[1]) >= plan.tables["threshold"]
    return np.where(runs_TK, plan.width, 0)


def _neurons(plan: WidthPlan, runs_TKS: NDArray[np.bool_]) -> Widths:
    """Neurons of the steps that run."""
    steps_TK: Widths = runs_TKS.sum(2)
    return steps_TK * int(plan.tables["step"])


def _anchors(ids_TK: Widths, weights_TK: NDArray[Any]) -> tuple[Widths, NDArray[np.bool_]]:
    """The token's expert of highest weight (of equal ones the first), [T, 1], and where it stands, [T, K]."""
    slot_T1 = weights_TK.argmax(1)[:, None]
    return np.take_along_axis(ids_TK, slot_T1, 1), np.arange(ids_TK.shape[1]) == slot_T1


_BY_POLICY: dict[str, Callable[[WidthPlan, int, Widths, NDArray[np.float32]], Widths]] = {
    "value": _value,
    "crisp": _crisp,
    "symmetric": _crisp,
    "uniform": _uniform,
    "by-weight": _by_weight,
    "drop": _drop,
    "skip": _skip,
}
