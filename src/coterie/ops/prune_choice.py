"""What is pruned, and where: the rule and the devices out of what a user names. NumPy only, whatever runs the model."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coterie.errors import ConfigError, unknown_name
from coterie.placement.numbering import expert_order_of_placement, require_same_numbering
from coterie.placement.placement import Placement
from coterie.pruning.destinations import Cap, Naive, Priced, PruningRule
from coterie.pruning.routed import linear_devices
from coterie.spec import MoESpec
from coterie.topology import Topology

RULES = ("cap", "naive", "priced")


def pruning_rule(
    rule: str | PruningRule, p: float | None, thetas: ArrayLike | None, floor: float, shape: tuple[int, int]
) -> Cap | Naive | Priced:
    """The rule with its strength.

    Args:
        rule: one of `RULES`, or a rule that has its strength.
        p: for "cap" and "naive", the share of a token's weight that may be dropped.
        thetas: for "priced", [L, G].
        floor: for "priced", the least share of its weight that a token keeps.
        shape: layers and devices of the model, (L, G).

    Raises:
        ConfigError: for an unknown rule, one without its strength or with another's, and thetas of another shape.
    """
    if isinstance(rule, str) and rule not in RULES:
        raise unknown_name("pruning rule", rule, RULES)
    if not isinstance(rule, str):
        if p is not None or thetas is not None or floor:
            raise ConfigError(f"the rule {rule.name} was given with its strength; leave p, thetas and floor out")
        if not isinstance(rule, Cap | Naive | Priced):
            raise ConfigError(
                f"the rule {rule.name} has no form that runs in a model; choose one of {', '.join(RULES)}"
            )
        made = rule
    elif rule == "priced":
        if thetas is None or p is not None:
            raise ConfigError("the rule priced takes thetas [L, G] and no p; fit them on a trace of the model")
        made = Priced(np.asarray(thetas, dtype=np.float64), floor)
    else:
        if p is None or thetas is not None or floor:
            raise ConfigError(f"the rule {rule} takes p, e.g. 0.2, and neither thetas nor a floor")
        made = Cap(p) if rule == "cap" else Naive(p)
    if isinstance(made, Priced) and made.theta_LG.shape != shape:
        raise ConfigError(
            f"thetas have shape {list(made.theta_LG.shape)}, the model and its devices need {list(shape)}; "
            "fit them on a trace of this model under this placement"
        )
    return made


def devices_of(
    spec: MoESpec, placement: Placement | None, topology: Topology | str | None, expert_order: str | None
) -> tuple[NDArray[np.int64], Topology]:
    """The device of every expert, [L, E], and the topology.

    Args:
        spec: the model's shape.
        placement: where its experts live; None: in order on the devices of `topology`.
        topology: without a placement, the devices.
        expert_order: the numbering of the model's experts (`placement.numbering`).

    Raises:
        ConfigError: without either, with both, and for a placement that numbers the experts otherwise.
        InfeasiblePlacement: when the placement is of another model or the experts do not fit the topology.
    """
    if placement is not None:
        if topology is not None:
            raise ConfigError("a placement brings its own topology; leave the other out")
        placement.require_model(spec, "the model")
        given = expert_order_of_placement(placement.method)
        require_same_numbering(given, "the placement", expert_order, "the model")
        return placement.device_of_expert(), placement.topology
    if topology is None:
        raise ConfigError("destinations need devices: give a placement, or a topology like 8 for experts in order")
    parsed = Topology.parse(topology) if isinstance(topology, str) else topology
    return linear_devices(spec, parsed), parsed
