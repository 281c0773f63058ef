"""The plain form of dispatch, experts and combine: all ranks' tokens in one process, one token and device at a time.

It adds in the same order and gives each expert the same rows in the same order, so what runs on many ranks must agree
with it bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from coterie.parallel.layer_placement import LayerPlacement

Expert = Callable[[int, Tensor], Tensor]
"""(expert, x [N, H]) -> [N, H], not yet weighted."""


def reference(
    hidden_GTH: Sequence[Tensor], ids_GTK: Sequence[Tensor], weights_GTK: Sequence[Tensor], layer: LayerPlacement,
    run: Expert,
) -> list[Tensor]:  # fmt: skip
    """What `experts.route` returns on every rank.

    Args:
        hidden_GTH: of each rank, [T, H]; T may differ.
        ids_GTK: of each rank, [T, K], the chosen experts, or copies; -1 for dropped slots.
        weights_GTK: of each rank, [T, K].
        layer: where the experts are.
        run: an expert, by its number in the model.
    """
    ranks = range(layer.topology.num_devices)
    exact = torch.float64 if hidden_GTH[0].dtype == torch.float64 else torch.float32
    totals = [torch.zeros_like(hidden_TH, dtype=exact) for hidden_TH in hidden_GTH]
    for node in range(layer.topology.num_nodes):
        on_node = [torch.zeros_like(total_TH) for total_TH in totals]
        for device in (rank for rank in ranks if layer.topology.node_of_device()[rank] == node):
            sums = _device_sums(device, hidden_GTH, ids_GTK, weights_GTK, layer, run)
            for (rank, token), sum_H in sums.items():
                on_node[rank][token] += sum_H
        for rank, node_TH in enumerate(on_node):
            totals[rank] += node_TH
    return [total.to(hidden.dtype) for total, hidden in zip(totals, hidden_GTH, strict=True)]


def visits_between(ids_GTK: Sequence[Tensor], layer: LayerPlacement) -> list[list[int]]:
    """Copies from each rank (row) to each device (column), its own on the diagonal: counted token by token."""
    devices = layer.device_P.tolist()
    counts = [[0] * layer.topology.num_devices for _ in ids_GTK]
    for rank, ids_TK in enumerate(ids_GTK):
        for ids in ids_TK.tolist():
            for device in {devices[copy] for copy in ids if copy >= 0}:
                counts[rank][device] += 1
    return counts


def _device_sums(
    device: int, hidden_GTH: Sequence[Tensor], ids_GTK: Sequence[Tensor], weights_GTK: Sequence[Tensor],
    layer: LayerPlacement, run: Expert,
) -> dict[tuple[int, int], Tensor]:  # fmt: skip
    """What one device returns for each token (rank, number) that visits it: its experts, weighted, in slot order."""
    here, expert_P = set((layer.device_P == device).nonzero().flatten().tolist()), layer.expert_P.tolist()
    sources = [*(rank for rank in range(len(ids_GTK)) if rank != device), device]  # as rows arrive there
    slots_of: dict[int, list[tuple[int, int, int]]] = {}
    order: list[tuple[int, int, int]] = []
    for rank in sources:
        for token, ids in enumerate(ids_GTK[rank].tolist()):
            for slot, copy in enumerate(ids):
                if copy in here:
                    order.append((rank, token, slot))
                    slots_of.setdefault(expert_P[copy], []).append((rank, token, slot))
    outputs: dict[tuple[int, int, int], Tensor] = {}
    for expert, slots in sorted(slots_of.items()):
        rows = run(expert, torch.stack([hidden_GTH[rank][token] for rank, token, _ in slots]))
        outputs.update(zip(slots, rows, strict=True))
    sums: dict[tuple[int, int], Tensor] = {}
    for rank, token, slot in order:
        exact = torch.float64 if hidden_GTH[rank].dtype == torch.float64 else torch.float32
        weight = weights_GTK[rank][token, slot].to(exact)
        sum_H = sums.setdefault((rank, token), torch.zeros_like(hidden_GTH[rank][token], dtype=exact))
        sum_H += outputs[rank, token, slot].to(exact) * weight
    return sums
