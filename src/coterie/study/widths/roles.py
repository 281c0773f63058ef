"""How the role of one expert varies with its company: Fig. 2 of CRISP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from coterie.study.widths.estimates import estimate, plain, ratio

if TYPE_CHECKING:
    from coterie.profile.model_profile import ModelProfile
    from coterie.report.page import Page
    from coterie.study.widths.context import StudyContext
    from coterie.study.widths.uses import Uses

_LEAST_USES = 8  # below, the mean score of a combination is mostly chance
_MINORITY = 0.1


def run(context: StudyContext) -> dict[str, Any]:
    """How often an expert dominates some of its combinations and helps in others.

    Source: CRISP §1, Fig. 2. Beyond it: how much of the roles one ranking of a layer's experts explains, which needs no
    combinations, and whether roles by routing weight hold on other text.
    """
    profile = context.profile
    method = context.dominance
    wins_LEE = dominates(profile, method)
    uses_LEE = np.where(np.isfinite(wins_LEE), profile.pairs_LEE, 0)
    sums_UX = variation(np.nan_to_num(wins_LEE), uses_LEE)
    layer = int(profile.pairs_LEE.shape[0] // 2)
    found = {
        "method": method,
        "least_uses": _LEAST_USES,
        "experts": len(sums_UX),
        "experts_in_both_roles": estimate(sums_UX, lambda x: x[:, 2] / x[:, 3], context.seed),
        "uses_in_the_rarer_role": estimate(sums_UX, ratio(), context.seed),
        "uses_that_one_ranking_explains": estimate(
            explained(np.nan_to_num(wins_LEE), uses_LEE, _ranking(profile, method)), ratio(), context.seed
        ),
        "roles_by_weight_that_hold_on_other_text": estimate(
            _held(profile, context.uses), ratio(), context.seed
        ),
        "example": {"layer": layer, "dominance": _shares(profile, method, layer)},
    }  # fmt: skip
    shown: dict[str, Any] = plain(found)
    return shown


def dominates(profile: ModelProfile, method: str) -> NDArray[np.float64]:
    """[L, E, E] 1 where the row's expert dominates the column's, 0 where it helps, NaN where it was hardly measured."""
    score_LEE = profile.dominance[method].astype(np.float64)
    margin_LEE = score_LEE - score_LEE.transpose(0, 2, 1)
    told_LEE = np.isfinite(margin_LEE) & (margin_LEE != 0) & (profile.pairs_LEE >= _LEAST_USES)
    return np.where(told_LEE, margin_LEE > 0, np.nan)


def variation(wins_LEE: NDArray[np.float64], uses_LEE: NDArray[Any]) -> NDArray[np.float64]:
    """For every expert in use: its uses in the rarer of its roles, all its uses, whether each role has 10%, and 1.

    Args:
        wins_LEE: [L, E, E] 1 where the row's expert dominates the column's, else 0.
        uses_LEE: [L, E, E] uses of the combinations that were measured.

    Returns:
        [U, 4], of experts with at least two combinations; others can have one role only.
    """
    total_LE, won_LE = uses_LEE.sum(2).astype(np.float64), (wins_LEE * uses_LEE).sum(2)
    rarer_LE = np.minimum(won_LE, total_LE - won_LE)
    both_LE = rarer_LE >= _MINORITY * np.maximum(total_LE, 1)
    kept_LE = (uses_LEE > 0).sum(2) >= 2
    found: NDArray[np.float64] = np.stack([rarer_LE, total_LE, both_LE, np.ones_like(total_LE)], 2)[kept_LE]
    return found


def explained(
    wins_LEE: NDArray[np.float64], uses_LEE: NDArray[Any], rank_LE: NDArray[np.float64]
) -> NDArray[np.float64]:
    """For every expert: uses of its combinations in which the one that scores higher over all its company dominates.

    Returns:
        [U, 2]: these uses, and all, of experts in use.
    """
    agrees_LEE = (rank_LE[:, :, None] > rank_LE[:, None, :]) == (wins_LEE > 0)
    sums = np.stack([(agrees_LEE * uses_LEE).sum(2), uses_LEE.sum(2)], 2).astype(np.float64)
    found: NDArray[np.float64] = sums[sums[:, :, 1] > 0]
    return found


def _ranking(profile: ModelProfile, method: str) -> NDArray[np.float64]:
    """[L, E] every expert's mean score over all its company."""
    score_LEE = np.nan_to_num(profile.dominance[method].astype(np.float64))
    ranking: NDArray[np.float64] = (score_LEE * profile.pairs_LEE).sum(2) / np.maximum(profile.pairs_LEE.sum(2), 1)
    return ranking


