"""A layer's decisions pruned by whichever rule, in torch; `prune_destinations_triton` has the same function."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.ops.prune_destinations import Links, apply, cap, naive, priced
from coterie.pruning.destinations import Cap, Naive, Priced


@dataclass(frozen=True)
class Pruned:
    """What pruning made of a layer's decisions, [T, K] each.

    Attributes:
        weight_TK: the routing weights after it, zero for dropped slots (see `prune_destinations.apply`).
        kept_TK: bool, which slots stay kept.
        device_TK: int64, the device of each chosen expert.
    """

    weight_TK: Tensor
    kept_TK: Tensor
    device_TK: Tensor


def require_supported(top_k: int, dtype: torch.dtype) -> None:
    """Everything is: any number of experts a token, weights of any dtype."""


def prune(
    rule: Cap | Naive | Priced,
    ids_TK: Tensor,
    weight_TK: Tensor,
    device_E: Tensor,
    home_T: Tensor | None,
    links: Links,
    theta_G: Tensor | None = None,
    before_TK: Tensor | None = None,
    *,
    renormalise: bool = False,
) -> Pruned:
    """A layer's decisions, pruned by any rule.

    Args:
        rule: the rule, with its strength; the thetas of `Priced` are read from `theta_G`.
        ids_TK: [T, K] int64, the chosen experts.
        weight_TK: as for `prune_destinations.cap`, like the arguments not named here.
        device_E: [E] int64, the device of each expert.
        home_T: as there.
        links: as there.
        theta_G: as for `prune_destinations.priced`; for that rule alone.
        before_TK: as there.
        renormalise: as for `prune_destinations.apply`.

    Returns:
        Weights, what is kept, and devices.
    """
    device_TK = torch.index_select(device_E, 0, ids_TK.reshape(-1)).view(ids_TK.shape)
    if isinstance(rule, Priced):
        assert theta_G is not None, "priced needs thetas"
        kept_TK = priced(device_TK, weight_TK, home_T, links, theta_G, rule.floor, before_TK)
    elif isinstance(rule, Cap):
        kept_TK = cap(device_TK, weight_TK, home_T, links, rule.p, before_TK)
    else:
        kept_TK = naive(weight_TK, rule.p, before_TK)
    return Pruned(apply(weight_TK, kept_TK, renormalise), kept_TK, device_TK)
