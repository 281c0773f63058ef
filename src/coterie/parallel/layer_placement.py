"""Where one layer's experts are, as tensors that dispatch looks up.

Copies of experts are numbered as in `placement.copies`: by expert, then by device. Without copies their numbers are the
experts'.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.placement.placement import Placement
from coterie.topology import Topology


@dataclass(frozen=True)
class LayerPlacement:
    """One MoE layer's placement, P copies of experts; P = E where every expert has one.

    Attributes:
        layer: MoE layer, from 0.
        expert_P: [P] int64, the expert of each copy.
        device_P: [P] int64, the device of each copy.
        local_P: [P] int64, which of its device's experts it is, from 0, in the order of the device's slots.
        topology: devices and nodes.
    """

    layer: int
    expert_P: Tensor
    device_P: Tensor
    local_P: Tensor
    topology: Topology

    @classmethod
    def of(cls, placement: Placement, layer: int, device: torch.device | str = "cpu") -> LayerPlacement:
        """The tables of one layer, on a torch device."""
        slots_G = placement.slots_per_device
        start_S = torch.as_tensor(slots_G.cumsum() - slots_G).repeat_interleave(torch.as_tensor(slots_G))
        expert_S = torch.as_tensor(placement.physical_to_logical_map[layer])
        slot_P = torch.argsort(expert_S, stable=True)  # slots are in the order of devices
        device_P, local_P = torch.as_tensor(placement.device_of_slot())[slot_P], slot_P - start_S[slot_P]
        return cls(layer, expert_S[slot_P].to(device), device_P.to(device), local_P.to(device), placement.topology)


def experts_of_device(placement: Placement, layer: int, device: int) -> list[int]:
    """The experts of one device, copies too, in the order of its slots: local expert i is the i-th."""
    end = int(placement.slots_per_device[: device + 1].sum())
    start = end - int(placement.slots_per_device[device])
    return [int(expert) for expert in placement.physical_to_logical_map[layer, start:end]]
