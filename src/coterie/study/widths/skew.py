"""How unevenly combinations are used: Fig. 3 of CRISP, on text that did not rank them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from coterie.profile.combinations import top_share
from coterie.pruning.tiers import TIERS, tier_shares, tiers
from coterie.study.widths.estimates import estimate, plain, ratio

if TYPE_CHECKING:
    from coterie.report.page import Page
    from coterie.study.widths.context import StudyContext

_TOP, _BOTTOM = 0.25, 0.29  # of the combinations, as the paper has them
_POINTS = 65


def run(context: StudyContext) -> dict[str, Any]:
    """Uses by rank of the combination, and the tiers' shares, layer by layer.

    Source: CRISP §2.1, Fig. 3; §3.3.1 for the tiers' shares. Here combinations are ranked on the calibration text and
    their uses counted on the evaluation text: ranked by the counts themselves, chance alone looks like skew.
    """
    pairs_LEE = context.profile.pairs_LEE
    ranked_WLP = by_rank(pairs_LEE, context.uses.counts())
    num_pairs = ranked_WLP.shape[2]
    top, bottom = _count(_TOP, num_pairs), _count(_BOTTOM, num_pairs)
    layers = []
    for layer in range(len(pairs_LEE)):
        ranked_WP = ranked_WLP[:, layer]
        sums_WX = np.stack([ranked_WP[:, :top].sum(1), ranked_WP[:, num_pairs - bottom :].sum(1), ranked_WP.sum(1)], 1)
        layers.append({
            "layer": layer,
            "top_quarter": estimate(sums_WX, ratio(0, 2), context.seed),
            "bottom_29_percent": estimate(sums_WX, ratio(1, 2), context.seed),
            "top_quarter_on_calibration": top_share(pairs_LEE[layer], _TOP),
            "cumulative": cumulative(ranked_WP.sum(0)),
        })  # fmt: skip
    all_WX = np.stack([
        ranked_WLP[:, :, :top].sum((1, 2)), ranked_WLP[:, :, num_pairs - bottom :].sum((1, 2)), ranked_WLP.sum((1, 2))
    ], 1)  # fmt: skip
    found = {
        "combinations_per_layer": num_pairs,
        "top_quarter": estimate(all_WX, ratio(0, 2), context.seed),
        "bottom_29_percent": estimate(all_WX, ratio(1, 2), context.seed),
        "tiers_on_calibration": tier_shares(tiers(pairs_LEE), pairs_LEE),
        "tiers": _tiers(pairs_LEE, context.uses.counts(), context.seed),
        "layers": layers,
    }  # fmt: skip
    shown: dict[str, Any] = plain(found)
    return shown


def by_rank(pairs_LEE: NDArray[Any], counts_WLEE: NDArray[Any]) -> NDArray[Any]:
    """Uses in every window of the combinations, in order of falling frequency in another text.

    Args:
        pairs_LEE: [L, E, E] symmetric uses that rank; of equal ones the one with lower experts comes first.
        counts_WLEE: [W, L, E, E] symmetric uses to count.

    Returns:
        [W, L, P], P = E (E - 1) / 2.
    """
    low_P, high_P = np.triu_indices(pairs_LEE.shape[1], 1)
    order_LP = np.argsort(-pairs_LEE[:, low_P, high_P].astype(np.int64), axis=1, kind="stable")
    return np.take_along_axis(counts_WLEE[:, :, low_P, high_P], order_LP[None], axis=2)


def cumulative(ranked_P: NDArray[Any]) -> list[list[float]]:
    """(share of the combinations, share of the uses they hold), at most 65 points from (0, 0) to (1, 1)."""
    total_P = np.concatenate([[0], np.cumsum(ranked_P)])
    at = np.unique(np.linspace(0, len(ranked_P), _POINTS).round().astype(int))
    return [[float(rank / len(ranked_P)), float(total_P[rank] / max(total_P[-1], 1))] for rank in at]


def _count(share: float, num_pairs: int) -> int:
    return int(np.ceil(share * num_pairs - 1e-9))


def _tiers(pairs_LEE: NDArray[Any], counts_WLEE: NDArray[Any], seed: int) -> dict[str, Any]:
    """The share of the evaluation text's uses in each tier, which the calibration text decided."""
    tier_LEE = tiers(pairs_LEE)
    held_WC = np.stack([(counts_WLEE * (tier_LEE == tier)).sum((1, 2, 3)) for tier in range(3)], 1)
    sums_WX = np.concatenate([held_WC, held_WC.sum(1, keepdims=True)], 1)
    return {name: estimate(sums_WX, ratio(tier, 3), seed) for tier, name in enumerate(TIERS)}


def show(page: Page, result: dict[str, Any]) -> None:
    """Section of the page."""
    from coterie.report.page import graph_objects
    from coterie.study.widths.wording import interval, percent, verdict

    tiers_found, calibrated = result["tiers"], result["tiers_on_calibration"]
    reading = verdict(
        result["top_quarter"], 0.6, "Here routing is more skewed.", "Here routing is less skewed.",
        "Here routing is about as skewed.",
    )  # fmt: skip
    page.section(
        "Skew of combinations (CRISP Fig. 3)",
        "The paper (Mixtral-8x7B): the top 25% of combinations hold over 60% of the uses and the bottom 29% less than "
        "10%, in every layer; alpha = 0.6 and beta = 0.9 make 25%, 46% and 29% of the combinations hot, warm and cold.",
        f"{reading} The top 25% hold {interval(result['top_quarter'])} of the uses, the bottom 29% "
        f"{interval(result['bottom_29_percent'])}, on text that did not rank them. Hot, warm and cold are "
        + ", ".join(percent(calibrated[name]["combinations"]) for name in TIERS)
        + f" of the {result['combinations_per_layer']:,} combinations of a layer.",
    )
    page.table(
        ["tier", "share of combinations", "share of uses, calibration", "share of uses, evaluation (95%)"],
        [[n, percent(calibrated[n]["combinations"]), percent(calibrated[n]["uses"]), interval(tiers_found[n])]
         for n in TIERS],
    )  # fmt: skip
    page.table(
        ["layer", "top 25% hold (95%)", "bottom 29% hold (95%)", "top 25%, ranked by themselves"],
        [
            [each["layer"], interval(each["top_quarter"]), interval(each["bottom_29_percent"]),
             percent(each["top_quarter_on_calibration"])]
            for each in result["layers"]
        ],
    )  # fmt: skip
    graph = graph_objects()
    figure = graph.Figure()
    for each in result["layers"]:
        share, held = zip(*each["cumulative"], strict=True)
        figure.add_scatter(x=share, y=held, name=f"layer {each['layer']}", mode="lines")
    figure.add_scatter(x=[0, 1], y=[0, 1], name="even use", mode="lines", line={"dash": "dot", "color": "#999"})
    figure.update_layout(
        xaxis={"title": "share of the combinations, most frequent first", "tickformat": ".0%"},
        yaxis={"title": "share of the uses", "tickformat": ".0%"},
    )
    page.figure(figure)
