"""Width plans at a given loss: chosen on calibration text, measured on held-out text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from coterie.bench.offload.decisions import Decisions, record_decisions
from coterie.errors import BudgetError
from coterie.pruning.width_plan import WidthPlan
from coterie.pruning.width_planning import plan_widths
from coterie.study.widths.context import Point, StudyContext, StudySize

SIZE = StudySize(window=256, profile_characters=12_000, windows=24, calibration_windows=16)
ALLOWED = {"value 1.5%": 0.015, "value 3.6%": 0.036}
_ALPHA, _BETA = 0.6, 0.9
_TRIES = 7


@dataclass(frozen=True, eq=False)
class Measured:
    """Widths, what they cost on text that nothing was chosen on, and what the model chose there meanwhile.

    Attributes:
        plan: the widths; None: full.
        increase: of perplexity on held-out text, as a share of the full model's.
        interval: 95% interval of it, windows resampled.
        calibration_increase: the same on calibration text, where the plan was chosen; None: not measured.
        decisions: of the held-out text, window after window.
    """

    plan: WidthPlan | None
    increase: float
    interval: tuple[float, float]
    calibration_increase: float | None
    decisions: Decisions

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
    _tried: dict[float, float] = field(default_factory=dict)

    def get(self, name: str | None) -> Measured:
        """Widths of this name, see `systems.width_systems`; None: full width."""
        key = name or ""
        if key not in self._made:
            self._made[key] = self._measure(self._plan(name))
        return self._made[key]

    def made(self) -> Mapping[str, Measured]:
        """All that were asked for, but full width."""
        return {name: each for name, each in self._made.items() if name}

    def _plan(self, name: str | None) -> WidthPlan | None:
        if name is None:
            return None
        if name == "crisp":
            return plan_widths(
                self.context.profile, "crisp", alpha=_ALPHA, beta=_BETA, dominance=self.context.dominance
            )  # fmt: skip
        allowed = ALLOWED.get(name)
        if allowed is None:
            allowed = self.get("crisp").calibration_increase or 0.0
        return self.value_within(allowed)

    def value_within(self, allowed: float) -> WidthPlan:
        """The `value` plan of the fewest bytes that costs at most `allowed` on calibration text, to 1/128 of all."""
        low, high = 0.0, 1.0
        for _ in range(_TRIES):
            middle = (low + high) / 2
            if self._calibrated(middle) <= allowed:
                high = middle
            else:
                low = middle
        return plan_widths(self.context.profile, "value", bytes=high)

    def _calibrated(self, share: float) -> float:
        """What the plan within a byte share costs on calibration text; more than anything where there is none."""
        if share not in self._tried:
            try:
                plan = plan_widths(self.context.profile, "value", bytes=share)
                self._tried[share] = self._evaluate(plan, calibration=True).measured.increase
            except BudgetError:
                self._tried[share] = float("inf")
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
