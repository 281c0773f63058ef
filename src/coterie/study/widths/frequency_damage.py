"""Does pruning hurt frequent combinations more than rare ones? Fig. 1 of CRISP."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from coterie.models.reorder import reordered
from coterie.pruning.importance_order import neuron_order
from coterie.pruning.tiers import tiers
from coterie.study.widths.estimates import estimate, increase, plain, ratio, ratio_of_means
from coterie.study.widths.selective import by_rule, half_width_where
from coterie.study.widths.uses import class_sums

if TYPE_CHECKING:
    from coterie.report.page import Page
    from coterie.study.widths.context import StudyContext

CLASSES = {"frequent": 0, "rare": 2}  # hot and cold combinations


def run(context: StudyContext) -> dict[str, Any]:
    """Damage from half width, first everywhere, then in the uses of one class and layer at a time.

    Source: CRISP §1, Fig. 1. That figure tells how tokens fare when everything is pruned, which mixes what pruning a
    combination does with what else is special about its tokens, and with all other layers. So the pruning itself is
    also confined to one class and layer (all layers at once where quick): the summed rise of the loss, that of later
    tokens included, over the uses pruned.
    """
    tier_LEE, width = tiers(context.profile.pairs_LEE), context.profile.width
    everything = np.ones_like(tier_LEE, dtype=np.bool_)
    layers = range(context.profile.spec.num_layers)
    members = {name: tier_LEE == tier for name, tier in CLASSES.items()}
    held = {name: context.uses.look_up(member_LEE) for name, member_LEE in members.items()}
    parts = [tuple(layers)] if context.quick else [(layer,) for layer in layers]
    with reordered(context.model, neuron_order(context.profile).order_LEI):
        whole_WS = _rise(context, everything, width, layers, "half width everywhere")
        alone = {
            name: np.stack([
                np.stack([
                    _rise(context, member_LEE, width, part, f"half width, {name}").sum(1),
                    held[name][list(part)].sum((0, 2, 3)),
                ], 1)
                for part in parts
            ])
            for name, member_LEE in members.items()
        }  # fmt: skip
    whole = {name: class_sums(member_LWSP, whole_WS) for name, member_LWSP in held.items()}
    everywhere_WX = np.stack([whole_WS.sum(1), np.full(len(whole_WS), float(whole_WS.shape[1]))], 1)
    found = {
        "uniform_increase": estimate(everywhere_WX, increase, context.seed),
        "under_uniform_pruning": compare(whole, context.seed),
        "pruned_alone": compare(alone, context.seed),
        "damage_of_all_uses": estimate(
            _columns(alone), lambda x: np.where(x[:, 2] > 0, x[:, 0] / np.where(x[:, 2] > 0, x[:, 2], 1), np.nan),
            context.seed,
        ),
    }  # fmt: skip
    shown: dict[str, Any] = plain(found)
    return shown


def _rise(
    context: StudyContext, member_LEE: NDArray[np.bool_], width: int, layers: Collection[int], label: str
) -> NDArray[np.float64]:
    """[W, S] rise of the loss, nats."""
    change = by_rule(label, half_width_where(member_LEE, width, layers))
    return context.bench.measure([change], label).rise_WS


def compare(sums: dict[str, NDArray[np.float64]], seed: int) -> dict[str, Any]:
    """Nats a use of both classes, and how often the rare one's the frequent one's is: over all layers, and in each.

    Args:
        sums: for "frequent" and "rare" [L, W, 2]: summed rise of the loss, uses.
        seed: of the intervals.
    """
    layers = []
    for layer in range(len(sums["frequent"])):
        per_layer = {name: sums_LW2[layer] for name, sums_LW2 in sums.items()}
        layers.append({"layer": layer, **_figures(per_layer, seed)})
    return {**_figures({name: sums_LW2.sum(0) for name, sums_LW2 in sums.items()}, seed), "layers": layers}


def _figures(sums: dict[str, NDArray[np.float64]], seed: int) -> dict[str, Any]:
    found: dict[str, Any] = {name: estimate(sums_W2, ratio(), seed) for name, sums_W2 in sums.items()}
    found["uses"] = {name: float(sums_W2[:, 1].sum()) for name, sums_W2 in sums.items()}
    both_W4 = np.concatenate([sums["frequent"], sums["rare"]], 1)
    return {**found, "ratio": estimate(both_W4, ratio_of_means, seed)}


def _columns(sums: dict[str, NDArray[np.float64]]) -> NDArray[np.float64]:
    return np.concatenate([sums["frequent"].sum(0), sums["rare"].sum(0)], 1)


def show(page: Page, result: dict[str, Any]) -> None:
    """Section of the page."""
    from coterie.study.widths.wording import interval, number, verdict

    whole, alone = result["under_uniform_pruning"], result["pruned_alone"]
    reading = verdict(
        alone["ratio"], 1, "so a use of a frequent combination is hurt more, as the paper has it",
        "so a use of a rare combination is hurt more, the opposite of the paper's reading",
        "so this small model does not tell them apart",
    )  # fmt: skip
    page.section(
        "Whom uniform pruning hurts (CRISP Fig. 1)",
        "The paper (Mixtral-8x7B, 50% uniform pruning): frequent combinations lose 2.3 times as much accuracy as rare "
        "ones.",
        f"Here, with 50% uniform width in order of importance (perplexity {interval(result['uniform_increase'])}), "
        f"tokens lose {number(whole['ratio'])} times as many nats where they use hot combinations as where they use "
        f"cold ones. Pruning only one class at a time, a use costs {number(alone['ratio'])} times as much, {reading}. "
        "Together the hot combinations' uses, which are more, cost "
        f"{number(result['damage_of_all_uses'])} times what the cold ones' do.",
    )
    quick = len(alone["layers"]) < len(whole["layers"])  # all layers were narrowed at once
    layers = [] if quick else list(zip(whole["layers"], alone["layers"], strict=True))
    page.table(
        ["layer", "hot, nats a use, everything pruned", "cold", "ratio (95%)", "hot, nats a use, pruned alone", "cold",
         "ratio (95%)"],
        [_row("all", whole, alone), *(_row(a["layer"], a, b) for a, b in layers)],
    )  # fmt: skip


def _row(name: Any, whole: dict[str, Any], alone: dict[str, Any]) -> list[Any]:
    from coterie.study.widths.wording import number

    return [
        name, *(number(whole[key]) for key in ("frequent", "rare", "ratio")),
        *(number(alone[key]) for key in ("frequent", "rare", "ratio")),
    ]  # fmt: skip