def _held(profile: ModelProfile, uses: Uses) -> NDArray[np.float64]:
    """[W, 2] uses, by window, of combinations whose heavier expert is the same on both texts, and of all measured."""
    experts = uses.num_experts
    layers = len(uses.ids_LWSK)
    sums_LEE = np.zeros((layers, experts, experts))
    ids, weights = uses.ids_LWSK.astype(np.int64), uses.weights_LWSK.astype(np.float64)
    for layer in range(layers):
        anchor, other = np.broadcast_arrays(ids[layer, ..., :1], ids[layer, ..., 1:])
        heavy, light = np.broadcast_arrays(weights[layer, ..., :1], weights[layer, ..., 1:])
        np.add.at(sums_LEE[layer], (anchor.ravel(), other.ravel()), heavy.ravel())
        np.add.at(sums_LEE[layer], (other.ravel(), anchor.ravel()), light.ravel())
    counts_WLEE = uses.counts()
    ours, theirs = sums_LEE - sums_LEE.transpose(0, 2, 1), dominates(profile, "weight")
    told_LEE = (ours != 0) & np.isfinite(theirs) & (counts_WLEE.sum(0) >= _LEAST_USES)
    same_LEE = told_LEE & ((ours > 0) == (theirs > 0))
    return np.stack([(counts_WLEE * same_LEE).sum((1, 2, 3)), (counts_WLEE * told_LEE).sum((1, 2, 3))], 1)


def _shares(profile: ModelProfile, method: str, layer: int) -> list[list[float | None]]:
    """[E, E] the row's share of both experts' scores, rounded; None where the combination was hardly seen."""
    score_EE = profile.dominance[method][layer].astype(np.float64)
    both_EE = score_EE + score_EE.T
    seen_EE = (profile.pairs_LEE[layer] >= _LEAST_USES) & (both_EE > 0)
    share_EE = np.where(seen_EE, score_EE / np.where(seen_EE, both_EE, 1), np.nan)
    return [[None if np.isnan(share) else round(float(share), 3) for share in row] for row in share_EE]


def show(page: Page, result: dict[str, Any]) -> None:
    """Section of the page."""
    from coterie.report.page import graph_objects
    from coterie.study.widths.wording import interval

    page.section(
        "Roles of one expert across its combinations (CRISP Fig. 2)",
        "The paper: an expert that dominates one combination is the auxiliary of another, so what an expert may lose "
        "depends on its company.",
        f"Here, by {result['method']}, {interval(result['experts_in_both_roles'], 0)} of {result['experts']} experts "
        f"have at least a tenth of their uses in either role (combinations of at least {result['least_uses']} uses); "
        f"{interval(result['uses_in_the_rarer_role'])} of the uses are in an expert's rarer role. One fixed ranking of "
        f"a layer's experts already names the dominant one in {interval(result['uses_that_one_ranking_explains'])} of "
        "the uses; only the rest needs to know the combination. By routing weight, "
        f"{interval(result['roles_by_weight_that_hold_on_other_text'])} of the uses on other text are of combinations "
        "with the same dominant expert there.",
    )
    graph = graph_objects()
    example = result["example"]
    figure = graph.Figure(graph.Heatmap(z=example["dominance"], zmin=0, zmax=1, colorscale="RdBu", zmid=0.5))
    figure.update_layout(
        title=f"the row's share of both experts' scores, layer {example['layer']}",
        xaxis={"title": "company"}, yaxis={"title": "expert", "autorange": "reversed"},
    )  # fmt: skip
    page.figure(figure)
