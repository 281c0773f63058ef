"""Settings whose loss depends on what is cached: chosen for every budget on calibration text, measured on held-out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.bench.offload.bench_model import BenchShape
from coterie.bench.offload.lanes import Lane, Ran, run_lanes
from coterie.bench.offload.plans import ALLOWED, Measured, Plans, upper
from coterie.errors import BudgetError
from coterie.models.rounding import rounded
from coterie.progress import Progress, silent
from coterie.pruning.width_planning import plan_widths
from coterie.study.measure import Bench, bootstrap

CACHED, CACHED_8_BITS, SKIPPED = "value 1.5% + cached", "value 1.5% + cached in 8 bits", "skip-on-miss"
_TRIES = 6
_SEQUENCES = 4
_CALIBRATION_WINDOWS = 24
_LARGEST_F = 1.6
_LEAST_BYTES = 0.05


@dataclass(eq=False)
class CachedPlans:
    """Per budget the strongest setting that stays within 1.5%, by the upper end of its interval on calibration text.

    Args:
        plans: widths that do not depend on what is cached.
        shape: of the model that will be timed.
        shares: budgets, of its experts as they are.
        progress: told of every pass.
    """

    plans: Plans
    shape: BenchShape
    shares: tuple[float, ...]
    progress: Progress = silent
    _made: dict[str, dict[float, Measured]] = field(default_factory=dict)

    def get(self, name: str, share: float) -> Measured:
        """What `name` costs at a budget, and what it chose."""
        if name not in self._made:
            bits = 8 if name == CACHED_8_BITS else None
            if name in (CACHED, CACHED_8_BITS):
                plain = self.plans.get("value 1.5%").plan
                first = 1.0 if plain is None else float(plain.settings["expected_bytes"])
                self._made[name] = self._choose(self._cached, (_LEAST_BYTES, first, 1.0), bits)
            else:
                self._made[name] = self._choose(self._skipped, (-_LARGEST_F, -_LARGEST_F / 2, 0.0), bits)
        return self._made[name][share]

    def to_json(self) -> Mapping[str, Any]:
        """All that were made."""
        return {
            name: {f"{share:.0%}": {**each.to_json(), "options": dict(each.options)} for share, each in own.items()}
            for name, own in self._made.items()
        }

    def _cached(self, share: float, strength: float) -> Lane:
        try:
            plan = plan_widths(self.plans.context.learnt, "value", bytes=strength)
        except BudgetError:  # no plan reads so little: full width, which is within anything but reads all
            plan = None
        return Lane(share, plan, use_cached=plan is not None)

    def _skipped(self, share: float, strength: float) -> Lane:
        return Lane(share, None, skip_misses=-strength)

    def _choose(
        self, lane: Callable[[float, float], Lane], strengths: tuple[float, float, float], bits: int | None
    ) -> dict[float, Measured]:
        """By bisection for all budgets at once.

        Args:
            lane: of a budget and a strength; a larger strength costs less loss.
            strengths: the least, the first to try, and one that changes nothing.
            bits: of the store.
        """
        low, tried, high = (dict.fromkeys(self.shares, strength) for strength in strengths)
        costs = dict.fromkeys(self.shares, math.nan)
        for _ in range(_TRIES):
            self._calibrate(lane, tried, bits, low, high, costs)
            tried = {share: (low[share] + high[share]) / 2 for share in self.shares}
        if any(map(math.isnan, costs.values())):  # nothing was little enough there: what changes nothing is measured
            self._calibrate(lane, high, bits, low, high, costs)
        chosen = {share: lane(share, high[share]) for share in self.shares}
        ran = self._run(chosen, bits, calibration=False)
        return {share: self._measured(chosen[share], each, costs[share]) for share, each in ran.items()}

    def _calibrate(
        self, lane: Callable[[float, float], Lane], tried: Mapping[float, float], bits: int | None,
        low: dict[float, float], high: dict[float, float], costs: dict[float, float],
    ) -> None:  # fmt: skip
        """Measure strengths on calibration text; what costs little enough becomes the new `high`, others the `low`."""
        ran = self._run({share: lane(share, tried[share]) for share in self.shares}, bits, calibration=True)
        for share, each in ran.items():
            rise_WS = self._rise(each, self.plans.context.calibration)
            if tried[share] == high[share] or upper(rise_WS) <= ALLOWED["value 1.5%"]:
                high[share], costs[share] = tried[share], math.expm1(rise_WS.mean())
            else:
                low[share] = tried[share]

    def _measured(self, lane: Lane, ran: Ran, calibrated: float) -> Measured:
        rise_WS = self._rise(ran, self.plans.context.bench)
        options: dict[str, Any] = {"use_cached": True} if lane.use_cached else {}
        if lane.skip_misses:
            options["skip_misses"] = lane.skip_misses
        return Measured(
            lane.plan, math.expm1(rise_WS.mean()), bootstrap(rise_WS, self.plans.context.seed), calibrated,
            ran.decisions, options,
        )  # fmt: skip

    def _rise(self, ran: Ran, bench: Bench) -> NDArray[np.float64]:
        """[W, S] of the windows that count."""
        base_WS = bench.base_WS
        if bench is self.plans.context.calibration:
            base_WS = base_WS[self._calibration()]
        rise_WS: NDArray[np.float64] = (ran.nll_WS - base_WS)[~ran.warm_W]
        return rise_WS

    def _calibration(self) -> NDArray[np.int64]:
        """Which calibration windows are decoded, evenly over all: token by token takes long."""
        count = len(self.plans.context.calibration.ids_WN)
        picked: NDArray[np.int64] = np.linspace(0, count - 1, min(count, _CALIBRATION_WINDOWS)).round().astype(np.int64)
        return picked

    def _run(self, lanes: Mapping[float, Lane], bits: int | None, calibration: bool) -> dict[float, Ran]:
        context, layout = self.plans.context, self.shape.layout_in(bits)
        own = [replace(lane, share=self.shape.share_in(lane.share, bits)) for lane in lanes.values()]
        ids_WN = context.calibration.ids_WN[self._calibration()] if calibration else context.bench.ids_WN
        sequences = max(count for count in range(1, _SEQUENCES + 1) if len(ids_WN) % count == 0)
        with nullcontext() if bits is None else rounded(context.model):
            ran = run_lanes(context.model, ids_WN, own, layout, context.profile.width, sequences, self.progress)
        return dict(zip(lanes, ran, strict=True))
