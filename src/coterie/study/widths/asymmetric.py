"""Half of the auxiliary expert or a quarter of both, at equal bytes: Table 4 of CRISP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from coterie.pruning.importance_order import neuron_order
from coterie.pruning.width_planning import plan_widths
from coterie.study.widths.estimates import estimate, increase, plain

if TYPE_CHECKING:
    from coterie.profile.model_profile import ModelProfile
    from coterie.pruning.width_plan import WidthPlan
    from coterie.report.page import Page
    from coterie.study.widths.context import Point, StudyContext

Roles = Sequence[tuple[float, float]]
_WHOLE, _NARROW, _GONE = (1.0, 1.0), (1.0, 0.5), (1.0, 0.0)
SETTINGS: dict[str, Roles] = {
    "warm alone narrowed": (_WHOLE, _NARROW, _WHOLE),
    "the paper's policy": (_WHOLE, _NARROW, _GONE),
    "every combination narrowed": (_NARROW, _NARROW, _NARROW),
}
_TRIES = 12


def run(context: StudyContext) -> dict[str, Any]:
    """Both ways to spend the same bytes, in warm combinations, in the paper's policy, and in every combination.

    Source: CRISP A.5, Table 4. Above top-2 the widest of an anchor's widths counts, so halving auxiliaries reads more
    than quartering both: there the symmetric widths are scaled until both read the same on the calibration text, and
    what remains between two steps of width is interpolated.
    """
    found = []
    for name, roles in SETTINGS.items():
        asymmetric = plan_widths(context.profile, "crisp", role_widths=roles, dominance=context.dominance)
        point = context.evaluate(asymmetric, label=f"asymmetric, {name}")
        points = [context.evaluate(plan, label=f"symmetric, {name}") for plan in _near(context, roles, asymmetric)]
        found.append({"setting": name, **compare(point, points, context.seed)})
    shown: dict[str, Any] = plain({"settings": found, "importance_of_the_last": tails(context.profile)})
    return shown


def tails(profile: ModelProfile) -> dict[str, float]:
    """The share of an expert's importance that its last quarter and its last half of neurons hold, on average.

    If the loss grew with what is left out, half of one expert would cost as much as a quarter of two where the one's
    half holds as much as both quarters.
    """
    value_LEI = neuron_order(profile).value_LEI.astype(np.float64)
    share_LEI = value_LEI / value_LEI.sum(2, keepdims=True)
    width = profile.width
    return {
        "quarter": float(share_LEI[:, :, width - width // 4 :].sum(2).mean()),
        "half": float(share_LEI[:, :, width - width // 2 :].sum(2).mean()),
    }


def compare(asymmetric: Point, symmetric: Sequence[Point], seed: int) -> dict[str, Any]:
    """Symmetric at the bytes of asymmetric, between two points where none has exactly these, and how much worse it is.

    Args:
        asymmetric: measured.
        symmetric: one or two points on the same windows.
        seed: of the intervals.
    """
    low, high = sorted((symmetric[0], symmetric[-1]), key=lambda point: point.bytes)
    span = high.bytes - low.bytes
    share = min(1.0, max(0.0, (asymmetric.bytes - low.bytes) / span)) if span > 0 else 0.0
    ours_WS = asymmetric.measured.nll_WS
    theirs_WS = (1 - share) * low.measured.nll_WS + share * high.measured.nll_WS
    base_WS = asymmetric.measured.base_WS

    def figure(rise_WS: Any) -> Any:
        return estimate(np.stack([rise_WS.sum(1), np.full(len(rise_WS), float(rise_WS.shape[1]))], 1), increase, seed)

    return {
        "bytes": asymmetric.bytes,
        "symmetric_bytes": (1 - share) * low.bytes + share * high.bytes,
        "full_perplexity": float(np.exp(base_WS.mean())),
        "asymmetric_perplexity": asymmetric.measured.perplexity,
        "symmetric_perplexity": float(np.exp(theirs_WS.mean())),
        "asymmetric_increase": figure(ours_WS - base_WS),
        "symmetric_increase": figure(theirs_WS - base_WS),
        "symmetric_over_asymmetric": figure(theirs_WS - ours_WS),
        "asymmetric_kl": asymmetric.measured.kl,
        "symmetric_kl": (1 - share) * low.measured.kl + share * high.measured.kl,
    }


def _near(context: StudyContext, roles: Roles, asymmetric: WidthPlan) -> list[WidthPlan]:
    """Symmetric plans whose bytes on the calibration text are those of the asymmetric one, or lie on both sides."""
    wanted = float(asymmetric.settings["expected_bytes"])
    plain_plan = _symmetric(context, roles, 1.0)
    if abs(_bytes(plain_plan) - wanted) < 1e-9:
        return [plain_plan]
    low, high = (plain_plan, None) if _bytes(plain_plan) < wanted else (None, plain_plan)
    bounds = (1.0, 2.0) if high is None else (0.0, 1.0)
    for _ in range(_TRIES):
        scale = sum(bounds) / 2
        plan = _symmetric(context, roles, scale)
        if _bytes(plan) <= wanted:
            low, bounds = plan, (scale, bounds[1])
        else:
            high, bounds = plan, (bounds[0], scale)
    return [plan for plan in (low, high) if plan is not None]


def _symmetric(context: StudyContext, roles: Roles, scale: float) -> WidthPlan:
    """The symmetric plan; narrowed widths times a scale, at most whole."""
    shares = [sum(pair) / 2 for pair in roles]
    scaled = [share if share == 1 else min(1.0, share * scale) for share in shares]
    return plan_widths(context.profile, "symmetric", role_widths=[(share, share) for share in scaled])


def _bytes(plan: WidthPlan) -> float:
    return float(plan.settings["expected_bytes"])


def show(page: Page, result: dict[str, Any]) -> None:
    """Section of the page."""
    from coterie.study.widths.wording import interval, percent, verdict

    first, last = result["settings"][0], result["importance_of_the_last"]
    reading = verdict(
        first["symmetric_over_asymmetric"], 0, "asymmetric widths are better, as the paper has it",
        "symmetric widths are better, the opposite of the paper's finding", "this small model does not tell them apart",
    )  # fmt: skip
    page.section(
        "Asymmetric or symmetric widths at equal bytes (CRISP Table 4)",
        "The paper (Mixtral-8x7B, 75% of the bytes in warm combinations): perplexity 4.02 with a whole dominant and "
        "half an auxiliary expert, 4.18 with both at 75%; full width 3.84.",
        f"Here, narrowing warm combinations alone: perplexity {first['asymmetric_perplexity']:.4g} and "
        f"{first['symmetric_perplexity']:.4g}, full width {first['full_perplexity']:.4g}; symmetric over "
        f"asymmetric {interval(first['symmetric_over_asymmetric'], 2)}: {reading}. In order "
        f"of importance the last quarter of an expert's neurons holds {percent(last['quarter'])} of its importance and "
        f"the last half {percent(last['half'])}: the second quarter to go costs more than the first, which speaks for "
        "sharing the loss; that a dominant expert's neurons weigh more speaks against it.",
    )
    page.table(
        ["what is narrowed", "bytes", "asymmetric (95%)", "symmetric (95%)", "symmetric over asymmetric (95%)",
         "KL, asymmetric", "KL, symmetric", "better"],
        [[each["setting"], percent(each["bytes"]), interval(each["asymmetric_increase"], 2),
          interval(each["symmetric_increase"], 2), interval(each["symmetric_over_asymmetric"], 2),
          each["asymmetric_kl"], each["symmetric_kl"],
          verdict(each["symmetric_over_asymmetric"], 0, "asymmetric", "symmetric", "not told apart")]
         for each in result["settings"]],
    )  # fmt: skip
