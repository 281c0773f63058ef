"""What is minimised: visits to devices, nodes and the busiest device, and the price of imbalance."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np

from coterie.placement.metrics import LayerMetrics
from coterie.placement.search import Weights
from coterie.topology import Topology


@dataclass(frozen=True)
class Objective:
    """`device * DPT + node * NPT + peak * peak traffic`, and `balance * B` when one placement is chosen.

    Attributes:
        device: weight of devices per token.
        node: weight of nodes per token.
        peak: weight of the share of tokens that visit the busiest device.
        balance: weight of B; only used to choose a point, since the search keeps limits on B instead.
        prices: [G] what a visit to each device counts, on unequal links (`Topology.visit_prices`); None: 1.
    """

    device: float
    node: float
    peak: float
    balance: float
    prices: tuple[float, ...] | None = None

    @classmethod
    def for_topology(cls, topology: Topology) -> Self:
        """The default for a topology.

        A visit costs 1, a node `inter_cost - 1` more (its first visit crosses the slow link; one node: 0). On G
        devices with equal visits the peak is DPT / G, so a peak weight of 0.75 G makes it count three quarters of
        DPT. This and the price of balance do no worse than their neighbours in cross-validation
        (`benchmarks/choose_settings.py`), but were first picked on tokens that README's ratios are measured on.
        """
        price_G, node = topology.visit_prices()
        prices = None if topology.link_costs is None else tuple(price_G.tolist())
        return cls(device=1.0, node=node, peak=0.75 * topology.num_devices, balance=0.75, prices=prices)

    def weights(self) -> Weights:
        """The part that the search minimises."""
        return Weights(float(self.device), float(self.node), float(self.peak))

    def cost(self, metrics: LayerMetrics) -> float:
        """Cost without balance, in visits per token."""
        if self.prices is not None:
            paid_G = metrics.traffic_GG.sum(axis=0) * np.asarray(self.prices)
            return float(self.device * paid_G.sum() + self.node * metrics.npt + self.peak * paid_G.max())
        return self.device * metrics.dpt + self.node * metrics.npt + self.peak * metrics.peak_traffic

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary, ready for JSON."""
        return {name: value for name, value in asdict(self).items() if value is not None}
