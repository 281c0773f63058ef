"""What a step of a placed model takes: the busiest device's experts, and the all-to-all there and back.

A step ends when its slowest part ends, so each part of a layer takes the largest of what limits it: a device's experts
compute for as long as the busiest device does, and an exchange takes as long as the busiest device's link, the busiest
node's uplink or a bus that all share. The numbers come from `coterie calibrate`.

Source: algorithms §2 (peak traffic), §6 (predicted latency); CAP §VII, step 4, which times what this only ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coterie.errors import ConfigError
from coterie.placement.copies import FEWEST_DEVICES, Copies, DispatchByHome
from coterie.placement.metrics import ACTIVATION_BYTES
from coterie.topology import Topology

UNCALIBRATED = "run coterie calibrate on the machine and give its file as --topology"


@dataclass(frozen=True)
class StepCounts:
    """What one step asks of the devices in one MoE layer.

    Attributes:
        load_G: [G] token-expert pairs on each device.
        copies_GG: [G, G] copies of tokens from home (row) to device (column); the diagonal costs nothing.
    """

    load_G: NDArray[np.int64]
    copies_GG: NDArray[np.int64]


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one MoE layer in one step.

    Attributes:
        compute: the busiest device's experts.
        dispatch: tokens to the devices that hold their experts.
        combine: partial sums back.
    """

    compute: float
    dispatch: float
    combine: float

    @property
    def total(self) -> float:
        """All three, seconds."""
        return self.compute + self.dispatch + self.combine

    @property
    def communication(self) -> float:
        """Dispatch and combine, seconds."""
        return self.dispatch + self.combine


def count_step(
    ids_TK: NDArray[Any], kept_TK: NDArray[np.bool_] | None, device_E: NDArray[Any], home_T: ArrayLike,
    num_devices: int, topology: Topology | None = None, rule: str = FEWEST_DEVICES,
) -> StepCounts:  # fmt: skip
    """Count one layer's loads and copies for the tokens of one step.

    Args:
        ids_TK: [T, K] chosen experts.
        kept_TK: [T, K] false where pruned; None: all kept.
        device_E: [E] the device of each expert; or [E, G] bool, the devices that hold a copy of each.
        home_T: [T] the device where each token is.
        num_devices: G.
        topology: with copies, the devices and links that the rule looks at; None: one node of equal devices.
        rule: with copies, the dispatch rule (`copies.RULES`); loads are those of this step, for each home apart.
    """
    kept = np.ones(ids_TK.shape, dtype=np.bool_) if kept_TK is None else kept_TK
    homes = np.asarray(home_T, dtype=np.int64)
    device_TK = devices_of(ids_TK, kept, np.asarray(device_E), homes, topology or Topology(1, num_devices), rule)
    return count_visits(device_TK, kept, homes, num_devices)


def devices_of(
    ids_TK: NDArray[Any], kept_TK: NDArray[np.bool_], device_E: NDArray[Any], home_T: NDArray[np.int64],
    topology: Topology, rule: str,
) -> NDArray[np.int64]:  # fmt: skip
    """The device of every token's every expert in one step, [T, K]; arguments as for `count_step`."""
    device_TK: NDArray[np.int64]
    if device_E.ndim == 1:
        device_TK = device_E.astype(np.int64)[ids_TK]
        return device_TK
    copies = Copies.of(device_E)
    device_TK = copies.device_P[DispatchByHome(copies, topology, rule).choose(ids_TK, kept_TK, home_T)]
    return device_TK


def count_visits(
    device_TK: NDArray[np.int64], kept: NDArray[np.bool_], home_T: NDArray[np.int64], num_devices: int
) -> StepCounts:
    """Loads and copies of tokens, given where each of their experts runs, [T, K]; the rest as for `count_step`."""
    load_G = np.bincount(device_TK[kept], minlength=num_devices)
    visits_TG = np.zeros((len(device_TK), num_devices), dtype=np.int64)
    rows = np.broadcast_to(np.arange(len(device_TK))[:, None], device_TK.shape)
    visits_TG[rows[kept], device_TK[kept]] = 1
    copies_GG = np.zeros((num_devices, num_devices), dtype=np.int64)
    np.add.at(copies_GG, home_T, visits_TG)
    return StepCounts(load_G, copies_GG)


