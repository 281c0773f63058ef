"""Devices, nodes and what it costs to cross between them.

Written "8" (one node), "2x8" (nodes x devices), "2x8,inter=5", or as a YAML file with the fields of `Topology`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, InfeasiblePlacement
from coterie.files import read_text, write_text
from coterie.units import parse_bandwidth

MAX_DEVICES = 4096
_DEAREST = 1e6  # cost of a link
_SLOWEST = 1e-3  # speed of a device
_BANDWIDTHS = ("intra_bandwidth_bytes_per_s", "inter_bandwidth_bytes_per_s", "bus_bandwidth_bytes_per_s")
_TIMES = ("intra_latency_s", "inter_latency_s", "compute_base_s", "compute_pair_s")
_TEXT = re.compile(r"\s*(\d+)\s*(?:[xX]\s*(\d+)\s*)?((?:,[^,]+)*)")


@dataclass(frozen=True)
class Topology:
    """Nodes of devices; device d lives on node d // devices_per_node.

    Attributes:
        num_nodes: machines.
        devices_per_node: accelerators (or processes) on each.
        inter_cost: cost c of a link between nodes relative to one within a node (CAP eq. 3); at least 1.
        slots_per_device: expert slots of each device, or None: the experts are spread evenly.
        intra_bandwidth_bytes_per_s: measured bandwidth of a device's link within its node, or None.
        inter_bandwidth_bytes_per_s: measured bandwidth of a node's uplink, or None.
        bus_bandwidth_bytes_per_s: measured bandwidth of a bus that all devices share, or None.
        intra_latency_s: measured fixed time of an all-to-all within a node, seconds, or None.
        inter_latency_s: the same of one that crosses nodes, or None.
        compute_base_s: measured fixed time of one MoE layer's experts on a device, seconds, or None.
        compute_pair_s: measured time that each further token-expert pair takes there, seconds, or None.
        speed_per_device: how fast each device computes experts relative to the measured times (compute_base_s,
            compute_pair_s), or None: all at speed 1.
        link_costs: [G][G] cost of the link between any two devices (NVLink, PCIe, NUMA) relative to the link that
            intra_bandwidth_bytes_per_s was measured on; symmetric, 0 to itself. None: 1 within a node, `inter_cost`
            across.
        measured: how the measured fields were measured, for people (`coterie calibrate`); decides nothing.
    """

    num_nodes: int = 1
    devices_per_node: int = 1
    inter_cost: float = 5.0
    slots_per_device: tuple[int, ...] | None = None
    intra_bandwidth_bytes_per_s: float | None = None
    inter_bandwidth_bytes_per_s: float | None = None
    bus_bandwidth_bytes_per_s: float | None = None
    intra_latency_s: float | None = None
    inter_latency_s: float | None = None
    compute_base_s: float | None = None
    compute_pair_s: float | None = None
    speed_per_device: tuple[float, ...] | None = None
    link_costs: tuple[tuple[float, ...], ...] | None = None
    measured: Mapping[str, Any] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.devices_per_node < 1:
            raise ConfigError(f"topology {self}: nodes and devices must be at least 1; write it like 8 or 2x4")
        if self.num_devices > MAX_DEVICES:
            raise ConfigError(f"topology {self} has {self.num_devices} devices; at most {MAX_DEVICES} are supported")
        if not (1 <= self.inter_cost < _DEAREST):
            raise ConfigError(f"inter = {self.inter_cost:g} in the topology; a link between nodes costs 1 to 1e6")
        for name in ("slots_per_device", "speed_per_device", "link_costs"):
            entries = getattr(self, name)
            if entries is not None and len(entries) != self.num_devices:
                raise ConfigError(f"{len(entries)} entries in {name}, {self.num_devices} devices; give one for each")
        if self.slots_per_device is not None and min(self.slots_per_device) < 1:
            raise ConfigError("slots_per_device has an entry below 1; every device needs a slot")
        for speed in self.speed_per_device or ():
            if not _SLOWEST <= speed <= 1 / _SLOWEST:
                raise ConfigError(
                    f"speed_per_device holds {speed:g}; a speed is from {_SLOWEST:g} to {1 / _SLOWEST:g}, 1 being as "
                    "measured"
                )
        self._check_link_costs()
        for name in _BANDWIDTHS:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} = {value:g} in the topology; a bandwidth is above 0, like 25GB/s")
        for name in _TIMES:
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ConfigError(f"{name} = {value:g} in the topology; a time is at least 0 seconds")

    def _check_link_costs(self) -> None:
        for g, row in enumerate(self.link_costs or ()):
            if len(row) != self.num_devices:
                raise ConfigError(f"row {g} of link_costs has {len(row)} entries; give one for each device")
        for g, row in enumerate(self.link_costs or ()):
            for h, cost in enumerate(row):
                assert self.link_costs is not None
                if not math.isnan(cost) and cost != self.link_costs[h][g]:  # a NaN is refused below for what it is
                    raise ConfigError(
                        f"link_costs is {cost:g} from device {g} to {h} and {self.link_costs[h][g]:g} back; a link "
                        "costs the same both ways: give the mean"
                    )
                if cost != 0 if g == h else not 0 < cost < _DEAREST:
                    raise ConfigError(
                        f"link_costs is {cost:g} from device {g} to {h}; it is 0 to itself, else above 0 and below 1e6"
                    )

    @property
    def num_devices(self) -> int:
        """Devices on all nodes together."""
        return self.num_nodes * self.devices_per_node

    def node_of_device(self) -> NDArray[np.int64]:
        """The node of every device, [G]."""
        return np.arange(self.num_devices, dtype=np.int64) // self.devices_per_node

    def cost_matrix(self) -> NDArray[np.float64]:
        """Relative cost between devices, [G, G]: `link_costs`, else CAP's eq. 3.

        That is 0 to itself, 1 within a node, `inter_cost` across.
        """
        if self.link_costs is not None:
            return np.asarray(self.link_costs, dtype=np.float64)
        node = self.node_of_device()
        cost = np.where(node[:, None] == node[None, :], 1.0, self.inter_cost)
        np.fill_diagonal(cost, 0.0)
        return cost

    def speeds(self) -> NDArray[np.float64]:
        """How fast every device computes, [G]; 1 as measured."""
        return np.asarray(self.speed_per_device or (1.0,) * self.num_devices, dtype=np.float64)

    def visit_prices(self) -> tuple[NDArray[np.float64], float]:
        """What a token's visit to a device and its first visit to a node cost, in visits of mean cost.

        A token is equally likely to live on any device. A visit is paid by the links of the device within its node,
        relative to their mean (where devices are alone on their nodes: by those across); the first on a node by what
        links across cost more than that.

        Returns:
            [G], all 1 where no `link_costs` are given; and the node's, `inter_cost` - 1, or 0 on one node.
        """
        if self.link_costs is None:
            return np.ones(self.num_devices), self.inter_cost - 1.0 if self.num_nodes > 1 else 0.0
        cost_GG, node = self.cost_matrix(), self.node_of_device()
        within_GG = node[:, None] == node[None, :]
        np.fill_diagonal(within_GG, False)
        paying_GG = within_GG if self.devices_per_node > 1 else ~np.eye(self.num_devices, dtype=bool)
        if not paying_GG.any():
            return np.ones(self.num_devices), 0.0
        mean = float(cost_GG[paying_GG].mean())
        price_G = (cost_GG * paying_GG).sum(axis=1) / paying_GG.sum(axis=1) / mean
        across = float(cost_GG[node[:, None] != node[None, :]].mean()) if self.num_nodes > 1 else mean
        return price_G, max(0.0, across / (mean if self.devices_per_node > 1 else 1.0) - 1.0)

    def part(self, devices: NDArray[np.int64], num_nodes: int) -> Self:
        """The topology of some of the devices, on so many nodes of equal size; slots are left open."""
        kept = [int(device) for device in devices]
        speeds, costs = self.speed_per_device, self.link_costs
        return replace(
            self, slots_per_device=None, num_nodes=num_nodes, devices_per_node=len(kept) // num_nodes,
            speed_per_device=None if speeds is None else tuple(speeds[g] for g in kept),
            link_costs=None if costs is None else tuple(tuple(costs[g][h] for h in kept) for g in kept),
        )  # fmt: skip

    def slots(self, num_experts: int) -> NDArray[np.int64]:
        """Expert slots of every device, [G]; without `slots_per_device` as even as can be, the first devices one more.

        Raises:
            InfeasiblePlacement: when a device would stay empty or the slots do not equal the experts.
        """
        if num_experts < self.num_devices:
            raise InfeasiblePlacement(
                f"{num_experts} experts on {self.num_devices} devices leave devices empty; "
                f"use at most {num_experts} devices"
            )
        if self.slots_per_device is not None:
            if sum(self.slots_per_device) != num_experts:
                raise InfeasiblePlacement(
                    f"the topology has {sum(self.slots_per_device)} slots for {num_experts} experts (copies counted, "
                    "--redundant); they must be equal"
                )
            return np.asarray(self.slots_per_device, dtype=np.int64)
        base, extra = divmod(num_experts, self.num_devices)
        return np.asarray([base + (d < extra) for d in range(self.num_devices)], dtype=np.int64)

    def __str__(self) -> str:
        if self.num_nodes == 1:
            return str(self.devices_per_node)
        return f"{self.num_nodes}x{self.devices_per_node},inter={self.inter_cost:g}"

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary, ready for JSON or YAML; fields left at None are omitted."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        plain = {name: _as_list(value) for name, value in values.items()}
        return {name: value for name, value in plain.items() if value is not None}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`; bandwidths may also be written like "25GB/s".

        Raises:
            ConfigError: when a key is unknown or a value has the wrong type.
        """
        known = {each.name for each in fields(cls)}
        unknown = sorted(set(map(str, data)) - known)
        if unknown:
            raise ConfigError(f"unknown key {unknown[0]!r} in the topology; known keys: {', '.join(sorted(known))}")
        values = {name: _typed(name, value) for name, value in data.items() if value is not None}
        return cls(**values)

    def save(self, path: str | Path) -> None:
        """Write a YAML file that `parse` reads, whole or not at all."""
        import yaml

        write_text(Path(path), yaml.safe_dump(self.to_json(), sort_keys=False))

    @classmethod
    def parse(cls, text: str) -> Self:
        """A topology from "8", "2x8", "2x8,inter=5", or the path of a YAML file.

        Raises:
            ConfigError: when the text is none of these.
        """
        if text.endswith((".yaml", ".yml")):
            return cls._from_yaml(Path(text))
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ConfigError(f"topology {text!r} is not understood; write it like 8, 2x8,inter=5 or x.yaml")
        nodes, devices = (int(match[1]), int(match[2])) if match[2] else (1, int(match[1]))
        values: dict[str, Any] = {}
        for option in filter(None, match[3].split(",")):
            name, _, value = option.partition("=")
            if name.strip() != "inter":
                raise ConfigError(f"unknown option {name.strip()!r} in topology {text!r}; the one option is inter=COST")
            values["inter_cost"] = _typed("inter_cost", _number(value, text))
        return cls(num_nodes=nodes, devices_per_node=devices, **values)

    @classmethod
    def _from_yaml(cls, path: Path) -> Self:
        import yaml  # only needed for files; keeps `coterie --help` fast

        text = read_text(path, ConfigError)
        try:
            data = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"cannot read the topology file {path}: {reason}") from error
        if not isinstance(data, dict):
            raise ConfigError(f"the topology file {path} holds no mapping; write lines like 'num_nodes: 2'")
        return cls.from_json(data)


