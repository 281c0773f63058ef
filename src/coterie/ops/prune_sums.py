"""What pruning drops and saves, summed over the tokens of a layer beside the model: no host synchronisation."""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.ops.prune_destinations import kept_share, visits_per_device


def sums_of(
    device_TK: Tensor,
    weight_TK: Tensor,
    kept_TK: Tensor,
    home_T: Tensor | None,
    num_devices: int,
    counted_T: Tensor | None = None,
) -> Tensor:
    """Sums over the tokens of one layer in one forward call.

    Args:
        device_TK: [T, K] int64, device of each chosen expert.
        weight_TK: [T, K] float, routing weights before pruning.
        kept_TK: [T, K] bool.
        home_T: [T] int64, or None: no token has a home.
        num_devices: G.
        counted_T: [T] bool, which tokens count; None: all.

    Returns:
        [2 + 2 G] float64, as `stats_of` reads them.
    """
    visited_TG = visits_per_device(device_TK, kept_TK, num_devices)
    remote_TG = visited_TG
    if home_T is not None:
        away_TG = torch.arange(num_devices, device=home_T.device) != home_T[:, None]
        remote_TG = visited_TG & away_TG
    share_T, emptied_T = kept_share(weight_TK, kept_TK), ~kept_TK.any(-1)
    if counted_T is not None:  # what does not count may hold anything, NaN included
        share_T, emptied_T = share_T.masked_fill(~counted_T, 0), emptied_T & counted_T
        visited_TG, remote_TG = visited_TG & counted_T[:, None], remote_TG & counted_T[:, None]
    return torch.cat([
        share_T.sum(dtype=torch.float64)[None], emptied_T.sum(dtype=torch.float64)[None],
        visited_TG.sum(0, dtype=torch.float64), remote_TG.sum(0, dtype=torch.float64),
    ])  # fmt: skip
