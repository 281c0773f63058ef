"""What share of full expert bytes a width plan reads, and the weakest plan that stays within a share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.errors import BudgetError, ConfigError
from coterie.profile.model_profile import ModelProfile
from coterie.pruning.width_plan import WidthPlan
from coterie.pruning.widths import widths

_NEAR = 1e-4  # of all bytes: near enough to a budget
_MOST_TRIES = 60


@dataclass(frozen=True)
class ByteShare:
    """Expert bytes per token as a share of running every chosen expert at full width.

    Attributes:
        mean: over tokens and layers.
        standard_error: of the mean, by the spread over the sampled tokens.
        layer_L: [L], means over tokens.
    """

    mean: float
    standard_error: float
    layer_L: NDArray[np.float64]


def byte_share(plan: WidthPlan, profile: ModelProfile) -> ByteShare:
    """What a plan reads on a profile's sample of decisions.

    A neuron of an expert has the same bytes everywhere, so bytes are neurons.

    Raises:
        ConfigError: when the profile holds no sample.
    """
    num_layers, num_tokens, top_k = profile.sample_ids_LSK.shape
    if not num_tokens:
        raise ConfigError("the profile holds no sample of decisions; make it again with coterie profile")
    sum_S, layer_L = np.zeros(num_tokens), np.zeros(num_layers)
    for layer in range(num_layers):
        width_SK = widths(plan, layer, profile.sample_ids_LSK[layer], profile.sample_weights_LSK[layer])
        share_S = width_SK.sum(1) / (top_k * plan.width)
        sum_S += share_S
        layer_L[layer] = share_S.mean()
    token_S = sum_S / num_layers
    error = float(token_S.std(ddof=1) / math.sqrt(num_tokens)) if num_tokens > 1 else math.nan
    return ByteShare(float(token_S.mean()), error, layer_L)


def weakest_within(
    budget: float, profile: ModelProfile, plan_of: Callable[[float], WidthPlan], strongest: float
) -> float:
    """The smallest strength whose plan reads at most `budget`, to within 1e-4 of all bytes or one step of the sample.

    Args:
        budget: share of full expert bytes per token, in (0, 1].
        profile: its sample of decisions is what bytes are counted on.
        plan_of: the plan of a strength; 0 is the weakest, and a stronger one is nowhere wider.
        strongest: the largest strength that makes a difference.

    Raises:
        BudgetError: when the strongest plan still reads more.
    """
    low, high = 0.0, strongest
    if byte_share(plan_of(low), profile).mean <= budget:
        return low
    least = byte_share(plan_of(high), profile).mean
    if least > budget:
        raise BudgetError(
            f"a byte share of {budget:g} cannot be met: this policy reads at least {least:.3f} of full expert bytes "
            "with these settings; ask for more, or choose another policy"
        )
    for _ in range(_MOST_TRIES):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        share = byte_share(plan_of(middle), profile).mean
        if share > budget:
            low = middle
        else:
            high = middle
            if share >= budget - _NEAR:
                break
    return high
