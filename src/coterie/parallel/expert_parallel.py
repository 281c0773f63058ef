"""`coterie.expert_parallel`: a model spread over the ranks of a group; importing it takes no torch, calling it does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from coterie.errors import ConfigError, InfeasiblePlacement
from coterie.models.backend import import_transformers
from coterie.models.load import resolve
from coterie.placement.copies import FEWEST_DEVICES, check_rule
from coterie.placement.placement import Placement

if TYPE_CHECKING:
    import torch

    from coterie.parallel.comms import Comms
    from coterie.parallel.model import ExpertParallel


def expert_parallel(
    model: str | Path, placement: Placement, comms: Comms, *, dtype: torch.dtype | None = None, two_hop: bool = False,
    dispatch: str | None = None,
) -> ExpertParallel:  # fmt: skip
    """One rank's part of a model: attention and all else of its own tokens, and its own experts for everyone's.

    Every rank has the whole model but the experts, and runs its own prompts through it. In each MoE layer tokens travel
    to the ranks where their experts are, so all ranks must run the model equally often: one that has nothing to run
    calls `ExpertParallel.drain`. Hooks (`record`, `prune_destinations`) work as ever; what they give weight zero is not
    sent.

    Source: CAP §II-C.

    Args:
        model: a folder, a shipped model's name, or a hub id.
        placement: of this model, on as many devices as the group has ranks.
        comms: the group.
        dtype: element type; None: the checkpoint's own.
        two_hop: cross to each other node once, and go on from there (`parallel.two_hop`).
        dispatch: where experts have copies, the rule by which tokens choose one (`placement.copies.RULES`); None: the
            rule that the copies were placed for.

    Raises:
        BackendUnavailable: without torch or transformers.
        CheckpointError: when the model cannot be read, or its experts are quantised.
        ConfigError: when the group has another size than the placement, or for an unknown rule.
        InfeasiblePlacement: when the placement is for another model.
    """
    import_transformers()
    from coterie.parallel.load import load_rank
    from coterie.parallel.model import ExpertParallel

    require_size(placement, comms.size)
    check_rule(dispatch or FEWEST_DEVICES)
    return ExpertParallel(load_rank(resolve(model), placement, comms.rank, dtype), placement, comms, two_hop, dispatch)


def require_size(placement: Placement, size: int) -> None:
    """Refuse a placement for another number of devices than there are ranks.

    Raises:
        ConfigError: naming both.
        InfeasiblePlacement: when there are more ranks than experts.
    """
    devices, experts = placement.topology.num_devices, placement.spec.num_experts
    if size > experts:
        raise InfeasiblePlacement(f"{size} ranks for {experts} experts leave ranks empty; start at most {experts}")
    if size != devices:
        raise ConfigError(
            f"{size} ranks, but the placement is for {devices} devices ({placement.topology}); start {devices} with "
            f"torchrun --nproc-per-node, or place for --topology {size}"
        )
