"""Prune a whole trace: fit on its earlier sequences, drop destinations in all of it, report on both parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import coterie
from coterie.progress import Progress, silent
from coterie.pruning.destinations import LayerTokens, PruningRule
from coterie.pruning.fitting import RuleChoice, fit_rule
from coterie.pruning.report import PruneReport, Tally
from coterie.pruning.routed import RoutedTrace
from coterie.topology import Topology
from coterie.trace.check import pieces
from coterie.trace.routing_trace import RoutingTrace
from coterie.trace.splits import Split, split
from coterie.trace.storage import ARRAY_FIELDS, describe, writing


def prune_trace(
    trace: RoutingTrace,
    device_LE: NDArray[np.int64],
    topology: Topology,
    choice: RuleChoice,
    heldout: float = 0.5,
    progress: Progress = silent,
) -> tuple[NDArray[np.bool_], PruneReport]:
    """Which of a trace's routing decisions a pruning rule keeps.

    Args:
        trace: with routing weights.
        device_LE: [L, E], the device that hosts each expert.
        topology: devices and link costs.
        choice: the rule and its strength; whatever is fitted is fitted on the first part.
        heldout: share of the tokens, the latest sequences, that only measure.
        progress: told of the passes over the trace.

    Returns:
        [L, T, K] bool, true only where the trace kept the expert too; and the report.

    Raises:
        TraceError: when the trace has no weights or too few tokens to split.
        ConfigError: when the target cannot be reached.
        InfeasiblePlacement: when `device_LE` does not fit the trace or the topology.
    """
    routed = RoutedTrace(trace, device_LE, topology)
    parts = split(trace, heldout)
    rule = fit_rule(choice, routed, parts.first, progress)
    kept_LTK = np.empty(trace.expert_ids.shape, dtype=np.bool_)

    def keep(layer: int, tokens: slice, kept_TK: NDArray[np.bool_]) -> None:
        kept_LTK[layer, tokens] = kept_TK

    return kept_LTK, _prune(routed, rule, parts, keep, progress)


def prune_trace_to(
    path: str | Path,
    trace: RoutingTrace,
    device_LE: NDArray[np.int64],
    topology: Topology,
    choice: RuleChoice,
    heldout: float = 0.5,
    placement: str = "linear",
    progress: Progress = silent,
) -> PruneReport:
    """Write the pruned trace to `path`, whole or not at all, holding a bounded piece in memory.

    Dropped decisions keep their ids and weights; `kept` is false for them. The provenance gains "pruning": the rule
    with its parameters, the topology, the placement's name and the version.

    Args:
        path: the safetensors file to write.
        trace: as for `prune_trace`, like the arguments not named here.
        device_LE: as there.
        topology: as there.
        choice: as there.
        heldout: as there.
        placement: a name for `device_LE`, for the provenance.
        progress: as there.
    """
    routed = RoutedTrace(trace, device_LE, topology)
    parts = split(trace, heldout)
    rule = fit_rule(choice, routed, parts.first, progress)
    provenance = {**trace.provenance, "pruning": pruning_provenance(trace, rule, choice, topology, placement)}
    held = {name: getattr(trace, name) for name in ARRAY_FIELDS if getattr(trace, name) is not None}
    arrays = {name: (value.dtype, value.shape) for name, value in held.items()}
    arrays["kept"] = (np.bool_, trace.expert_ids.shape)
    with writing(Path(path), arrays, describe(replace(trace, provenance=provenance))) as target:
        copied = [name for name in held if name != "kept"]

        def keep(layer: int, tokens: slice, kept_TK: NDArray[np.bool_]) -> None:
            target["kept"][layer, tokens] = kept_TK
            for name in copied:
                if held[name].ndim == 3:
                    target[name][layer, tokens] = held[name][layer, tokens]
                elif layer == 0:
                    target[name][tokens] = held[name][tokens]

        return _prune(routed, rule, parts, keep, progress)


def pruning_provenance(
    trace: RoutingTrace, rule: PruningRule, choice: RuleChoice, topology: Topology, placement: str
) -> dict[str, Any]:
    """What a pruned trace remembers of its pruning; "previous" holds that of an earlier pruning."""
    earlier = {"previous": trace.provenance["pruning"]} if "pruning" in trace.provenance else {}
    asked = {"asked_p": choice.p} if choice.p is not None else {"asked_peak": choice.peak}
    return {
        **rule.describe(), **asked, "topology": topology.to_json(), "placement": placement,
        "coterie": coterie.__version__, **earlier,
    }  # fmt: skip


def _prune(
    routed: RoutedTrace,
    rule: PruningRule,
    parts: Split,
    keep: Callable[[int, slice, NDArray[np.bool_]], None],
    progress: Progress,
) -> PruneReport:
    """Hand every piece's kept slots to `keep`, and measure."""
    trace = routed.trace
    late_T = np.zeros(trace.num_tokens, dtype=np.bool_)
    late_T[parts.second] = True
    tallies = [Tally(trace.num_layers, routed.topology.num_devices) for _ in range(2)]
    for layer in range(trace.num_layers):
        for tokens in pieces(trace.num_tokens):
            piece = routed.layer(layer, tokens)
            kept_TK = rule.prune_layer(layer, piece)
            keep(layer, tokens, kept_TK)
            for tally, chosen_T in zip(tallies, (~late_T[tokens], late_T[tokens]), strict=True):
                if chosen_T.any():
                    tally.add(layer, _select(piece, chosen_T), kept_TK[chosen_T])
        progress("pruning", layer + 1, trace.num_layers)
    fit, heldout = (tally.report() for tally in tallies)
    return PruneReport(rule.describe(), parts.by, fit, heldout)


def _select(tokens: LayerTokens, chosen_T: NDArray[np.bool_]) -> LayerTokens:
    return LayerTokens(
        tokens.device_TK[chosen_T], tokens.weight_TK[chosen_T], tokens.before_TK[chosen_T], tokens.home_T[chosen_T],
        tokens.cost_GG,
    )  # fmt: skip
