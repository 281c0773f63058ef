"""Where one layer's experts are, as tensors that dispatch looks up."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.placement.placement import Placement
from coterie.topology import Topology


@dataclass(frozen=True)
class LayerPlacement:
    """One MoE layer's placement.

    Attributes:
        layer: MoE layer, from 0.
        device_E: [E] int64, the device of each expert.
        local_E: [E] int64, which of its device's experts it is, from 0, in the order of the device's slots.
        topology: devices and nodes.
    """

    layer: int
    device_E: Tensor
    local_E: Tensor
    topology: Topology

    @classmethod
    def of(cls, placement: Placement, layer: int, device: torch.device | str = "cpu") -> LayerPlacement:
        """The tables of one layer, on a torch device.

        Raises:
            InfeasiblePlacement: when experts have copies.
        """
        placement.require_no_copies()
        slots_G = placement.slots_per_device
        start_P = torch.as_tensor(slots_G.cumsum() - slots_G).repeat_interleave(torch.as_tensor(slots_G))
        expert_P = torch.as_tensor(placement.physical_to_logical_map[layer])
        device_E, local_E = torch.empty_like(expert_P), torch.empty_like(expert_P)
        device_E[expert_P] = torch.as_tensor(placement.device_of_slot())
        local_E[expert_P] = torch.arange(len(expert_P)) - start_P
        return cls(layer, device_E.to(device), local_E.to(device), placement.topology)


def experts_of_device(placement: Placement, layer: int, device: int) -> list[int]:
    """The experts of one device in the order of its slots: local expert i is the i-th."""
    placement.require_no_copies()
    end = int(placement.slots_per_device[: device + 1].sum())
    start = end - int(placement.slots_per_device[device])
    return [int(expert) for expert in placement.physical_to_logical_map[layer, start:end]]
