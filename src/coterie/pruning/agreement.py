"""How often two ways of telling a pair's dominant expert name the same one."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from coterie.profile.model_profile import ModelProfile
from coterie.pruning.tiers import HOT, tiers


@dataclass(frozen=True)
class Agreement:
    """Two methods compared.

    Attributes:
        methods: their names.
        pairs: pairs that both have decided, over all layers.
        share: of the uses of those pairs, the share where both name the same expert; NaN without pairs.
        share_not_hot: the same among warm and cold pairs, where dominance decides a width.
    """

    methods: tuple[str, str]
    pairs: int
    share: float
    share_not_hot: float


def dominance_agreement(profile: ModelProfile) -> list[Agreement]:
    """Every two dominance methods of a profile compared, over the pairs both measured, weighted by uses.

    Source: CRISP section 3.3.2 knows ablation only. A method that scores both experts equally has not decided.
    """
    rows, columns = np.triu_indices(profile.spec.num_experts, 1)
    uses = profile.pairs_LEE[:, rows, columns]
    not_hot = tiers(profile.pairs_LEE)[:, rows, columns] != HOT
    signs = {
        name: np.nan_to_num(np.sign(table[:, rows, columns] - table[:, columns, rows]))
        for name, table in profile.dominance.items()
    }
    found = []
    for one, other in itertools.combinations(signs, 2):
        both = (signs[one] != 0) & (signs[other] != 0) & (uses > 0)
        same = both & (signs[one] == signs[other])
        shares = [
            float(uses[same & part].sum() / uses[both & part].sum()) if (both & part).any() else float("nan")
            for part in (np.ones_like(both), not_hot)
        ]
        found.append(Agreement((one, other), int(both.sum()), shares[0], shares[1]))
    return found
