"""In which order neurons should stand: importance and its variants, the original order, chance. Fig. 12 of CRISP."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from coterie.pruning.importance_order import neuron_order
from coterie.pruning.width_planning import plan_widths
from coterie.study.widths.estimates import Estimate, estimate, increase, plain

if TYPE_CHECKING:
    from coterie.pruning.width_plan import WidthPlan
    from coterie.report.page import Page
    from coterie.study.measure import Measured
    from coterie.study.widths.context import StudyContext

_WIDTH = 0.5


def run(context: StudyContext) -> dict[str, Any]:
    """Perplexity at half width in every order, and which order is best on the calibration text.

    Source: CRISP §5.5.1, Fig. 12, for the first importance, the original order and a random one; the other variants
    are beyond it.
    """
    profile = context.profile
    plans = {name: plan_widths(profile, "uniform", bytes=_WIDTH, variant=name) for name in profile.importance}
    default = neuron_order(profile).variant
    chosen_on = {name: context.evaluate(plan, context.calibration, name).measured for name, plan in plans.items()}
    measured = {name: context.evaluate(plan, label=name).measured for name, plan in plans.items()}
    original = context.evaluate(_in_order(plans[default], None), label="original order").measured
    random = [
        context.evaluate(_in_order(plans[default], seed), label="random order").measured for seed in context.seeds
    ]
    best = min(chosen_on, key=lambda name: chosen_on[name].increase)
    found = {
        "width": _WIDTH,
        "default": default,
        "best_on_calibration": best,
        "calibration": {name: _increase(each, context.seed) for name, each in chosen_on.items()},
        "calibration_over_best": {
            name: difference(each, chosen_on[best], context.seed) for name, each in chosen_on.items()
        },
        "importance": {name: _increase(each, context.seed) for name, each in measured.items()},
        "original": _increase(original, context.seed),
        "random": random_orders([each.increase for each in random], context.seeds),
        "original_over_default": difference(original, measured[default], context.seed),
        "random_over_default": difference(random[0], measured[default], context.seed),
    }
    found["beats_both"] = beats_both(
        measured[default].increase, original.increase, [each.increase for each in random]
    )  # fmt: skip
    shown: dict[str, Any] = plain(found)
    return shown


def _in_order(plan: WidthPlan, seed: int | None) -> WidthPlan:
    """The plan with neurons in their original order, or shuffled in every expert."""
    order_LEI = np.broadcast_to(np.arange(plan.width, dtype=plan.order_LEI.dtype), plan.order_LEI.shape).copy()
    if seed is not None:
        order_LEI = np.random.default_rng(seed).permuted(order_LEI, axis=2)
    return replace(plan, order_LEI=order_LEI)


def _increase(measured: Measured, seed: int) -> Estimate:
    return estimate(columns(measured), increase, seed)


def columns(*measured: Measured) -> NDArray[np.float64]:
    """[W, X + 1] of every window: each measurement's summed rise of the loss, nats, and the scored tokens."""
    rises = [(each.nll_WS - each.base_WS).sum(1) for each in measured]
    return np.stack([*rises, np.full(len(rises[0]), float(measured[0].nll_WS.shape[1]))], axis=1)


def difference(one: Measured, other: Measured, seed: int = 0) -> Estimate:
    """How much further one increases perplexity than another, both as shares of the unchanged model's."""
    return estimate(columns(one, other), _further, seed)


def _further(sums_R3: NDArray[np.float64]) -> NDArray[np.float64]:
    rises_R2 = np.expm1(sums_R3[:, :2] / sums_R3[:, 2:])
    further: NDArray[np.float64] = rises_R2[:, 0] - rises_R2[:, 1]
    return further


def random_orders(increases: list[float], seeds: tuple[int, ...]) -> dict[str, Any]:
    """Mean and spread over seeds."""
    return {
        "mean": float(np.mean(increases)), "least": min(increases), "most": max(increases),
        "by_seed": dict(zip(map(str, seeds), increases, strict=True)),
    }  # fmt: skip


def beats_both(importance: float, original: float, random: list[float]) -> bool:
    """Whether importance is below both by more than random orders differ among each other."""
    spread = max(random) - min(random)
    return importance < original - spread and importance < float(np.mean(random)) - spread


def show(page: Page, result: dict[str, Any]) -> None:
    """Section of the page."""
    from coterie.study.widths.wording import interval, percent

    random, default = result["random"], result["default"]
    seeds = len(random["by_seed"])
    spread = f"{percent(random['least'])} to {percent(random['most'])} over {seeds} seeds" if seeds > 1 else "one seed"
    reading = "by more than" if result["beats_both"] else "but not by more than"
    page.section(
        "The order of neurons (CRISP Fig. 12)",
        "The paper (Mixtral-8x7B, half width): perplexity 4.21 in order of importance, 5.92 in the original order, "
        "6.83 in a random one, against 3.84 at full width: +9.6%, +54%, +78%.",
        f"Here half the neurons of every expert run, whoever keeps company. In order of {default}, the default, "
        f"perplexity rises by {interval(result['importance'][default])}; in the original order by "
        f"{interval(result['original'])}; in a random one by {percent(random['mean'])} ({spread}). Importance is best, "
        f"{reading} random orders differ among each other. On the calibration text, which decides the default, "
        f"{result['best_on_calibration']} is best.",
    )
    rows = [
        [name + (" (default)" if name == default else ""), interval(result["calibration"][name]),
         interval(result["calibration_over_best"][name], 2), interval(result["importance"][name])]
        for name in sorted(result["importance"], key=lambda name: float(result["calibration"][name]["value"]))
    ]  # fmt: skip
    rows.append(["original order", "-", "-", interval(result["original"])])
    rows += [[f"random order, seed {seed}", "-", "-", percent(value)] for seed, value in random["by_seed"].items()]
    page.table(
        ["order by", "perplexity, calibration", "above the best there (95%)", "perplexity, evaluation (95%)"], rows
    )
