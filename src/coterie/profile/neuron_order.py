"""The order of an expert's neurons by what a profile found of their importance."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import unknown_name
from coterie.profile.model_profile import ModelProfile

DEFAULT_VARIANT = "mean_abs_down"


def neuron_order(profile: ModelProfile, variant: str = DEFAULT_VARIANT) -> NDArray[np.integer[Any]]:
    """Neurons by falling importance, equal ones by number.

    Source: CRISP §3.2.2.

    Args:
        profile: what was measured.
        variant: which importance to go by.

    Returns:
        [L, E, I] int32: what stands at place r is neuron order[r] of the model that was profiled.

    Raises:
        ConfigError: for an importance that the profile does not hold.
    """
    if variant not in profile.importance:
        raise unknown_name("importance variant", variant, profile.importance)
    return np.argsort(-profile.importance[variant], axis=-1, kind="stable").astype(np.int32)
