"""Where the experts live: the result of every placement method, and the JSON file that carries it.

Every expert has a slot; with more slots than experts some have copies, never two on one device.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coterie.errors import ConfigError, InfeasiblePlacement
from coterie.files import parse_json, read_text, write_text
from coterie.spec import MoESpec
from coterie.topology import Topology

SCHEMA_VERSION = 1
KIND = "coterie.placement"
_NUMBERS = re.compile(r"\[[\s\d.,eE+-]*\]")  # a list of numbers, put on one line


@dataclass(frozen=True)
class Placement:
    """A slot for every expert of every layer, or several; device g owns a run of consecutive slots.

    Attributes:
        physical_to_logical_map: [L, P] int64, the expert in each slot (P slots; P = E without replicas).
        topology: devices, nodes and link costs.
        spec: the model it was made for.
        method: method, options, seed and versions that made it.
        metrics: what it measured: "fit" on the data it was made from, "heldout" on data it never saw.
    """

    physical_to_logical_map: NDArray[np.int64]
    topology: Topology
    spec: MoESpec
    method: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape, experts = self.physical_to_logical_map.shape, self.spec.num_experts
        if len(shape) != 2 or shape[0] != self.spec.num_layers or shape[1] < experts:
            raise InfeasiblePlacement(
                f"the map has shape {list(shape)}; {self.spec.num_layers} layers of {experts} slots need "
                f"{[self.spec.num_layers, experts]}"
            )
        self.topology.slots(shape[1])
        if shape[1] == experts:
            check_each_expert_once(self.physical_to_logical_map, experts)
        else:
            check_copies(self.physical_to_logical_map, self.slots_per_device, experts)

    @property
    def num_copies(self) -> int:
        """Slots of a layer that hold a further copy of an expert."""
        return int(self.physical_to_logical_map.shape[1]) - self.spec.num_experts

    @property
    def slots_per_device(self) -> NDArray[np.int64]:
        """Slots of every device, [G]."""
        return self.topology.slots(int(self.physical_to_logical_map.shape[1]))

    def device_of_slot(self) -> NDArray[np.int64]:
        """The device that owns each slot, [P]."""
        return np.repeat(np.arange(self.topology.num_devices, dtype=np.int64), self.slots_per_device)

    def device_of_expert(self) -> NDArray[np.int64]:
        """The device that hosts each expert, [L, E].

        Raises:
            InfeasiblePlacement: when experts have copies; see `hosts`.
        """
        self.require_no_copies()
        device_LE = np.empty((self.spec.num_layers, self.spec.num_experts), dtype=np.int64)
        np.put_along_axis(device_LE, self.physical_to_logical_map, self.device_of_slot()[None, :], axis=1)
        return device_LE

    def hosts(self) -> NDArray[np.bool_]:
        """Which devices hold a copy of each expert, [L, E, G]."""
        shape = (self.spec.num_layers, self.spec.num_experts, self.topology.num_devices)
        hosts_LEG = np.zeros(shape, dtype=bool)
        layer_L1 = np.arange(self.spec.num_layers)[:, None]
        hosts_LEG[layer_L1, self.physical_to_logical_map, self.device_of_slot()[None, :]] = True
        return hosts_LEG

    def where(self) -> NDArray[Any]:
        """As metrics take it: the device of each expert, [L, E]; with copies the devices that hold each, [L, E, G]."""
        return self.hosts() if self.num_copies else self.device_of_expert()

    def require_no_copies(self, what: str = "this") -> None:
        """Raise InfeasiblePlacement when an expert has more than one slot; `what` does not take copies."""
        if self.num_copies:
            raise InfeasiblePlacement(
                f"the placement has {self.physical_to_logical_map.shape[1]} slots for {self.spec.num_experts} experts, "
                f"so some have copies, which {what} does not take; place without --redundant"
            )

    def require_model(self, spec: MoESpec, what: str) -> None:
        """Raise unless `spec` has this placement's layers, experts and top-k.

        Raises:
            InfeasiblePlacement: naming both models.
        """
        mine = (self.spec.num_layers, self.spec.num_experts, self.spec.top_k)
        other = (spec.num_layers, spec.num_experts, spec.top_k)
        if mine != other:
            raise InfeasiblePlacement(
                f"the placement is for {self.spec.model} ({_shape(self.spec)}), {what} is of {spec.model} "
                f"({_shape(spec)}); use a placement made from this model's trace"
            )

    @classmethod
    def from_devices(
        cls,
        device_LE: ArrayLike,
        topology: Topology,
        spec: MoESpec,
        method: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> Self:
        """A placement from the device of every expert, [L, E]; within a device experts stand in rising order.

        Raises:
            InfeasiblePlacement: when a device is given more or fewer experts than it has slots.
        """
        devices = np.asarray(device_LE, dtype=np.int64)
        slots = topology.slots(spec.num_experts)
        for layer, row in enumerate(devices):
            counts = np.bincount(row, minlength=topology.num_devices)
            if not np.array_equal(counts, slots):
                raise InfeasiblePlacement(
                    f"layer {layer} puts {counts.tolist()} experts on devices with {slots.tolist()} slots"
                )
        return cls(np.argsort(devices, axis=1, kind="stable"), topology, spec, method or {}, metrics or {})

    @classmethod
    def from_hosts(
        cls,
        hosts_LEG: NDArray[np.bool_],
        topology: Topology,
        spec: MoESpec,
        method: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> Self:
        """A placement from the devices that hold each expert, [L, E, G]; within a device experts stand in rising order.

        Raises:
            InfeasiblePlacement: when a device is given more or fewer experts than it has slots.
        """
        held_LG = hosts_LEG.sum(axis=1)
        slots_G = topology.slots(int(held_LG[0].sum()))
        for layer, counts in enumerate(held_LG):
            if not np.array_equal(counts, slots_G):
                raise InfeasiblePlacement(
                    f"layer {layer} puts {counts.tolist()} experts on devices with {slots_G.tolist()} slots"
                )
        rows = [np.nonzero(hosts_EG.T)[1] for hosts_EG in hosts_LEG]
        return cls(np.stack(rows).astype(np.int64), topology, spec, method or {}, metrics or {})

    def to_json(self) -> str:
        """JSON that a person can read: one line for each layer's map."""
        head = {
            "kind": KIND,
            "schema_version": SCHEMA_VERSION,
            "model": self.spec.to_json(),
            "topology": self.topology.to_json(),
            "slots_per_device": self.slots_per_device.tolist(),
            "method": dict(self.method),
            "metrics": dict(self.metrics),
        }
        text = _NUMBERS.sub(lambda match: " ".join(match[0].split()), json.dumps(head, indent=1, allow_nan=False))
        rows = ",\n  ".join(json.dumps(row.tolist()) for row in self.physical_to_logical_map)
        return f'{text[:-2]},\n "physical_to_logical_map": [\n  {rows}\n ]\n}}\n'

    def save(self, path: str | Path) -> None:
        """Write the JSON file, whole or not at all."""
        write_text(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file that `save` wrote.

        Raises:
            InfeasiblePlacement: when the file is missing, no placement, or one that cannot exist.
        """
        data = read_json(Path(path))
        if data.get("kind") != KIND:
            kind = data.get("kind")
            raise InfeasiblePlacement(f"{path} is no Coterie placement (kind = {kind!r}); make one with coterie place")
        if data.get("schema_version") != SCHEMA_VERSION:
            version = data.get("schema_version")
            raise InfeasiblePlacement(f"{path} has schema {version!r}, this version reads {SCHEMA_VERSION}; upgrade")
        try:
            rows = integer_rows(data["physical_to_logical_map"])
            spec, topology = MoESpec.from_json(data["model"]), Topology.from_json(data["topology"])
            placement = cls(rows, topology, spec, dict(data["method"]), dict(data["metrics"]))
            slots = placement.slots_per_device.tolist()
            if data["slots_per_device"] != slots:
                raise InfeasiblePlacement(f"slots_per_device says {data['slots_per_device']}, the topology {slots}")
            return placement
        except KeyError as error:
            raise InfeasiblePlacement(f"{path} lacks {error}; make it again with coterie place") from None
        except (ConfigError, InfeasiblePlacement, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise InfeasiblePlacement(f"{path}: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        InfeasiblePlacement: when there is no such file or it holds no JSON object.
    """
    data = parse_json(read_text(path, InfeasiblePlacement), path, InfeasiblePlacement)
    if not isinstance(data, dict):
        raise InfeasiblePlacement(f"{path} holds no JSON object; a placement is one")
    return data


def integer_rows(rows: Any) -> NDArray[np.int64]:
    """A list of equally long lists of integers as [L, P] int64.

    Raises:
        InfeasiblePlacement: when it is anything else.
    """
    if not isinstance(rows, list) or not rows or not all(isinstance(row, list) and row for row in rows):
        raise InfeasiblePlacement("the map is no list of lists of expert ids; give one list for each layer")
    lengths = {len(row) for row in rows}
    if len(lengths) > 1:
        raise InfeasiblePlacement(f"the map's layers have {min(lengths)} to {max(lengths)} slots; make them equal")
    for item in (item for row in rows for item in row):
        if not isinstance(item, int) or isinstance(item, bool) or abs(item) >= 2**31:
            raise InfeasiblePlacement(f"the map holds {item!r}, which is no expert id; ids are integers >= 0")
    return np.asarray(rows, dtype=np.int64)


def check_each_expert_once(map_LP: NDArray[np.int64], num_experts: int) -> None:
    """Raise unless every row holds each expert exactly once.

    Raises:
        InfeasiblePlacement: naming the layer and the first expert that is missing, repeated or unknown.
    """
    for layer, row in enumerate(map_LP):
        if row.min() < 0 or row.max() >= num_experts:
            value = int(row[(row < 0) | (row >= num_experts)][0])
            raise InfeasiblePlacement(f"layer {layer} holds expert {value}; experts run from 0 to {num_experts - 1}")
        counts = np.bincount(row, minlength=num_experts)
        if (counts != 1).any():
            expert = int(np.argmax(counts != 1))
            times = f"{counts[expert]} times" if counts[expert] else "nowhere"
            raise InfeasiblePlacement(f"layer {layer} holds expert {expert} {times}; every expert needs one slot")


def check_copies(map_LP: NDArray[np.int64], slots_G: NDArray[np.int64], num_experts: int) -> None:
    """Raise unless every row holds each expert, and no device holds one twice.

    Raises:
        InfeasiblePlacement: naming the layer and the first expert that is missing, unknown or twice on a device.
    """
    device_P = np.repeat(np.arange(slots_G.size), slots_G)
    for layer, row in enumerate(map_LP):
        if row.min() < 0 or row.max() >= num_experts:
            value = int(row[(row < 0) | (row >= num_experts)][0])
            raise InfeasiblePlacement(f"layer {layer} holds expert {value}; experts run from 0 to {num_experts - 1}")
        counts_EG = np.zeros((num_experts, slots_G.size), dtype=np.int64)
        np.add.at(counts_EG, (row, device_P), 1)
        missing, twice = np.flatnonzero(counts_EG.sum(axis=1) == 0), np.argwhere(counts_EG > 1)
        if missing.size:
            raise InfeasiblePlacement(
                f"layer {layer} holds expert {missing[0]} nowhere; every expert needs at least one slot"
            )
        if len(twice):
            raise InfeasiblePlacement(
                f"layer {layer} holds expert {twice[0, 0]} more than once on device {twice[0, 1]}; a device needs one "
                "copy at most"
            )


def _shape(spec: MoESpec) -> str:
    return f"{spec.num_layers} layers, {spec.num_experts} experts, top-{spec.top_k}"