def _as_list(value: Any) -> Any:
    return [_as_list(item) for item in value] if isinstance(value, tuple) else value


def _number(value: str, text: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ConfigError(f"inter = {value!r} in topology {text!r} is not a number; write it like inter=5") from None


def _are_numbers(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(
        isinstance(item, float) or (type(item) is int and abs(item) < _DEAREST) for item in value
    )


def _are_rows(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(map(_are_numbers, value))


def _are_integers(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(type(item) is int for item in value)


_LISTS = {"slots_per_device": _are_integers, "speed_per_device": _are_numbers, "link_costs": _are_rows}


def _as_tuple(value: Any, kind: type[int] | type[float]) -> Any:
    return tuple(_as_tuple(item, kind) if isinstance(item, (list, tuple)) else kind(item) for item in value)


def _typed(name: str, value: Any) -> Any:
    """One field's value, checked: JSON and YAML files hold whatever their writer put there."""
    if name in ("num_nodes", "devices_per_node"):
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    elif name in _LISTS:
        if _LISTS[name](value):
            return _as_tuple(value, int if name == "slots_per_device" else float)
    elif name == "measured":
        if isinstance(value, Mapping):
            return dict(value)
    elif isinstance(value, str) and name.endswith("bytes_per_s"):
        return parse_bandwidth(value)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"{name} in the topology is an integer too large to be a number here") from None
    raise ConfigError(f"{name} = {value!r} in the topology has the wrong type")
