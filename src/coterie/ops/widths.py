"""How wide each chosen expert of each token runs, inside a forward pass.

The torch form of `coterie.pruning.widths`, bit for bit the same. Every shape depends on shapes alone and nothing waits
for the device, so it can be captured in a CUDA graph; a token costs one look-up in a small table a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from coterie.pruning.width_plan import WidthPlan
from coterie.pruning.width_tables import check_plan, is_priced, least_anchor_width


@dataclass(frozen=True)
class WidthTables:
    """A plan's tables beside the model.

    Attributes:
        policy: its name.
        width: neurons of an expert, I.
        priced: whether the tier of a combination has a price (`value`).
        step: widths are multiples of it.
        least_anchor_width: what a token's anchor runs at least, by roles and K > 2.
        tables: the plan's tables on the device, integers apart from codes as int64.
    """

    policy: str
    width: int
    priced: bool
    step: int
    least_anchor_width: int
    tables: Mapping[str, Tensor]

    @classmethod
    def of(cls, plan: WidthPlan, device: torch.device | str = "cpu") -> WidthTables:
        """Put a plan's tables on a device.

        Raises:
            ConfigError: when they are not those of the plan's policy.
        """
        check_plan(plan)
        tables = {name: torch.tensor(table, device=device) for name, table in plan.tables.items() if name != "step"}
        tables = {name: table.long() if table.dtype == torch.int32 else table for name, table in tables.items()}
        least = least_anchor_width(plan) if "width_CR" in plan.tables else 0
        return cls(plan.policy, plan.width, is_priced(plan), int(plan.tables["step"]), least, tables)

    def widths(self, layer: int, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """The width of every chosen expert; see `coterie.pruning.widths.widths`.

        Args:
            layer: MoE layer.
            ids_TK: [T, K] integers, distinct within a token.
            weights_TK: [T, K] float, not negative.

        Returns:
            [T, K] int64, neurons, within [0, I].
        """
        ids_TK, weights_TK = ids_TK.long(), weights_TK.float()
        if self.policy in ("crisp", "symmetric"):
            return self._by_role(layer, ids_TK, weights_TK)
        if self.policy == "value":
            return self._by_value(layer, ids_TK, weights_TK)
        if self.policy == "by-weight":
            return self._by_weight(weights_TK)
        if self.policy == "drop":
            return _look_up(self.tables["width_LE"][layer], ids_TK)
        if self.policy == "skip":
            runs_TK = normalised(weights_TK) * float(ids_TK.shape[1]) >= self.tables["threshold"]
            return runs_TK.long() * self.width
        return torch.zeros_like(ids_TK) + self.tables["width"]

    def _by_value(self, layer: int, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        table_ES = self.tables["value_LES"][layer]
        value_TKS = table_ES.index_select(0, ids_TK.reshape(-1)).view(*ids_TK.shape, table_ES.shape[1])
        bound = self.tables["threshold"]
        if self.priced:
            anchor_T1, is_anchor_TK = _anchors(ids_TK, weights_TK)
            price_TK = _look_up(self.tables["price_C"], self._codes(layer, ids_TK, anchor_T1) >> 1)
            lowest_T1 = price_TK.masked_fill(is_anchor_TK, torch.inf).amin(1, keepdim=True)
            bound = (bound * torch.where(is_anchor_TK, lowest_T1, price_TK))[:, :, None]
        runs_TKS = normalised(weights_TK)[:, :, None] * value_TKS >= bound
        return (runs_TKS.sum(2) * self.step).clamp(max=self.width)

    def _by_weight(self, weights_TK: Tensor) -> Tensor:
        largest_T1 = weights_TK.amax(1, keepdim=True)
        relative_TK = torch.where(largest_T1 > 0, weights_TK / torch.where(largest_T1 > 0, largest_T1, 1.0), 1.0)
        return ((relative_TK[:, :, None] > self.tables["cut_S"]).sum(2) * self.step).clamp(max=self.width)

    def _by_role(self, layer: int, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        anchor_T1, is_anchor_TK = _anchors(ids_TK, weights_TK)
        code_TK = self._codes(layer, ids_TK, anchor_T1)
        tier_TK, higher_dominates_TK = code_TK >> 1, code_TK & 1
        width_CR = self.tables["width_CR"]
        is_aux_TK = (ids_TK > anchor_T1).long() ^ higher_dominates_TK
        own_TK = _look_up(width_CR, tier_TK * 2 + is_aux_TK)
        anchors_TK = _look_up(width_CR, tier_TK * 2 + (1 - is_aux_TK)).masked_fill(is_anchor_TK, 0)
        anchor_width_T1 = anchors_TK.amax(1, keepdim=True)
        if ids_TK.shape[1] > 2:
            anchor_width_T1 = torch.where(anchor_width_T1 > 0, anchor_width_T1, self.least_anchor_width)
        return torch.where(is_anchor_TK, anchor_width_T1, own_TK)

    def _codes(self, layer: int, ids_TK: Tensor, anchor_T1: Tensor) -> Tensor:
        """Tier and dominance of each expert's combination with the anchor, [T, K] int64."""
        code_EE = self.tables["code_LEE"][layer]
        return _look_up(code_EE, anchor_T1 * code_EE.shape[1] + ids_TK).long()


def normalised(weights_TK: Tensor) -> Tensor:
    """Weights divided by their token's sum, added in the order of slots; equal shares where all are zero."""
    total_T1 = reduce(torch.add, weights_TK.unbind(1))[:, None]
    empty_T1 = total_T1 == 0
    share_TK = weights_TK / torch.where(empty_T1, 1.0, total_T1)
    return torch.where(empty_T1, 1 / weights_TK.shape[1], share_TK)


def _look_up(table: Tensor, index_TK: Tensor) -> Tensor:
    """Entries of a table by its flat index."""
    return table.reshape(-1).index_select(0, index_TK.reshape(-1)).view(index_TK.shape)


def _anchors(ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
    """The token's expert of highest weight (of equal ones the first), [T, 1], and where it stands, [T, K]."""
    slot_T1 = weights_TK.argmax(1, keepdim=True)
    return ids_TK.gather(1, slot_T1), torch.arange(ids_TK.shape[1], device=ids_TK.device) == slot_T1
