"""A setting for several workloads at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from coterie.placement.candidates import Setting
from coterie.placement.driver import prepare
from coterie.placement.numbering import EXPERT_ORDER_KEY, require_same_numbering
from coterie.progress import Progress, silent
from coterie.topology import Topology
from coterie.trace.mixture import mix
from coterie.trace.routing_trace import RoutingTrace, TokenSelector


def prepare_mixture(
    traces: Sequence[RoutingTrace],
    topology: Topology,
    parts: Sequence[TokenSelector] | None = None,
    *,
    seed: int = 0,
    keep_groups: bool | None = None,
    progress: Progress = silent,
    **copies: Any,
) -> Setting:
    """A setting whose trace interleaves several; the search averages the busiest device over them.

    What is balanced over the mixture need not be so on any of its parts, so each part is a window of the search.

    Args:
        traces: of one model, in one numbering of experts.
        topology: where experts can live.
        parts: the tokens of each; None: all.
        seed: of every tie and search.
        keep_groups: as for `prepare`.
        progress: told how far it is.
        copies: "redundant" and "dispatch", as for `prepare`.

    Raises:
        TraceError: when the traces are of different models.
        ConfigError: when they number experts differently.
    """
    order = traces[0].provenance.get(EXPERT_ORDER_KEY)
    for trace in traces[1:]:
        require_same_numbering(trace.provenance.get(EXPERT_ORDER_KEY), "a further trace", order, "the first")
    provenance = {
        EXPERT_ORDER_KEY: order, "mixture_of": [trace.fingerprint() for trace in traces],
        "synthetic": any(bool(trace.provenance.get("synthetic")) for trace in traces),
    }  # fmt: skip
    mixture, domain_T = mix(traces, parts, provenance)
    setting = prepare(mixture, topology, seed=seed, keep_groups=keep_groups, progress=progress, **copies)
    return replace(setting, domain_T=domain_T)
