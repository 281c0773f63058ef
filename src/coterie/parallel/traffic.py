"""Bytes between devices: counted where they are sent, and what a routing trace predicts."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from coterie.parallel.comms import Comms, share
from coterie.placement.copies import rule_of
from coterie.placement.metrics import measure
from coterie.placement.placement import Placement
from coterie.trace.routing_trace import ALL_TOKENS, RoutingTrace


class Counted(Protocol):
    """A dispatch that can say what it sent; `DispatchHandle` and `TwoHopHandle`."""

    def dispatch_bytes(self) -> list[int]:
        """[G] hidden states sent."""
        ...

    def combine_bytes(self) -> list[int]:
        """[G] sums returned."""
        ...

    def metadata_bytes(self) -> list[int]:
        """[G] ids, weights and counts sent."""
        ...


class Traffic:
    """What one rank sent to each other rank, by layer.

    Attributes:
        dispatch_LG: [L, G] int64, bytes of hidden states.
        combine_LG: [L, G] int64, bytes of sums returned.
        metadata_LG: [L, G] int64, bytes of ids, weights and counts.
    """

    def __init__(self, num_layers: int, num_ranks: int) -> None:
        self.dispatch_LG = np.zeros((num_layers, num_ranks), dtype=np.int64)
        self.combine_LG = np.zeros((num_layers, num_ranks), dtype=np.int64)
        self.metadata_LG = np.zeros((num_layers, num_ranks), dtype=np.int64)

    def add(self, layer: int, handle: Counted) -> None:
        """Count one layer's dispatch and its combine."""
        self.dispatch_LG[layer] += handle.dispatch_bytes()
        self.combine_LG[layer] += handle.combine_bytes()
        self.metadata_LG[layer] += handle.metadata_bytes()

    def gather(self, comms: Comms) -> dict[str, NDArray[np.int64]]:
        """All ranks' "dispatch", "combine" and "metadata", [L, G, G]: bytes from rank (row) to rank (column)."""
        mine = [self.dispatch_LG.tolist(), self.combine_LG.tolist(), self.metadata_LG.tolist()]
        said_GXLG = np.array(share(comms, mine), dtype=np.int64)
        return {name: said_GXLG[:, index].swapaxes(0, 1) for index, name in enumerate(KINDS)}


KINDS = ("dispatch", "combine", "metadata")


def predicted_bytes(
    trace: RoutingTrace, placement: Placement, row_bytes: int, rule: str | None = None
) -> dict[str, NDArray[np.int64]]:
    """A trace's "dispatch" and "combine", [L, G, G] bytes, from the metrics of the placement.

    Args:
        trace: the routing; its homes are the ranks where tokens' attention runs, each rank's in the order they ran in.
        placement: where the experts are.
        row_bytes: of one hidden state.
        rule: with copies, the dispatch rule; None: the one that they were placed for.
    """
    named = rule or rule_of(placement.method)
    layers = measure(trace, placement.where(), placement.topology, ALL_TOKENS, named, by_home=True)
    visits_LGG = np.stack([np.rint(layer.traffic_GG * trace.num_tokens).astype(np.int64) for layer in layers])
    visits_LGG[:, range(visits_LGG.shape[1]), range(visits_LGG.shape[1])] = 0
    return {"dispatch": visits_LGG * row_bytes, "combine": visits_LGG.swapaxes(1, 2) * row_bytes}


def summary(gathered: dict[str, NDArray[np.int64]]) -> dict[str, Any]:
    """Totals over layers, ready for JSON: bytes of each kind, and payload from rank to rank."""
    totals = {f"{name}_bytes": int(bytes_LGG.sum()) for name, bytes_LGG in gathered.items()}
    return {**totals, "payload_bytes": (gathered["dispatch"] + gathered["combine"]).sum(axis=0).tolist()}
