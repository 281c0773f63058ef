"""Quality kept by hot, warm and cold uses, and what the cold auxiliary's width is worth: Fig. 15 of CRISP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from coterie.pruning.tiers import TIERS, tiers
from coterie.pruning.width_planning import plan_widths
from coterie.pruning.widths import widths
from coterie.study.widths.estimates import estimate, increase, kept, plain, ratio
from coterie.study.widths.uses import Uses, class_sums

if TYPE_CHECKING:
    from coterie.pruning.width_plan import WidthPlan
    from coterie.report.page import Page
    from coterie.study.widths.context import StudyContext

_COLD_WIDTHS, _QUICK_WIDTHS = (0.0, 0.25, 0.5, 0.75, 1.0), (0.0, 0.5, 1.0)
WARM, COLD = 1, 2
_ALPHA, _BETA = 0.6, 0.9


def run(context: StudyContext) -> dict[str, Any]:
    """The paper's policy judged on tokens by tier of their use; then only cold uses narrowed, more and less.

    Source: CRISP §5.2.3, A.1, Fig. 15. Quality kept is perplexity before over after, on the tokens after these uses: a
    token has a use in every layer, so its loss counts in several tiers, and hot uses lose what other layers do to
    them. Narrowing one tier alone tells what is the tier's own.
    """
    uses, profile = context.uses, context.profile
    tier_LWSP = uses.look_up(tiers(profile.pairs_LEE, _ALPHA, _BETA))
    ours = context.evaluate(plan_widths(profile, "crisp", alpha=_ALPHA, beta=_BETA, dominance=context.dominance))
    rise_WS = ours.measured.rise_WS
    swept = _sweep(context, uses, tier_LWSP == COLD)
    warm_WX = class_sums(tier_LWSP == WARM, context.evaluate(_only(context, WARM, 0.5)).measured.rise_WS).sum(0)
    alone = {"warm": estimate(warm_WX, kept, context.seed), "cold": swept[0]["kept_on_cold"]}
    by_tier = {}
    for tier, name in enumerate(TIERS):
        members = tier_LWSP == tier
        share_WX = np.stack([members.sum((0, 2, 3)), np.full(len(rise_WS), members[:, 0].size)], 1)
        by_tier[name] = {
            "uses": estimate(share_WX, ratio(), context.seed),
            "kept": estimate(class_sums(members, rise_WS).sum(0), kept, context.seed),
            "kept_alone": alone.get(name),
        }
    found = {"tiers": by_tier, "bytes": ours.bytes, "cold_widths": swept}
    shown: dict[str, Any] = plain(found)
    return shown


def _only(context: StudyContext, tier: int, auxiliary: float) -> WidthPlan:
    """The plan that narrows the auxiliary experts of one tier and leaves everything else whole."""
    role_widths = [(1.0, auxiliary if at == tier else 1.0) for at in range(3)]
    return plan_widths(
        context.profile, "crisp", alpha=_ALPHA, beta=_BETA, role_widths=role_widths, dominance=context.dominance
    )


def _sweep(context: StudyContext, uses: Uses, cold_LWSP: NDArray[np.bool_]) -> list[dict[str, Any]]:
    """Only cold uses narrowed: quality on their tokens, and the bytes of the layers' tokens that have one."""
    swept = []
    for share in _QUICK_WIDTHS if context.quick else _COLD_WIDTHS:
        plan = _only(context, COLD, share)
        point = context.evaluate(plan, label=f"cold auxiliaries at {share:.0%}")
        rise_WS = point.measured.rise_WS
        over_all_WX = np.stack([rise_WS.sum(1), np.full(len(rise_WS), float(rise_WS.shape[1]))], 1)
        swept.append({
            "auxiliary_width": share,
            "kept_on_cold": estimate(class_sums(cold_LWSP, rise_WS).sum(0), kept, context.seed),
            "increase": estimate(over_all_WX, increase, context.seed),
            "bytes_of_cold": _bytes_where(plan, uses, np.any(cold_LWSP, axis=3)),
            "bytes": point.bytes,
        })  # fmt: skip
    return swept


def _bytes_where(plan: WidthPlan, uses: Uses, where_LWS: NDArray[np.bool_]) -> float | None:
    """The share of full bytes that the chosen layers and tokens read; None where there are none."""
    neurons = full = 0
    for layer, where_WS in enumerate(where_LWS):
        width_TK = widths(plan, layer, uses.ids_LWSK[layer][where_WS], uses.weights_LWSK[layer][where_WS])
        neurons, full = neurons + int(width_TK.sum()), full + width_TK.size * plan.width
    return neurons / full if full else None


def show(page: Page, result: dict[str, Any]) -> None:
    """Section of the page."""
    from coterie.study.widths.wording import interval, percent

    tier, swept = result["tiers"], result["cold_widths"]
    half = next(each for each in swept if each["auxiliary_width"] == 0.5)
    page.section(
        "Quality by tier, and the width of cold auxiliaries (CRISP Fig. 15)",
        "The paper: hot, warm and cold uses keep 99.9%, 99.1% and 94.7% of full-width accuracy; without the auxiliary "
        "expert cold uses need half of the bytes.",
        "Here, as perplexity before over after on the tokens of these uses, hot ones keep "
        f"{interval(tier['hot']['kept'])}, warm ones {interval(tier['warm']['kept'])}, cold ones "
        f"{interval(tier['cold']['kept'])}, with the paper's policy. Narrowing only cold uses, these keep "
        f"{interval(swept[0]['kept_on_cold'])} without their auxiliary and {interval(half['kept_on_cold'])} with "
        "half of it. Perplexity is not accuracy: the order of the tiers can be compared with the paper, the levels "
        "cannot. Small models answer questions at chance, so accuracy would say nothing. Above top-2 a token has "
        "several uses, so that its bytes fall by less than half.",
    )
    page.table(
        ["tier", "share of uses (95%)", "kept, the paper's policy", "kept, only this tier narrowed"],
        [[name, interval(each["uses"]), interval(each["kept"], 2),
          interval(each["kept_alone"], 2) if each["kept_alone"] else "-"]
         for name, each in tier.items()],
    )  # fmt: skip
    page.table(
        ["cold auxiliary's width", "kept on cold uses (95%)", "bytes of cold tokens", "perplexity, all tokens",
         "bytes, all tokens"],
        [[percent(each["auxiliary_width"], 0), interval(each["kept_on_cold"], 2), percent(each["bytes_of_cold"]),
          interval(each["increase"], 2), percent(each["bytes"])]
         for each in swept],
    )  # fmt: skip
