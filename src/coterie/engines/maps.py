"""Expert maps as engine files hold them, and everything that can be wrong with one."""

from __future__ import annotations

import reprlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

_brief = reprlib.Repr()
_brief.maxother = _brief.maxstring = _brief.maxlong = 60


@dataclass(frozen=True)
class LayerRow:
    """One layer of a map.

    Attributes:
        label: what to call it in messages, e.g. "model layer 3".
        experts: [P] the logical expert in each physical slot.
        slots_per_device: slots of each device, in order, when the file says; else None.
        layer_id: the layer's number in the file, when it has one.
    """

    label: str
    experts: list[int]
    slots_per_device: list[int] | None = None
    layer_id: int | None = None


@dataclass
class EngineFile:
    """A file as the engine takes it: its well-formed layers, and what is wrong with the rest.

    Attributes:
        rows: the layers in the order in which the engine takes them.
        problems: one line for each thing wrong with the file's form.
        notes: one line for each thing that is allowed but worth knowing.
    """

    rows: list[LayerRow] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def brief(value: Any) -> str:
    """A value for a message, however large it is."""
    return _brief.repr(value)


def some(items: Iterable[object], shown: int = 3) -> str:
    """The first few items for a message: "4, 7, 9 and 20 more"."""
    listed = [str(item) for item in items]
    more = f" and {len(listed) - shown} more" if len(listed) > shown else ""
    return ", ".join(listed[:shown]) + more


def is_int(value: Any) -> bool:
    """Whether a value from JSON or YAML is a whole number; True and 1.0 are none."""
    return type(value) is int


def expert_list(value: Any, where: str, problems: list[str]) -> list[int] | None:
    """`value` if it is a list of whole numbers with something in it; else None, and why in `problems`."""
    if not isinstance(value, list) or not value:
        problems.append(f"{where} is {brief(value)}; it must be a list of expert ids")
        return None
    wrong = [item for item in value if not is_int(item)]
    if wrong:
        problems.append(f"{where} holds {brief(wrong[0])}; expert ids are whole numbers")
        return None
    return value


def map_problems(
    rows: Sequence[LayerRow], num_experts: int | None, num_devices: int | None, *, even: bool = True
) -> list[str]:
    """What is wrong with a map, one line each; nothing when it is sound.

    Args:
        rows: its layers.
        num_experts: logical experts, or None to take the largest id that can be one.
        num_devices: devices, or None when nobody says; rows may say themselves.
        even: whether every device must have the same number of slots.
    """
    if not rows:
        return ["it holds no layers"]
    slots = Counter(len(row.experts) for row in rows).most_common(1)[0][0]
    experts = num_experts
    if experts is None:  # an id from `slots` on cannot be one: every expert needs a slot
        experts = 1 + max((e for row in rows for e in row.experts if 0 <= e < slots), default=0)
    problems = []
    if even and num_devices and slots % num_devices:
        problems.append(
            f"{slots} slots do not spread evenly over {num_devices} devices; use a number that divides them"
        )
    for row in rows:
        if len(row.experts) != slots:
            problems.append(f"{row.label} has {len(row.experts)} slots, other layers {slots}; make them equal")
        problems += _expert_problems(row, experts)
        problems += _device_problems(row, num_devices, even=even)
    return problems


def _expert_problems(row: LayerRow, num_experts: int) -> list[str]:
    present = set(row.experts)
    outside = sorted(e for e in present if not 0 <= e < num_experts)
    missing = [e for e in range(num_experts) if e not in present]
    problems = []
    if outside:
        problems.append(f"{row.label} holds expert {some(outside)}; experts run from 0 to {num_experts - 1}")
    if missing:
        problems.append(f"{row.label} lacks expert {some(missing)}; every expert needs a slot")
    return problems


def _device_problems(row: LayerRow, num_devices: int | None, *, even: bool) -> list[str]:
    counts, problems = row.slots_per_device, []
    if counts is not None and num_devices and len(counts) != num_devices:
        problems.append(f"{row.label} is spread over {len(counts)} devices; there are {num_devices}")
    if counts is None:
        if not num_devices or len(row.experts) % num_devices:
            return problems
        counts = [len(row.experts) // num_devices] * num_devices
    if even and len(set(counts)) > 1:
        low, high = min(counts), max(counts)
        problems.append(f"{row.label} has {low} to {high} slots a device; every device needs the same number")
    start, twice = 0, []
    for device, count in enumerate(counts):
        held = Counter(row.experts[start : start + count])
        twice += [f"{expert} on device {device}" for expert, times in held.items() if times > 1]
        start += count
    if twice:
        problems.append(f"{row.label} holds the same expert twice on one device: expert {some(twice)}")
    return problems
