"""What a budget of expert memory buys: prefixes of every expert, whole experts, or the neurons worth most. Fig. 9."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import BudgetError
from coterie.pruning.importance_order import neuron_order
from coterie.pruning.width_planning import plan_widths
from coterie.pruning.width_tables import default_step
from coterie.study.widths.estimates import plain
from coterie.study.widths.ordering import difference

if TYPE_CHECKING:
    from coterie.profile.model_profile import ModelProfile
    from coterie.pruning.width_plan import WidthPlan
    from coterie.report.page import Page
    from coterie.study.widths.context import Point, StudyContext

_BUDGETS = (0.2, 0.3, 0.4, 0.5, 0.6)
_QUICK = (0.4,)
STORED = ("uniform pruning", "expert dropping", "value, stored")
READ = "value, read"


def run(context: StudyContext) -> dict[str, Any]:
    """Quality at equal budgets, with nothing but the budget stored, and with a store behind it.

    Source: CRISP §5.2.2, Fig. 9. There, uniform pruning and dropping keep nothing beyond the budget, while CRISP's
    policy reads what it lacks from a store, so that its quality does not depend on the budget and its speed does.
    """
    profile = context.profile
    crisp = context.evaluate(plan_widths(profile, "crisp", dominance=context.dominance))
    rows = []
    for budget in _QUICK if context.quick else _BUDGETS:
        plans = {
            "uniform pruning": stored_plan(profile, uniform_widths(profile, budget)),
            "expert dropping": stored_plan(profile, dropped_widths(profile, budget)),
            "value, stored": stored_plan(profile, worthiest_widths(profile, budget)),
        }
        points = {name: context.evaluate(plan, label=name) for name, plan in plans.items()}
        with suppress(BudgetError):  # where the budget is less than any plan reads
            points[READ] = context.evaluate(plan_widths(profile, "value", bytes=budget), label=READ)
        rows.append(
            {
                "budget": budget,
                "policies": {name: _told(point, plans.get(name)) for name, point in points.items()},
                "over_value_stored": {
                    name: difference(points[name].measured, points["value, stored"].measured, context.seed)
                    for name in STORED[:2]
                },
            }
        )
    shown: dict[str, Any] = plain({"budgets": rows, "crisp": crisp.to_json()})
    return shown


def _told(point: Point, plan: WidthPlan | None) -> dict[str, Any]:
    stored = None if plan is None else float(plan.tables["width_LE"].mean() / plan.width)
    return {"stored": stored, **point.to_json()}


def stored_plan(profile: ModelProfile, width_LE: NDArray[np.integer[Any]]) -> WidthPlan:
    """A plan that runs of every expert what is stored of it, whoever asks."""
    plan = plan_widths(profile, "drop", threshold=0)
    return replace(plan, tables={**plan.tables, "width_LE": width_LE.astype(np.int32)})


def uniform_widths(profile: ModelProfile, budget: float) -> NDArray[np.int64]:
    """[L, E] the same prefix of every expert, to a neuron."""
    shape = (profile.spec.num_layers, profile.spec.num_experts)
    return np.full(shape, int(budget * profile.width + 1e-9), dtype=np.int64)


def dropped_widths(profile: ModelProfile, budget: float) -> NDArray[np.int64]:
    """[L, E] the experts that are chosen most, of equal ones the first, whole; the others not at all.

    The budget is shared by all layers: loads of a layer add up to the same, so they compare.
    """
    load_X = profile.load_LE.reshape(-1)
    kept = np.argsort(-load_X, kind="stable")[: int(budget * load_X.size + 1e-9)]
    width_X = np.zeros(load_X.shape, dtype=np.int64)
    width_X[kept] = profile.width
    return width_X.reshape(profile.load_LE.shape)


def worthiest_widths(profile: ModelProfile, budget: float) -> NDArray[np.int64]:
    """[L, E] prefixes of the neurons worth most: squared value, times the squared routing weight over its tokens.

    What a neuron adds goes with weight x value, and the loss from leaving it out with the square of that. Widths are
    multiples of the default step.
    """
    order = neuron_order(profile)
    step = default_step(profile.width)
    weight_LE = np.zeros((profile.spec.num_layers, profile.spec.num_experts))
    for layer, ids_SK in enumerate(profile.sample_ids_LSK):
        np.add.at(weight_LE[layer], ids_SK.astype(np.int64), profile.sample_weights_LSK[layer].astype(np.float64) ** 2)
    worth_LES = weight_LE[:, :, None] * order.value_LEI[:, :, ::step].astype(np.float64) ** 2
    size_S = np.minimum(step, profile.width - np.arange(worth_LES.shape[2]) * step)
    size_X = np.broadcast_to(size_S, worth_LES.shape).reshape(-1)
    falling = np.argsort(-worth_LES.reshape(-1), kind="stable")
    fits = np.cumsum(size_X[falling]) <= budget * size_X.sum() + 1e-9
    kept_X = np.zeros(size_X.shape, dtype=np.int64)
    kept_X[falling[fits]] = size_X[falling[fits]]
    width_LE: NDArray[np.int64] = kept_X.reshape(worth_LES.shape).sum(2)
    return width_LE


def show(page: Page, result: dict[str, Any]) -> None:
    """Section of the page."""
    from coterie.report.page import graph_objects
    from coterie.study.widths.wording import interval, percent

    crisp = result["crisp"]
    at = next((row for row in result["budgets"] if row["budget"] == 0.4), result["budgets"][0])
    shown = {name: interval(_increase(each)) for name, each in at["policies"].items()}
    page.section(
        "Equal memory (CRISP Fig. 9)",
        "The paper (Mixtral-8x7B, 40% of the experts' memory): average accuracy 73.4% for its policy, 70.5% for "
        "uniform pruning, 69.6% for expert dropping. Its policy has all experts in a store and caches; its quality "
        "is the same at every budget and only its speed is not. The others have nothing beyond the budget.",
        "How the budget is spent here. Uniform pruning: the same share of every expert's neurons. Expert dropping: the "
        "experts chosen most, whole; a token that chose another goes without it. Value, stored: of each expert as many "
        "neurons as are worth it, by squared value and routing weight on the calibration text. These three keep "
        "nothing else. Value, read: all experts in a store, as in the paper, and the share of the budget read of the "
        "chosen experts' bytes per token, without any cache.",
        f"At {percent(at['budget'], 0)}, perplexity rises by "
        + ", ".join(f"{figures} ({name})" for name, figures in shown.items())
        + f". The paper's policy with a store: {interval(_increase(crisp))} at every budget, reading "
        f"{percent(crisp['bytes'])} of the chosen experts' bytes less what is cached.",
    )
    names = [*STORED, READ]
    page.table(
        ["budget", *(f"{name}: perplexity (95%)" for name in names)],
        [
            [percent(row["budget"], 0), *(interval(_increase(row["policies"][name])) if name in row["policies"] else "-"
                                          for name in names)]
            for row in result["budgets"]
        ],
    )  # fmt: skip
    figure = graph_objects().Figure()
    for name in names:
        rows = [row for row in result["budgets"] if name in row["policies"]]
        figure.add_scatter(
            x=[row["budget"] for row in rows], y=[row["policies"][name]["perplexity_increase"] for row in rows],
            name=name, mode="lines+markers", line={"dash": "dash" if name == READ else "solid"},
        )  # fmt: skip
    figure.update_layout(
        xaxis={"title": "budget, share of all experts' bytes", "tickformat": ".0%"},
        yaxis={"title": "increase of perplexity (logarithmic)", "tickformat": ".1%", "type": "log"},
    )
    page.figure(figure)


def _increase(each: dict[str, Any]) -> dict[str, Any]:
    return {"value": each["perplexity_increase"], "interval_95": each["interval_95"]}
