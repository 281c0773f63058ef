"""The gated feed-forward network of experts, computed for the first neurons of each only.

Shapes: T tokens, K top-k, E experts, I neurons of an expert, H hidden size; S = T x K slots, k the neurons of a prefix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from coterie.errors import CheckpointError, ConfigError

Run = Callable[[int, int, Tensor, Tensor | None], Tensor]
"""(expert, width, x [N, H], widths [N] or None) -> [N, H]."""

_BASE = 2**32  # above any width, so that a wrong one is seen and not taken for another expert's

_READ_ROWS = 16  # reading a neuron's weights takes about as long as computing it for so many rows
_CALL_TERMS = 2**18  # starting a group's matrix products, about as long as so many rows x neurons x hidden size


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of one layer's experts as they lie in its module; nothing is copied.

    Attributes:
        gate_up: [E, 2I, H], or [E, H, 2I] where transposed. Along 2I: all of gate, then all of up; where interleaved,
            gate and up of one neuron side by side.
        down: [E, H, I], or [E, I, H] where transposed.
        gate_up_bias: [E, 2I] or None.
        down_bias: [E, H] or None.
        transposed: see `gate_up`.
        interleaved: see `gate_up`.
        gate: the module's own (gate and up [.., 2k], laid out as in `gate_up`) -> [.., k].
    """

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    transposed: bool
    interleaved: bool
    gate: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, experts: Any) -> ExpertWeights:
        """The weights of a Transformers experts module.

        Raises:
            CheckpointError: when its experts are not gated, normalised afterwards, spread over processes, or not in
                memory.
        """
        name = type(experts).__name__
        parts = ("gate_up_proj", "down_proj", "is_transposed", "is_concatenated", "has_bias", "_apply_gate")
        lacking = [part for part in parts if not hasattr(experts, part)]
        if lacking or not getattr(experts, "has_gate", False):
            what = lacking[0] if lacking else "gate"
            raise CheckpointError(f"{name} has no {what}: only gated experts in one fused module can run in part")
        if getattr(experts, "has_post_expert_norm", False) or getattr(experts, "_is_expert_parallel", False):
            raise CheckpointError(f"{name} normalises its experts' outputs or is spread over processes; not supported")
        if experts.gate_up_proj.is_meta or experts.down_proj.is_meta:
            raise CheckpointError(f"{name} has no weights in memory (meta device); load the model without offloading")
        return cls(
            experts.gate_up_proj, experts.down_proj,
            experts.gate_up_proj_bias if experts.has_bias else None,
            experts.down_proj_bias if experts.has_bias else None,
            bool(experts.is_transposed), not experts.is_concatenated, experts._apply_gate,
        )  # fmt: skip

    @property
    def num_experts(self) -> int:
        """E."""
        return len(self.down)

    @property
    def width(self) -> int:
        """I."""
        return int(self.down.shape[1 if self.transposed else 2])

    @property
    def hidden_size(self) -> int:
        """H."""
        return int(self.down.shape[2 if self.transposed else 1])

    @property
    def neuron_bytes(self) -> int:
        """Bytes of one neuron: its gate row, up row and down column, and its biases."""
        own = self.gate_up.numel() + self.down.numel()
        own += 0 if self.gate_up_bias is None else self.gate_up_bias.numel()
        return int(own // (self.num_experts * self.width) * self.gate_up.element_size())

    def run(self, expert: int, width: int, x_NH: Tensor, width_N: Tensor | None = None) -> Tensor:
        """The outputs of an expert's first neurons, not yet weighted.

        Args:
            expert: the expert.
            width: neurons to compute, at least 1.
            x_NH: [N, H] its input.
            width_N: [N] neurons to use for each row, at most `width`; None for all.

        Returns:
            [N, H].
        """
        hidden_Nk = self.gate(self._gate_up(expert, width, x_NH))
        if width_N is not None:
            beyond_Nk = torch.arange(width, device=width_N.device) >= width_N[:, None]
            hidden_Nk = hidden_Nk.masked_fill(beyond_Nk, 0)
        bias_H = None if self.down_bias is None else self.down_bias[expert]
        down = self.down[expert]
        return linear(hidden_Nk, down[:width].t() if self.transposed else down[:, :width], bias_H)

    def _gate_up(self, expert: int, width: int, x_NH: Tensor) -> Tensor:
        """Gate and up of the first `width` neurons, [N, 2 width], laid out as the module's own."""
        weight = self.gate_up[expert].t() if self.transposed else self.gate_up[expert]  # [2I, H]
        bias = None if self.gate_up_bias is None else self.gate_up_bias[expert]
        if self.interleaved or width == self.width:
            return linear(x_NH, weight[: 2 * width], None if bias is None else bias[: 2 * width])
        rows = (slice(0, width), slice(self.width, self.width + width))
        return torch.cat([linear(x_NH, weight[part], None if bias is None else bias[part]) for part in rows], dim=-1)


def gated_ffn(
    weights: ExpertWeights, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, widths_TK: Tensor
) -> Tensor:
    """Every token's chosen experts, each as wide as wanted, weighted and summed.

    Slots of one expert and one width are computed together, on views of the weights; few slots join those of the next
    larger width, with the neurons beyond their own set to zero, where that costs less than reading the weights again. A
    token's slots are added in their order, whatever else is computed. Grouping waits for the device once a call.

    Source: CRISP §3.2.3, §4.2.2.

    Args:
        weights: the layer's experts.
        hidden_TH: [T, H] the experts' input.
        ids_TK: [T, K] integers, the chosen experts.
        weights_TK: [T, K] float, their routing weights.
        widths_TK: [T, K] integers from 0 to I: neurons to run; an expert of width 0 is skipped, its bias included.

    Returns:
        [T, H], dtype of `hidden_TH`.

    Raises:
        ConfigError: for a width or an expert that cannot be.
    """
    assert weights_TK.shape == ids_TK.shape, "a weight for each slot"
    slots = SlotGroups.of(hidden_TH, ids_TK, widths_TK, (weights.num_experts, weights.width))
    return slots.combine([slots.outputs(index, weights.run) for index in range(len(slots.groups))], weights_TK)


@dataclass(frozen=True)
class Group:
    """Consecutive slots of one expert: the width to compute, how many they are, whether some want less."""

    expert: int
    width: int
    count: int
    mixed: bool = False

    def require_within(self, limits: tuple[int, int]) -> None:
        """Raise ConfigError unless there is such an expert, and so many neurons; `limits`: experts, neurons of one."""
        if not (0 <= self.expert < limits[0] and 0 <= self.width <= limits[1]):
            raise ConfigError(
                f"{self.width} neurons of expert {self.expert} cannot run: there are {limits[0]} experts of "
                f"{limits[1]} neurons"
            )


@dataclass(frozen=True)
class SlotGroups:
    """A layer's work: slots [S] sorted into groups that are computed together, in whatever order.

    Attributes:
        groups: by rising expert and width.
        starts: where the slots of each group begin.
        sorted_SH: [S, H] the input of each slot, in the groups' order.
        width_S: [S] its width.
        slot_S: [S] which slot it is, token by token.
    """

    groups: list[Group]
    starts: list[int]
    sorted_SH: Tensor
    width_S: Tensor
    slot_S: Tensor

    @classmethod
    def of(cls, hidden_TH: Tensor, ids_TK: Tensor, widths_TK: Tensor, limits: tuple[int, int]) -> SlotGroups:
        """Sort slots into groups; waits for the device once.

        Args:
            hidden_TH: as for `gated_ffn`, like the next two.
            ids_TK: as there.
            widths_TK: as there.
            limits: experts, neurons of one.

        Raises:
            ConfigError: for a width or an expert that cannot be.
        """
        assert widths_TK.shape == ids_TK.shape, "a width for each slot"
        groups, slot_S = _groups(ids_TK, widths_TK)
        for group in groups:
            group.require_within(limits)
        joined = _joined(groups, _CALL_TERMS // hidden_TH.shape[1])
        starts = [0, *accumulate(group.count for group in joined)]
        return cls(joined, starts, hidden_TH[slot_S // ids_TK.shape[1]], widths_TK.reshape(-1)[slot_S], slot_S)

    def outputs(self, index: int, run: Run) -> Tensor:
        """The outputs of one group's slots, [N, H], not yet weighted; `run` as `ExpertWeights.run`."""
        group, rows = self.groups[index], slice(self.starts[index], self.starts[index + 1])
        x_NH = self.sorted_SH[rows]
        if group.width == 0:
            return torch.zeros_like(x_NH)
        own_N, extra = self.width_S[rows] if group.mixed else None, _padding(group.count, x_NH)
        if extra:
            x_NH, own_N = pad(x_NH, (0, 0, 0, extra)), None if own_N is None else pad(own_N, (0, extra))
        return run(group.expert, group.width, x_NH, own_N)[: group.count]

    def combine(self, outputs: list[Tensor], weights_TK: Tensor) -> Tensor:
        """The weighted sum of every token's slots, in their order, from the outputs of all groups; [T, H]."""
        outputs_SH = torch.cat(outputs) if outputs else self.sorted_SH
        unsorted_S = torch.empty_like(self.slot_S)
        unsorted_S.scatter_(0, self.slot_S, torch.arange(len(self.slot_S), device=self.slot_S.device))
        outputs_TKH = outputs_SH[unsorted_S].view(*weights_TK.shape, self.sorted_SH.shape[1])
        return weighted_sum(outputs_TKH, weights_TK).to(self.sorted_SH.dtype)


def weighted_sum(outputs_TKH: Tensor, weights_TK: Tensor) -> Tensor:
    """The weighted sum over slots, in their order, in float32 or wider; [T, H]."""
    weighted_TKH = outputs_TKH * weights_TK[..., None]
    exact = torch.float64 if weighted_TKH.dtype == torch.float64 else torch.float32
    first_TH, *others = weighted_TKH.unbind(1)
    total_TH = first_TH.to(exact)
    for each_TH in others:
        total_TH = total_TH + each_TH
    return total_TH


def gated_ffn_reference(
    weights: ExpertWeights, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, widths_TK: Tensor
) -> Tensor:
    """The same, one token and one slot at a time: the whole expert runs, and neurons beyond the width are set to zero.

    Args:
        weights: as for `gated_ffn`, like the other arguments.
        hidden_TH: as there.
        ids_TK: as there.
        weights_TK: as there.
        widths_TK: as there.

    Returns:
        [T, H].
    """
    total_TH = torch.zeros_like(hidden_TH)
    for token in range(len(hidden_TH)):
        for slot in range(ids_TK.shape[1]):
            expert, width = int(ids_TK[token, slot]), int(widths_TK[token, slot])
            if width == 0:
                continue
            gate_up, down = weights.gate_up[expert], weights.down[expert]
            if weights.transposed:
                gate_up, down = gate_up.t(), down.t()
            both = gate_up @ hidden_TH[token]
            if weights.gate_up_bias is not None:
                both = both + weights.gate_up_bias[expert]
            neurons = weights.gate(both)
            neurons[width:] = 0
            output = down @ neurons
            if weights.down_bias is not None:
                output = output + weights.down_bias[expert]
            total_TH[token] += weights_TK[token, slot] * output
    return total_TH


def _groups(ids_TK: Tensor, widths_TK: Tensor) -> tuple[list[Group], Tensor]:
    """A group for every expert and width, by rising expert and width; and the slots [S] in this order."""
    code_S = (ids_TK.to(torch.int64) * _BASE + widths_TK).reshape(-1)
    sorted_S, slot_S = torch.sort(code_S, stable=True)
    codes, counts = torch.unique_consecutive(sorted_S, return_counts=True)
    rows = torch.stack([codes // _BASE, codes % _BASE, counts]).t().tolist()
    return [Group(*row) for row in rows], slot_S


def _padding(count: int, like: Tensor) -> int:
    """Rows to add to a product: on CPUs every new number of rows in bf16 or float16 costs milliseconds once."""
    if like.device.type != "cpu" or like.dtype not in (torch.bfloat16, torch.float16) or count <= 8:
        return 0
    return -count % (16 if count < 64 else 64)


def _joined(groups: list[Group], call_rows: int = 0) -> list[Group]:
    """The groups, small ones joined to the next wider of their expert, in the same order of slots.

    Args:
        groups: by rising expert and width.
        call_rows: what a group costs by itself, in rows x neurons.
    """
    joined: list[Group] = []
    for group in reversed(groups):
        wider = joined[-1] if joined else None
        if (
            wider is not None
            and wider.expert == group.expert
            and group.width > 0
            and group.count * (wider.width - group.width) <= _READ_ROWS * group.width + call_rows
        ):
            joined[-1] = Group(wider.expert, wider.width, wider.count + group.count, True)
        else:
            joined.append(group)
    return joined[::-1]
