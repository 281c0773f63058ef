"""From a profile to a width plan: the tables of a policy at a given strength, or within a share of the bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from coterie.errors import ConfigError, unknown_name
from coterie.profile.model_profile import ModelProfile
from coterie.pruning.importance_order import neuron_order
from coterie.pruning.tier_settings import TierSettings
from coterie.pruning.width_budget import byte_share, weakest_within
from coterie.pruning.width_making import TIERED, PlanMaker
from coterie.pruning.width_plan import WidthPlan
from coterie.pruning.width_tables import POLICIES, check_plan, default_step

ORDER_KEY = "coterie_neuron_order"  # of `models/identity.py`, which modules that work without a model do not import
PROFILED_ORDER = "neuron_order"  # what a profile's provenance calls the order its model was in; None: its original
_THRESHOLDS = {  # what a threshold means, for messages
    "value": "of weight x importance, e.g. 0.1",
    "by-weight": "the share of a token's largest weight that brings full width, e.g. 1",
    "drop": "the share of the mean load below which an expert is dropped, e.g. 0.5",
    "skip": "F of weight < F/K, e.g. 0.5",
}


def plan_widths(
    profile: ModelProfile,
    policy: str = "value",
    *,
    threshold: float | None = None,
    bytes: float | None = None,
    alpha: float = 0.6,
    beta: float = 0.9,
    warm_aux: float = 0.5,
    cold_aux: float = 0.0,
    role_widths: Sequence[tuple[float, float]] | None = None,
    gamma: float = 0.7,
    prices: Sequence[float] | None = None,
    variant: str | None = None,
    layers: str | None = None,
    dominance: str | None = None,
    step: int | None = None,
) -> WidthPlan:
    """Execution widths by a policy (see `pruning.widths`), in order of neuron importance.

    With `bytes` the weakest plan is taken that reads no more on the profile's sample. `crisp` and `symmetric` take
    their tiers as given; with `bytes`, alpha and beta move together, with (1 - beta) / (1 - alpha) as given.

    Source: CRISP §3.2, §3.3; `value` and `by-weight` go beyond the paper.

    Args:
        profile: of the model.
        policy: value, crisp, symmetric, uniform, by-weight, drop or skip.
        threshold: how strong it is, not negative; 0 runs everything: lambda of `value`, F of `skip`, for `by-weight`
            the share of a token's largest weight that brings full width, for `drop` the share of the layer's mean
            load below which an expert is dropped. The others have none.
        bytes: share of full expert bytes per token to stay within, in (0, 1].
        alpha: share of the uses that hot combinations hold.
        beta: share of the uses that hot and warm ones hold.
        warm_aux: width of a warm combination's auxiliary expert, as a share of I.
        cold_aux: width of a cold one's.
        role_widths: (dominant, auxiliary) for hot, warm and cold, as shares of I, in place of the two.
        gamma: exponent of `by-weight`.
        prices: for `value`, what the bytes of a hot, a warm and a cold combination cost, e.g. (1, 1.5, 2).
        variant: of importance, a name in the profile; None: the best one there.
        layers: for `value`, how layers compare: "loss" (by gradients) or "equal"; None: loss where it can be told.
        dominance: who tells dominance, a name in the profile; None: the best one there.
        step: widths are multiples of so many neurons; None: see `default_step`.

    Returns:
        The plan; its settings hold what it was made from and the bytes to expect.

    Raises:
        ConfigError: for settings that cannot be, or that the policy would ignore.
        BudgetError: when the policy cannot read so little.
    """
    settings = TierSettings(alpha, beta, warm_aux, cold_aux, role_widths, prices, dominance)
    _check_asked(policy, threshold, bytes)
    _check_used(profile, policy, settings, gamma, step)
    if layers is not None and policy != "value":
        raise ConfigError(f"layers belongs to the policy value, not to {policy}; leave it out")
    order = neuron_order(profile, variant, layers)
    maker = PlanMaker(profile, policy, settings, gamma, step or default_step(profile.width), order)
    if policy == "uniform":
        strength = 1 - float(bytes or 0)
    elif bytes is not None:
        strength = weakest_within(bytes, profile, maker.plan, maker.strongest())
    else:
        strength = 1 - alpha if policy in TIERED else float(threshold or 0)
    asked = {name: value for name, value in (("threshold", threshold), ("bytes", bytes)) if value is not None}
    plan = maker.plan(strength)
    told = {"asked": asked, **maker.describe(strength), **_expected(plan, profile), **_about(profile)}
    plan = replace(plan, settings=told)
    check_plan(plan)
    return plan


def _expected(plan: WidthPlan, profile: ModelProfile) -> dict[str, Any]:
    """The share of full expert bytes that a token is to read."""
    share = byte_share(plan, profile)
    return {
        "expected_bytes": share.mean,
        "expected_bytes_standard_error": None if math.isnan(share.standard_error) else share.standard_error,
        "expected_bytes_by_layer": share.layer_L.tolist(),
        "sample_tokens": int(profile.sample_ids_LSK.shape[1]),
    }


def _about(profile: ModelProfile) -> dict[str, Any]:
    """The profile's origin, and the order the profiled model was in, unless its original: ours is relative to it."""
    about: dict[str, Any] = {"profile": {**profile.provenance, "tokens": profile.num_tokens}}
    return about | ({ORDER_KEY: order} if (order := profile.provenance.get(PROFILED_ORDER)) else {})


