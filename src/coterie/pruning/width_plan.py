"""How wide every expert runs: a policy's tables, for one model whose neurons stand in order of importance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.spec import MoESpec


@dataclass(frozen=True)
class WidthPlan:
    """A choice of execution widths. Width k runs the first k neurons of `order_LEI`. Source: CRISP §3.2, §3.3.

    Attributes:
        spec: the model's routing.
        identity: which weights it is for (`models/identity.py`); the same for a model and its reordered copy.
        width: neurons of one expert, I; the widest a plan can choose.
        order_LEI: [L, E, I] integers: the importance order; neuron r of the reordered expert is neuron order[r] of
            the original.
        policy: its name.
        settings: what the tables were made from, ready for JSON.
        tables: the policy's arrays, by name; small (under 2 MB for Mixtral-8x7B's shape).
    """

    spec: MoESpec
    identity: str
    width: int
    order_LEI: NDArray[np.integer[Any]]
    policy: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    tables: Mapping[str, NDArray[Any]] = field(default_factory=dict)
