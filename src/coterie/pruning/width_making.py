"""One policy's plans of any strength, made from a profile."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import BudgetError
from coterie.profile.model_profile import ModelProfile
from coterie.pruning.importance_order import NeuronOrder
from coterie.pruning.roles import Roles, roles
from coterie.pruning.tier_settings import TierSettings
from coterie.pruning.tiers import TIERS, tier_shares, tiers_from, uses_before
from coterie.pruning.width_plan import WidthPlan
from coterie.pruning.width_tables import num_steps

TIERED = ("crisp", "symmetric")
Tables = dict[str, NDArray[Any]]


class PlanMaker:
    """Holds what does not depend on the strength.

    A stronger plan is nowhere wider, and strength 0 runs everything (`crisp` and `symmetric`: all but unseen pairs).
    The strength is the threshold of `value`, `by-weight`, `drop` and `skip`, the share of bytes left out by `uniform`,
    and the share of the uses that is not hot for the others.
    """

    def __init__(
        self, profile: ModelProfile, policy: str, tiers: TierSettings, gamma: float, step: int, order: NeuronOrder
    ) -> None:
        self.profile, self.policy, self.tiers, self.gamma, self.step = profile, policy, tiers, gamma, step
        self.order = order
        self._roles: Roles | None = None
        self._fixed: Tables = {"step": np.array(step, dtype=np.int32)}
        if policy in TIERED or tiers.prices is not None:
            self._before_LEE = uses_before(profile.pairs_LEE)
            self._roles = roles(profile, tiers.dominance)
        if policy in TIERED:
            neurons_CR = np.ceil(tiers.shares(policy == "symmetric") * profile.width / step - 1e-9) * step
            self._fixed["width_CR"] = np.minimum(neurons_CR, profile.width).astype(np.int32)
        if policy == "value":
            # the first neuron of a step decides for all of it: a count of neurons, rounded up to whole steps
            self._fixed["value_LES"] = np.ascontiguousarray(self.order.value_LEI[:, :, ::step])
            if tiers.prices is not None:
                self._fixed["price_C"] = np.array(tiers.prices, dtype=np.float32)
                self._fixed["code_LEE"] = self._codes(tiers.alpha, tiers.beta)

    def strongest(self) -> float:
        """A strength beyond which nothing changes."""
        beyond = 1.001
        if self.policy == "value":
            return beyond * float(self.order.value_LEI.max()) / min(self.tiers.prices or (1.0,))
        if self.policy == "by-weight":
            return math.pow(num_steps(self.profile.width, self.step), 1 / self.gamma)
        if self.policy == "drop":
            return beyond * self.profile.spec.num_experts
        return beyond * self.profile.spec.top_k if self.policy == "skip" else 1.0

    def plan(self, strength: float) -> WidthPlan:
        """The plan, with nothing said of it yet."""
        profile, tables = self.profile, {**self._fixed, **self._strong(strength)}
        return WidthPlan(
            profile.spec, profile.identity, profile.width, self.order.order_LEI, self.policy, {}, tables
        )  # fmt: skip

    def _strong(self, strength: float) -> Tables:
        """The tables that depend on the strength."""
        width, step = self.profile.width, self.step
        if self.policy in TIERED:
            return {"code_LEE": self._codes(*self.tiers.bounds(strength))}
        if self.policy == "uniform":
            return {"width": np.array(self._uniform(1 - strength), dtype=np.int32)}
        if self.policy == "by-weight":
            share_S = np.arange(num_steps(width, step)) * step / width
            return {"cut_S": (strength * share_S ** (1 / self.gamma)).astype(np.float32)}
        if self.policy == "drop":
            mean_L1 = self.profile.load_LE.mean(1, keepdims=True)
            return {"width_LE": np.where(self.profile.load_LE >= strength * mean_L1, width, 0).astype(np.int32)}
        return {"threshold": np.array(strength, dtype=np.float32)}

    def _uniform(self, share: float) -> int:
        """The largest width within a share of the bytes."""
        width, step = self.profile.width, self.step
        if share >= 1:
            return width
        neurons = math.floor(share * width / step + 1e-9) * step
        if neurons < step:
            raise BudgetError(
                f"a byte share of {share:g} is less than one step of {step} of an expert's {width} neurons; ask for at "
                f"least {step / width:.3f}, or take a smaller step"
            )
        return neurons

    def _codes(self, alpha: float, beta: float) -> NDArray[np.uint8]:
        """Twice the tier, plus one where the higher id dominates: [L, E, E] uint8, symmetric."""
        assert self._roles is not None
        tier_LEE = tiers_from(self._before_LEE, alpha, beta)
        return np.asarray(tier_LEE * 2 + self._roles.higher_LEE, dtype=np.uint8)

    def describe(self, strength: float) -> dict[str, Any]:
        """What the plan of a strength is made from, ready for JSON."""
        told: dict[str, Any] = {"variant": self.order.variant, "unseen_experts": self.order.unseen, "step": self.step}
        if self.policy == "value":
            told |= {"layers": self.order.layers, "layer_scale": self.order.scale_L.tolist()}
        if self.policy == "uniform":
            told["width"] = self._uniform(1 - strength)
        elif self.policy not in TIERED:
            told["threshold"] = strength
        if self.policy == "by-weight":
            told["gamma"] = self.gamma
        if self.policy == "drop":
            told["experts_kept"] = float((self._strong(strength)["width_LE"] > 0).mean())
        if self._roles is not None:
            told |= self._describe_tiers(strength)
        return told

    def _describe_tiers(self, strength: float) -> dict[str, Any]:
        assert self._roles is not None
        tiered = self.policy in TIERED
        alpha, beta = self.tiers.bounds(strength) if tiered else (self.tiers.alpha, self.tiers.beta)
        told: dict[str, Any] = {
            "alpha": alpha, "beta": beta,
            "tiers": tier_shares(tiers_from(self._before_LEE, alpha, beta), self.profile.pairs_LEE),
        }  # fmt: skip
        if tiered:
            told |= {"dominance": self._roles.method, "dominance_decided_by": self._roles.decided_by}
            rows = zip(TIERS, self._fixed["width_CR"].tolist(), strict=True)
            told["widths"] = {tier: {"dominant": row[0], "auxiliary": row[1]} for tier, row in rows}
        if self.tiers.prices is not None:
            told["prices"] = dict(zip(TIERS, map(float, self.tiers.prices), strict=True))
        return told