@dataclass(frozen=True)
class StepModel:
    """Predicts seconds from counts, with the measured numbers of a topology.

    Attributes:
        topology: with bandwidths, latencies and compute times.
        dispatch_bytes: bytes of one copy of a token on the way out: hidden state, expert ids and weights.
        combine_bytes: bytes of one partial sum on the way back.
    """

    topology: Topology
    dispatch_bytes: int
    combine_bytes: int

    def __post_init__(self) -> None:
        topology = self.topology
        needed = ["compute_pair_s"] + (["intra_bandwidth_bytes_per_s"] if topology.num_devices > 1 else [])
        needed += ["inter_bandwidth_bytes_per_s"] if topology.num_nodes > 1 else []
        for name in needed:
            if getattr(topology, name) is None:
                raise ConfigError(f"topology {topology} has no {name}, which predicting a step takes; {UNCALIBRATED}")

    @classmethod
    def of(cls, topology: Topology, hidden_size: int, top_k: int, activation_bytes: int = ACTIVATION_BYTES) -> Self:
        """A model for hidden states of this size; ids and weights are 4 bytes each.

        Raises:
            ConfigError: when the topology was not calibrated, or the hidden size is not known (0).
        """
        if hidden_size < 1:
            raise ConfigError("the trace does not say the model's hidden size; give its config.json as --model")
        state = hidden_size * activation_bytes
        return cls(topology, state + top_k * 8, state)

    def layer(self, counts: StepCounts) -> LayerTime:
        """Seconds of one layer, given what its step asks."""
        base, each = self.topology.compute_base_s or 0.0, self.topology.compute_pair_s
        assert each is not None
        load_G = np.asarray(counts.load_G)
        busy_G = np.where(load_G > 0, base + each * load_G, 0.0) / self.topology.speeds()
        remote_GG = counts.copies_GG - np.diag(np.diag(counts.copies_GG))
        return LayerTime(
            float(busy_G.max()),
            self.exchange(remote_GG, self.dispatch_bytes),
            self.exchange(remote_GG.T, self.combine_bytes),
        )

    def exchange(self, remote_GG: NDArray[np.int64], copy_bytes: int) -> float:
        """Seconds of one all-to-all of copies from device (row) to device (column), the diagonal empty.

        The largest of what each device sends or gets over its link, what each node sends or gets over its uplink, and
        everything over the shared bus; and once the fixed time of the widest kind of link used. Nothing sent: the
        fixed time within a node, since all devices still have to learn that. With `link_costs` a copy keeps both
        devices' links busy as many times longer as its link costs.
        """
        topology = self.topology
        if topology.num_devices == 1:
            return 0.0
        node_G = topology.node_of_device()
        onto = (node_G[:, None] == np.arange(topology.num_nodes)).astype(np.int64)
        between_NN = onto.T @ remote_GG @ onto
        np.fill_diagonal(between_NN, 0)
        paid_GG = remote_GG if topology.link_costs is None else remote_GG * topology.cost_matrix()
        most_device = max(paid_GG.sum(axis=0).max(), paid_GG.sum(axis=1).max())
        most_node = max(between_NN.sum(axis=0).max(), between_NN.sum(axis=1).max())
        busy = [
            (most_device, topology.intra_bandwidth_bytes_per_s),
            (most_node, topology.inter_bandwidth_bytes_per_s),
            (remote_GG.sum(), topology.bus_bandwidth_bytes_per_s),
        ]
        fixed = topology.intra_latency_s or 0.0
        if most_node:
            fixed = max(fixed, topology.inter_latency_s or 0.0)
        return fixed + max(float(copies * copy_bytes / rate) for copies, rate in busy if rate is not None)

    def step(self, layers: Iterable[StepCounts]) -> LayerTime:
        """Seconds of a step of several layers: the sum of each part."""
        times = [self.layer(counts) for counts in layers]
        return LayerTime(
            sum(time.compute for time in times), sum(time.dispatch for time in times),
            sum(time.combine for time in times),
        )  # fmt: skip
