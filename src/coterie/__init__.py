"""Coterie: experts work in company; place, prune and move them accordingly.

Names are imported when first used, so that `import coterie` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coterie.calibration.learning import learn_values as learn_values
    from coterie.calibration.profile import profile_model as profile_model
    from coterie.errors import CoterieError as CoterieError
    from coterie.models.bake import bake as bake
    from coterie.models.bake import unbake as unbake
    from coterie.models.pack import pack as pack
    from coterie.models.prune import prune_destinations as prune_destinations
    from coterie.models.record import record as record
    from coterie.models.reorder_checkpoint import reorder as reorder
    from coterie.models.widths import apply_widths as apply_widths
    from coterie.offloading.model import offload as offload
    from coterie.parallel.expert_parallel import expert_parallel as expert_parallel
    from coterie.placement.placement import Placement as Placement
    from coterie.pruning.width_planning import plan_widths as plan_widths
    from coterie.spec import MoESpec as MoESpec
    from coterie.topology import Topology as Topology
    from coterie.trace.routing_trace import RoutingTrace as RoutingTrace

__version__ = "0.1.0"

_HOME = {
    "CoterieError": "coterie.errors",
    "MoESpec": "coterie.spec",
    "Placement": "coterie.placement.placement",
    "RoutingTrace": "coterie.trace.routing_trace",
    "Topology": "coterie.topology",
    "profile_model": "coterie.calibration.profile",
    "bake": "coterie.models.bake",
    "unbake": "coterie.models.bake",
    "apply_widths": "coterie.models.widths",
    "expert_parallel": "coterie.parallel.expert_parallel",
    "learn_values": "coterie.calibration.learning",
    "offload": "coterie.offloading.model",
    "pack": "coterie.models.pack",
    "plan_widths": "coterie.pruning.width_planning",
    "prune_destinations": "coterie.models.prune",
    "record": "coterie.models.record",
    "reorder": "coterie.models.reorder_checkpoint",
}
__all__ = ["__version__", *sorted(_HOME)]  # noqa: PLE0604 - all strings


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'coterie' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
