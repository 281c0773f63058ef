"""Which numbers a model's experts bear: the published ones, or those of a baked placement (`coterie bake`).

A baked checkpoint numbers the experts of every layer by the slots of its placement. Traces and placements say which
numbering their ids are in, so that they are not mixed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coterie.errors import ConfigError, InfeasiblePlacement

EXPERT_ORDER_KEY = "coterie_expert_order"  # in config.json, in a trace's provenance: `expert_order_digest`


def expert_order_digest(map_LE: ArrayLike) -> str:
    """A digest of the published number of every expert, [L, E] integers in the order of the new numbers."""
    return hashlib.sha256(np.ascontiguousarray(map_LE, dtype=np.int32).tobytes()).hexdigest()[:16]


def expert_order_of_placement(method: Mapping[str, Any]) -> str | None:
    """The numbering of the trace that a placement was made from, out of `Placement.method`; None: as published."""
    trace = method.get("trace")
    return trace.get(EXPERT_ORDER_KEY) if isinstance(trace, Mapping) else None


def require_same_numbering(given: str | None, what: str, held: str | None, whose: str) -> None:
    """Refuse ids that number the experts otherwise than a model or a trace does.

    Args:
        given: the numbering of the ids.
        what: what to call them, "the placement".
        held: the numbering of what they are to be used on.
        whose: what to call that, "the model".

    Raises:
        ConfigError: when they differ.
    """
    if given != held:
        raise ConfigError(
            f"{what} numbers experts {_named(given)}, {whose} {_named(held)}; use files of one numbering: a baked "
            "model's own placement is linear (--topology), and coterie trace import --unbake turns its traces back"
        )


def require_whole_groups(map_LE: NDArray[np.int64], num_groups: int) -> None:
    """Refuse a renumbering that would take groups of group-limited routing apart.

    Its router chooses among runs of E / num_groups experts, so each run of new numbers must be one whole group.

    Raises:
        InfeasiblePlacement: naming the first layer and device slots where two groups mix.
    """
    size = map_LE.shape[1] // num_groups
    groups_LGS = map_LE.reshape(len(map_LE), num_groups, size) // size
    mixed = np.argwhere((groups_LGS != groups_LGS[:, :, :1]).any(axis=2))
    if len(mixed):
        layer, run = mixed[0].tolist()
        held = sorted(set(groups_LGS[layer, run].tolist()))
        raise InfeasiblePlacement(
            f"layer {layer} of the placement mixes experts of router groups {', '.join(map(str, held))} in slots "
            f"{run * size} to {(run + 1) * size - 1}; the model routes by {num_groups} groups of {size}, which must "
            "stay whole: import the trace with --model config.json and place again, or use an engine's file "
            "(coterie export)"
        )


def unbaked_ids(expert_ids: NDArray[np.unsignedinteger[Any]], map_LE: ArrayLike) -> NDArray[np.unsignedinteger[Any]]:
    """Ids of a baked model as the published ones.

    Args:
        expert_ids: [L, T, K].
        map_LE: [L, E], the published number of every expert of the baked model.
    """
    map_LE = np.asarray(map_LE, dtype=expert_ids.dtype)
    return np.stack([row_E[ids_TK] for row_E, ids_TK in zip(map_LE, expert_ids, strict=True)])


def _named(order: str | None) -> str:
    return "as published" if order is None else f"by the baked placement {order}"
