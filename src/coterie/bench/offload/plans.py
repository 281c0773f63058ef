"""Width plans at a given loss: chosen on calibration text, measured on held-out text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.bench.offload.decisions import Decisions, record_decisions
from coterie.bench.offload.systems import ROUNDED
from coterie.errors import BudgetError
from coterie.evaluate.changes import rounding
from coterie.models.rounding import rounded
from coterie.pruning.width_plan import WidthPlan
from coterie.pruning.width_planning import plan_widths
from coterie.study.measure import bootstrap
from coterie.study.widths.context import Point, StudyContext, StudySize

SIZE = StudySize(window=256, profile_characters=12_000, windows=24, calibration_windows=48, learning_share=0.75)
ALLOWED = {"value 1.5%": 0.015, "value 3.6%": 0.036}
Cost = Callable[[NDArray[np.float64]], float]
"""[W, S] rise of the loss, nats -> increase of perplexity."""
_ALPHA, _BETA = 0.6, 0.9
_TRIES = 7


def upper(rise_WS: NDArray[np.float64]) -> float:
    """The upper end of the 95% interval of the increase."""
    return bootstrap(rise_WS)[1]


def _mean(rise_WS: NDArray[np.float64]) -> float:
    return math.expm1(float(rise_WS.mean()))


@dataclass(frozen=True, eq=False)
class Measured:
    """Widths, what they cost on text that nothing was chosen on, and what the model chose there meanwhile.

    Attributes:
        plan: the widths; None: full.
        increase: of perplexity on held-out text, as a share of the full model's.
        interval: 95% interval of it, windows resampled.
        calibration_increase: the same on calibration text, where the plan was chosen; None: not measured.
        decisions: of the held-out text, window after window.
        options: further arguments of `coterie.offload` that belong to it.
    """

    plan: WidthPlan | None
    increase: float
    interval: tuple[float, float]
    calibration_increase: float | None
    decisions: Decisions
    options: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Figures, ready for JSON."""
        settings = {} if self.plan is None else self.plan.settings
        return {
            "perplexity_increase": self.increase, "interval_95": list(self.interval),
            "calibration_increase": self.calibration_increase,
            "settings": {key: settings[key] for key in ("threshold", "alpha", "beta", "expected_bytes")
                         if key in settings},
        }  # fmt: skip


@dataclass(eq=False)
class Plans:
    """Widths by name, made when first asked for."""

    context: StudyContext
    _made: dict[str, Measured] = field(default_factory=dict)
    _tried: dict[float, NDArray[np.float64] | None] = field(default_factory=dict)

    def get(self, name: str | None) -> Measured:
        """Widths of this name, see `systems.width_systems`; None: full width."""
        key = name or ""
        if key not in self._made:
            self._made[key] = self._rounded() if name == ROUNDED else self._measure(self._plan(name))
        return self._made[key]

    def made(self) -> Mapping[str, Measured]:
        """All that were asked for, but full width."""
        return {name: each for name, each in self._made.items() if name}

    def _rounded(self) -> Measured:
        """Full width in eight bits."""
        context = self.context
        with rounded(context.model):
            decisions = record_decisions(context.model, context.bench.ids_WN)
        held_out, calibrated = (each.measure([rounding()], ROUNDED) for each in (context.bench, context.calibration))
        return Measured(
            None, held_out.increase, held_out.interval(context.seed), calibrated.increase, decisions
        )  # fmt: skip

    def _plan(self, name: str | None) -> WidthPlan | None:
        if name is None:
            return None
        if name == "crisp":
            return plan_widths(
                self.context.profile, "crisp", alpha=_ALPHA, beta=_BETA, dominance=self.context.dominance
            )  # fmt: skip
        if name in ALLOWED:
            return self.value_within(ALLOWED[name], upper)
        return self.value_within(self.get("crisp").calibration_increase or 0.0, _mean)

    def value_within(self, allowed: float, of: Cost) -> WidthPlan:
        """The `value` plan of the fewest bytes, to 1/128 of all, that costs at most `allowed` on calibration text.

        Args:
            allowed: increase of perplexity.
            of: what of the measured increase must be within: its mean, or the upper end of its interval, so that it
                is likely to hold on other text.
        """
        low, high = 0.0, 1.0
        for _ in range(_TRIES):
            middle = (low + high) / 2
            rise_WS = self._calibrated(middle)
            if rise_WS is not None and of(rise_WS) <= allowed:
                high = middle
            else:
                low = middle
        return plan_widths(self.context.learnt, "value", bytes=high)

    def _calibrated(self, share: float) -> NDArray[np.float64] | None:
        """[W, S] what the plan within a byte share costs on calibration text; None where there is no such plan."""
        if share not in self._tried:
            self._tried[share] = None
            with suppress(BudgetError):
                plan = plan_widths(self.context.learnt, "value", bytes=share)
                self._tried[share] = self._evaluate(plan, calibration=True).measured.rise_WS
        return self._tried[share]

    def _evaluate(self, plan: WidthPlan, calibration: bool = False) -> Point:
        return self.context.evaluate(plan, self.context.calibration if calibration else None)

    def _measure(self, plan: WidthPlan | None) -> Measured:
        decisions = record_decisions(self.context.model, self.context.bench.ids_WN, plan)
        if plan is None:
            return Measured(None, 0.0, (0.0, 0.0), 0.0, decisions)
        held_out = self._evaluate(plan).measured
        calibrated = self._evaluate(plan, calibration=True).measured.increase
        return Measured(plan, held_out.increase, held_out.interval(self.context.seed), calibrated, decisions)
