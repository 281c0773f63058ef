"""What a combination loses without its dominant and without its auxiliary expert: Fig. 4 of CRISP."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from coterie.calibration.ablation import Pair, choose_pairs
from coterie.pruning.agreement import dominance_agreement
from coterie.study.widths.estimates import Estimate, estimate, plain, ratio
from coterie.study.widths.selective import leave_out, rise_in

if TYPE_CHECKING:
    from coterie.profile.model_profile import ModelProfile
    from coterie.report.page import Page
    from coterie.study.widths.context import StudyContext

PAIRS, QUICK_PAIRS = 20, 5
_WINDOWS, _QUICK_WINDOWS = 8, 3


def run(context: StudyContext) -> dict[str, Any]:
    """The 20 most frequent combinations, and as many of the most frequent warm and cold ones, each expert left out.

    Source: CRISP §2.2, Fig. 4. Who dominates is told by the calibration text; the loss is measured on the evaluation
    text. The paper calls dominant whichever loses more in the measurement itself, which makes every ratio at least 1;
    that figure is given beside ours.
    """
    profile = context.profile
    count = QUICK_PAIRS if context.quick else PAIRS
    frequent = most_frequent(profile.pairs_LEE, count)
    others = [pair for pair in choose_pairs(profile.pairs_LEE, 2 * count) if pair not in frequent][:count]
    counts_WLEE = context.uses.counts()
    measured = []
    for number, pair in enumerate([*frequent, *others], 1):
        measured.append(_measure(context, pair, counts_WLEE[:, pair[0], pair[1], pair[2]]))
        context.progress("leaving out experts", number, len(frequent) + len(others))
    found = {
        "method": context.dominance,
        "frequent": summarise(measured[: len(frequent)], profile, context.seed),
        "warm_and_cold": summarise(measured[len(frequent) :], profile, context.seed),
        "methods_on_calibration": [
            {"methods": list(each.methods), "pairs": each.pairs, "share": each.share,
             "share_not_hot": each.share_not_hot}
            for each in dominance_agreement(profile)
        ],
    }  # fmt: skip
    shown: dict[str, Any] = plain(found)
    return shown


def most_frequent(pairs_LEE: NDArray[Any], count: int) -> list[Pair]:
    """The most frequent combinations of all layers, falling; of equal ones lower layers and experts come first."""
    layers, experts, _ = pairs_LEE.shape
    low_P, high_P = np.triu_indices(experts, 1)
    uses = pairs_LEE[:, low_P, high_P].reshape(-1)
    order = np.argsort(-uses.astype(np.int64), kind="stable")[:count]
    assert layers * len(low_P) == uses.size
    return [
        (int(at // len(low_P)), int(low_P[at % len(low_P)]), int(high_P[at % len(low_P)]))
        for at in order if uses[at] > 0
    ]  # fmt: skip


def _measure(context: StudyContext, pair: Pair, uses_W: NDArray[Any]) -> dict[str, Any]:
    """Both experts of a pair left out in turn, in the windows that use it most."""
    layer, first, second = pair
    most = np.argsort(-uses_W, kind="stable")[: _QUICK_WINDOWS if context.quick else _WINDOWS]
    chosen = np.sort(most[uses_W[most] > 0])
    uses, rises = int(uses_W[chosen].sum()), [math.nan, math.nan]
    if uses:
        for at, (masked, company) in enumerate(((first, second), (second, first))):
            rises[at] = rise_in(context.bench, leave_out(layer, masked, company), chosen)
    return {"pair": pair, "uses": uses, "tokens": len(chosen) * (context.bench.ids_WN.shape[1] - 1), "rises": rises}


def summarise(measured: Sequence[dict[str, Any]], profile: ModelProfile, seed: int) -> dict[str, Any]:
    """Means over combinations, with their spread, by who told the roles.

    Args:
        measured: of every combination its `pair`, `uses`, `tokens`, and `rises`, the summed rise of the loss in nats
            without its first and without its second expert.
        profile: tells the roles.
        seed: of the intervals.
    """
    known = [each for each in measured if each["uses"]]
    if not known:
        return {"combinations": 0}
    by_method = {}
    for method in profile.dominance:
        scores = [_scores(profile, method, each["pair"]) for each in known]
        decided = [(e, s) for e, s in zip(known, scores, strict=True) if s[0] == s[0] and s[1] == s[1] and s[0] != s[1]]
        if decided:
            by_method[method] = _by_roles([(e, int(s[1] > s[0])) for e, s in decided], seed)
    return {
        "combinations": len(known),
        "by_method": by_method,
        "by_the_measurement_itself": _by_roles([(each, int(np.argmax(each["rises"]))) for each in known], seed),
        "each": [
            {"layer": e["pair"][0], "experts": list(e["pair"][1:]), "uses": e["uses"],
             "nats_a_use": [rise / e["uses"] for rise in e["rises"]],
             **{method: _scores(profile, method, e["pair"]) for method in profile.dominance}}
            for e in known
        ],
    }  # fmt: skip


def _scores(profile: ModelProfile, method: str, pair: Pair) -> tuple[float, float]:
    layer, first, second = pair
    table_EE = profile.dominance[method][layer]
    return float(table_EE[first, second]), float(table_EE[second, first])


def _by_roles(roles: Sequence[tuple[dict[str, Any], int]], seed: int) -> dict[str, Any]:
    """Figures where the dominant expert is the pair's first (0) or second (1)."""
    rows = np.array([[e["rises"][at], e["rises"][1 - at], e["uses"], e["tokens"]] for e, at in roles])
    a_use = rows[:, :2] / rows[:, 2:3]
    sums = np.column_stack([
        a_use, np.ones(len(rows)), np.expm1(rows[:, :2] / rows[:, 3:]), rows[:, 2] * (rows[:, 0] > rows[:, 1]),
        rows[:, 2],
    ])  # fmt: skip
    return {
        "combinations": len(rows),
        "dominant_nats_a_use": estimate(sums, ratio(0, 2), seed),
        "auxiliary_nats_a_use": estimate(sums, ratio(1, 2), seed),
        "dominant_increase": estimate(sums, ratio(3, 2), seed),
        "auxiliary_increase": estimate(sums, ratio(4, 2), seed),
        "ratio": _positive_ratio(sums, seed),
        "agrees_with_measurement": estimate(sums, ratio(5, 6), seed),
    }


