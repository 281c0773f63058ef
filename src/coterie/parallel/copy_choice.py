"""Which copy of an expert a token uses: chosen on the rank where the token is, before it travels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from coterie.placement.copies import Copies, Dispatch, check_rule, rule_of
from coterie.placement.placement import Placement


class CopyChoice:
    """Turns the experts of one rank's tokens into copies, in one layer; without copies it does nothing.

    A rank sees its own tokens only, so the loads that the rule fewest-devices looks at are theirs. The rules run on the
    host: where ids are on another device, choosing waits for them.

    Args:
        rank: of the tokens, which is their home.
        dispatch: the rule on the layer's copies; None: there are none.
    """

    def __init__(self, rank: int, dispatch: Dispatch | None) -> None:
        self._rank, self._dispatch = rank, dispatch

    def __call__(self, ids_TK: Tensor) -> Tensor:
        """The number of the chosen copy of each expert, [T, K] int64, -1 where `ids_TK` is."""
        if self._dispatch is None:
            return ids_TK
        there_TK = ids_TK.to("cpu", torch.int64).contiguous()
        kept_TK, home_T = there_TK >= 0, torch.full((len(ids_TK),), self._rank)
        chosen_TK = torch.from_numpy(self._dispatch.choose(there_TK.numpy(), kept_TK.numpy(), home_T.numpy()))
        return chosen_TK.to(torch.int64).masked_fill(~kept_TK, -1).to(ids_TK.device)


def copy_choices(placement: Placement, layers: Sequence[int], rank: int, rule: str | None = None) -> list[CopyChoice]:
    """A rank's choice in each of these layers, nothing chosen yet, but compiled: other ranks wait for one that chooses.

    Args:
        placement: where the copies are.
        layers: MoE layers, from 0.
        rank: of the tokens.
        rule: of `copies.RULES`; None: the one that the copies were placed for.

    Raises:
        ConfigError: for another rule.
    """
    named = rule_of(placement.method) if rule is None else rule
    check_rule(named)
    if not placement.num_copies:
        return [CopyChoice(rank, None) for _ in layers]
    hosts_LEG, topology = placement.hosts(), placement.topology
    found = [CopyChoice(rank, Dispatch(Copies.of(hosts_LEG[layer]), topology, named, seed=rank)) for layer in layers]
    for choose in found[:1]:
        choose(torch.empty((0, placement.spec.top_k), dtype=torch.int64))
    return found