def _check_asked(policy: str, threshold: float | None, share: float | None) -> None:
    """Raise unless the policy is known and its strength is asked for in one way that it has."""
    if policy not in POLICIES:
        raise unknown_name("width policy", policy, POLICIES)
    if threshold is not None and share is not None:
        raise ConfigError("a threshold and a share of the bytes exclude each other; give one")
    if share is not None and not 0 < share <= 1:
        raise ConfigError(f"a byte share of {share:g} is not within 0 and 1 (0 excluded); write it like 0.6")
    if threshold is not None and policy not in _THRESHOLDS:
        instead = "a share of the bytes" if policy == "uniform" else "alpha and beta, or a share of the bytes"
        raise ConfigError(f"the policy {policy} has no threshold; give {instead}")
    if threshold is not None and not 0 <= threshold < math.inf:
        raise ConfigError(f"a threshold of {threshold:g} is no number >= 0; it is {_THRESHOLDS[policy]}")
    if threshold is None and share is None and policy not in TIERED:
        also = f", or a threshold: {_THRESHOLDS[policy]}" if policy in _THRESHOLDS else ""
        raise ConfigError(f"how strong should the policy {policy} be? give a share of the bytes, e.g. 0.6{also}")


def _check_used(profile: ModelProfile, policy: str, tiers: TierSettings, gamma: float, step: int | None) -> None:
    """Raise for settings that cannot be, or that the policy would ignore."""
    plain = TierSettings()
    if tiers.prices is not None and policy != "value":
        raise ConfigError(f"prices belong to the policy value, not to {policy}; leave them out")
    roles = ("warm_aux", "cold_aux", "role_widths", "dominance")
    ignored = [name for name in roles if policy not in TIERED and getattr(tiers, name) != getattr(plain, name)]
    ignored += [name for name in ("alpha", "beta") if getattr(tiers, name) != getattr(plain, name)
                and policy not in TIERED and tiers.prices is None]  # fmt: skip
    if ignored:
        raise ConfigError(
            f"{ignored[0].replace('_', '-')} belongs to the policies crisp and symmetric, not to {policy}"
        )
    if tiers.role_widths is not None and (tiers.warm_aux, tiers.cold_aux) != (plain.warm_aux, plain.cold_aux):
        raise ConfigError("role widths name every width; leave warm-aux and cold-aux out")
    if not 0 < gamma < math.inf:
        raise ConfigError(f"gamma {gamma:g} is not positive; the default is 0.7")
    if gamma != 0.7 and policy != "by-weight":
        raise ConfigError(f"gamma belongs to the policy by-weight, not to {policy}; leave it out")
    if step is not None and not 1 <= step <= profile.width:
        raise ConfigError(f"a step of {step} neurons is not within 1 and the expert's {profile.width}")
    if (policy in TIERED or tiers.prices is not None) and profile.spec.top_k < 2:
        raise ConfigError(
            f"{profile.spec.model} chooses one expert a token, so experts have no company; take uniform or value"
        )