def _positive_ratio(sums_PX: NDArray[np.float64], seed: int) -> Estimate:
    return estimate(sums_PX, lambda x: np.where(x[:, 1] > 0, x[:, 0] / np.where(x[:, 1] > 0, x[:, 1], 1), np.nan), seed)


def show(page: Page, result: dict[str, Any]) -> None:
    """Section of the page."""
    from coterie.study.widths.wording import interval, number, percent, verdict

    frequent = result["frequent"]
    methods = frequent.get("by_method", {})
    main = methods.get(result["method"])
    found = "The evaluation text does not use these combinations."
    if main is not None:
        reading = verdict(
            main["ratio"], 1, "so the dominant one is needed more, as the paper has it",
            "so the auxiliary one is needed more, the opposite of the paper's finding",
            "too uncertain over these combinations to say that the dominant one is needed more",
        )  # fmt: skip
        found = (
            f"Here, of the {frequent['combinations']} most frequent combinations, with roles told by "
            f"{result['method']} on the calibration text, a use loses {number(main['dominant_nats_a_use'])} nats "
            f"without its dominant expert and {number(main['auxiliary_nats_a_use'])} without the auxiliary: "
            f"{number(main['ratio'])} times as many, {reading}. Naming dominant whatever loses more in this "
            f"very measurement, as the paper does, {number(frequent['by_the_measurement_itself']['ratio'])}."
        )
    page.section(
        "Dominant and auxiliary experts (CRISP Fig. 4)",
        "The paper (Mixtral-8x7B, 20 most frequent combinations): masking the dominant expert raises perplexity by "
        "2.64 on average, the auxiliary by 0.71, 3.7 times less.",
        found,
    )
    rows = []
    for name, group in (("most frequent", frequent), ("warm and cold", result["warm_and_cold"])):
        told = {**group.get("by_method", {})}
        if group.get("by_the_measurement_itself"):
            told["the measurement itself"] = group["by_the_measurement_itself"]
        rows += [
            [name, method, each["combinations"], number(each["dominant_nats_a_use"]),
             number(each["auxiliary_nats_a_use"]), number(each["ratio"]), interval(each["agrees_with_measurement"], 0)]
            for method, each in told.items()
        ]  # fmt: skip
    page.table(
        ["combinations", "roles told by", "number", "nats a use without the dominant (95%)", "without the auxiliary",
         "ratio", "uses where the measurement agrees"],
        rows,
    )  # fmt: skip
    page.table(
        ["methods, on calibration text", "combinations", "same dominant expert, of all uses", "of warm and cold ones"],
        [[" and ".join(each["methods"]), each["pairs"], percent(each["share"]), percent(each["share_not_hot"])]
         for each in result["methods_on_calibration"]],
    )  # fmt: skip
    _bars(page, frequent, result["method"])


def _bars(page: Page, group: dict[str, Any], method: str) -> None:
    """Both losses of every combination."""
    from coterie.report.page import graph_objects

    if not group.get("each"):
        return
    graph = graph_objects()
    names = [f"layer {e['layer']}: {e['experts'][0]}+{e['experts'][1]}" for e in group["each"]]
    figure = graph.Figure()
    for role in (0, 1):
        values = [e["nats_a_use"][role if _first_dominates(e, method) else 1 - role] for e in group["each"]]
        figure.add_bar(x=names, y=values, name=("without the dominant", "without the auxiliary")[role])
    figure.update_layout(yaxis={"title": "nats a use"}, barmode="group")
    page.figure(figure)


def _first_dominates(each: dict[str, Any], method: str) -> bool:
    scores = each[method]
    return (scores[0] or 0) >= (scores[1] or 0)
