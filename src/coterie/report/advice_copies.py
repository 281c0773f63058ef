"""Whether copies of experts are worth their memory: what advice asks of them, and what it says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from coterie.models.expert_shape import ExpertSizes
from coterie.placement.candidates import Setting
from coterie.placement.copies import own_slots

LINEAR = "linear"
_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


def without_copies(setting: Setting) -> Setting:
    """The same setting without slots for copies; where the topology lists slots, copies take the fullest devices'."""
    if not setting.redundant:
        return setting
    topology, spec = setting.topology, setting.trace.spec
    if topology.slots_per_device is not None:
        own_G = own_slots(topology.slots(spec.num_experts + setting.redundant), spec.num_experts)
        topology = replace(topology, slots_per_device=tuple(own_G.tolist()))
    return replace(setting, topology=topology, redundant=0, keep_groups=spec.num_groups > 1)


def is_copied(name: str) -> bool:
    """Whether a candidate of this name has copies: METHOD+slots."""
    return "+" in name


def best_of(scores: Mapping[str, Any], redundant: int, refused: Mapping[int, str]) -> tuple[str, str | None]:
    """The best placement without copies that the engine loads, linear if none, and the best with copies, if any."""
    with_copies = [name for name in scores if is_copied(name)] if redundant not in refused else []
    others = [name for name in scores if not is_copied(name)] if 0 not in refused else [LINEAR]

    def mean(name: str) -> float:
        return float(scores[name].mean())

    return min(others, key=mean), min(with_copies, key=mean, default=None)


def found_of_copies(
    setting: Setting, refused: Mapping[int, str], plain: str, copied: str | None, pick: str,
    judged: Callable[[str, str], tuple[float, float]], *, needed: bool,
) -> dict[str, Any] | None:  # fmt: skip
    """What copies bring over the best placement without them, on the tokens that judge; None where none are asked.

    `needed`: whether the engine loads nothing without them.
    """
    if not setting.redundant:
        return None
    found = {"redundant": setting.redundant, "dispatch": setting.dispatch, "best": copied, "against": plain,
             "refused": refused.get(setting.redundant), "used": is_copied(pick),
             "needed": needed}  # fmt: skip
    if copied is not None:
        found["gain"], found["standard_error"] = judged(plain, copied)
    return found


def memory(setting: Setting, sizes: ExpertSizes | None) -> dict[str, Any]:
    """Bytes of one expert in every layer, and what slots for copies add: where they add most, and in all.

    Bytes are None where no config says how large an expert is. A routed expert has three matrices of hidden size x
    width.
    """
    experts, redundant = setting.trace.spec.num_experts, setting.redundant
    slots_G = setting.topology.slots(experts + redundant)
    most = int((slots_G - own_slots(slots_G, experts)).max())
    each = None
    if sizes is not None:
        each = 3 * sizes.spec.hidden_size * sizes.width * _ELEMENT_BYTES.get(sizes.dtype, 2)
    return {
        "expert_bytes": each, "redundant": redundant, "redundant_share": redundant / experts,
        "redundant_slots_per_device": most,
        "redundant_bytes_per_device": None if each is None else each * most * setting.trace.num_layers,
    }  # fmt: skip
