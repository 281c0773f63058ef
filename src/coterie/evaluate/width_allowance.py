"""The narrowest width plan whose perplexity on calibration text stays within an allowance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any

from coterie.errors import BudgetError, ConfigError
from coterie.evaluate.change import Change
from coterie.evaluate.changes import widths
from coterie.evaluate.perplexity import perplexity
from coterie.evaluate.text import EncodedText
from coterie.progress import Progress, silent
from coterie.pruning.width_plan import WidthPlan

_TRIES = 7  # the byte share is found to within 2**-7


@dataclass(frozen=True)
class Tried:
    """One plan on the calibration text.

    Attributes:
        bytes: share of full expert bytes per token that the plan expects.
        increase: of perplexity over the full model's, as a share of it.
    """

    bytes: float
    increase: float


def plan_within(
    model: Any,
    texts: Sequence[EncodedText],
    plan_of: Callable[[float], WidthPlan],
    max_increase: float,
    window: int,
    stride: int,
    *,
    progress: Progress = silent,
) -> WidthPlan:
    """The plan with the fewest bytes, to 1/128 of all, that raises perplexity by at most `max_increase`.

    Source: beyond the paper. Perplexity is taken to fall as bytes rise, so the share is found by bisection; whatever
    it did, the plan that is returned was measured and is within the allowance.

    Args:
        model: the model that was profiled.
        texts: calibration text: what is found holds on it, and about as well on text of its kind.
        plan_of: the plan within a share of the bytes; raises BudgetError where there is none.
        max_increase: share of the full model's perplexity, e.g. 0.01.
        window: tokens of a window.
        stride: tokens from one window's end to the next.
        progress: told of every batch.

    Returns:
        The plan; `settings["allowance"]` holds what was measured.

    Raises:
        ConfigError: for an allowance that is not positive, or a plan of another model.
        BudgetError: when even the widest plan raises perplexity by more.
    """
    if not 0 < max_increase < float("inf"):
        raise ConfigError(f"a perplexity increase of {max_increase:g} is not positive; write it like 1% or 0.01")
    full = _perplexity(model, texts, window, stride, (), progress)
    tried: list[Tried] = []

    def measure(share: float) -> tuple[WidthPlan, bool]:
        plan = plan_of(share)
        changed = _perplexity(model, texts, window, stride, [widths(model, plan)], progress)
        tried.append(Tried(float(plan.settings["expected_bytes"]), changed / full - 1))
        return plan, tried[-1].increase <= max_increase

    best, low, high = None, 0.0, 1.0
    for _ in range(_TRIES):
        middle = (low + high) / 2
        try:
            plan, within = measure(middle)
        except BudgetError:  # this policy cannot read so little
            low = middle
            continue
        if within:
            best, high = (plan, tried[-1]), middle
        else:
            low = middle
    if best is None:
        plan, within = measure(1.0)
        best = (plan, tried[-1])
        if not within:
            raise BudgetError(
                f"the widest plan of policy {plan.policy} raises perplexity by {tried[-1].increase:.2%}, more than the "
                f"{max_increase:.2%} allowed; allow more, choose another policy or profile more text"
            )
    plan, found = best
    allowance = {
        "max_increase": max_increase, "increase": found.increase, "full_perplexity": full,
        "tokens": sum(len(text.ids) - 1 for text in texts), "window": window, "stride": stride,
        "texts": [text.name for text in texts], "tried": [vars(each) for each in tried],
    }  # fmt: skip
    asked = {"max_ppl_increase": max_increase}
    return replace(plan, settings={**plan.settings, "asked": asked, "allowance": allowance})


def _perplexity(
    model: Any, texts: Sequence[EncodedText], window: int, stride: int, changes: Sequence[Change], progress: Progress
) -> float:
    parts = [perplexity(model, text, window, stride, changes=changes, progress=progress) for text in texts]
    return reduce(add, parts).perplexity
