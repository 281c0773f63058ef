"""The changes that Coterie knows, as evaluation takes them. A new one is one more function here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from coterie.errors import ConfigError, TraceError
from coterie.evaluate.change import Change
from coterie.models.layers import spec_of
from coterie.models.prune import Homes, prune_destinations
from coterie.models.prune_counts import PruneCounter
from coterie.models.rounding import rounded
from coterie.models.width_counts import WidthCounter
from coterie.models.widths import apply_widths, require_plan
from coterie.placement.numbering import EXPERT_ORDER_KEY, expert_order_of_placement, require_same_numbering
from coterie.progress import Progress, silent
from coterie.pruning.fitting import RuleChoice, fit_rule
from coterie.pruning.routed import RoutedTrace, linear_devices

if TYPE_CHECKING:
    from coterie.placement.placement import Placement
    from coterie.pruning.destinations import PruningRule
    from coterie.pruning.width_plan import WidthPlan
    from coterie.spec import MoESpec
    from coterie.topology import Topology
    from coterie.trace.routing_trace import RoutingTrace


def pruning(
    model: Any,
    choice: RuleChoice,
    *,
    placement: Placement | None = None,
    topology: Topology | None = None,
    trace: RoutingTrace | None = None,
    renormalise: bool | None = None,
    progress: Progress = silent,
) -> Change:
    """Destination pruning. On texts, window i has the home i mod G, whatever the batch; in tasks, row i of a batch.

    Args:
        model: the model that will be changed.
        choice: the rule, and its p or target peak.
        placement: where experts live.
        topology: without a placement, the devices, on which experts live in order.
        trace: of this model, with weights, on other text than is evaluated: a peak, and the rule priced, are fitted
            on it.
        renormalise: rescale kept weights; None: as the model does.
        progress: told of the fitting.

    Raises:
        ConfigError: when neither or both of placement and topology are given, a trace is needed and none is given, or
            the target cannot be reached.
        InfeasiblePlacement: when the placement is of another model.
        TraceError: when the trace is of another model.
    """
    spec = spec_of(model)
    if placement is not None and topology is not None:
        raise ConfigError("a placement brings its own topology; give --placement or --topology, not both")
    devices = placement.topology if placement is not None else topology
    if devices is None:
        raise ConfigError("pruning needs devices; give --topology, e.g. --topology 8, or --placement")
    held = getattr(model.config, EXPERT_ORDER_KEY, None)
    if placement is not None:
        placement.require_model(spec, "the model")
        require_same_numbering(expert_order_of_placement(placement.method), "the placement", held, "the model")
    if trace is not None:
        require_same_numbering(trace.provenance.get(EXPERT_ORDER_KEY), "the trace to fit on", held, "the model")
    device_LE = linear_devices(spec, devices) if placement is None else placement.device_of_expert()
    rule = _fitted(choice, spec, trace, device_LE, devices, progress)
    counter = PruneCounter(spec.num_layers, devices.num_devices)

    @contextmanager
    def apply(model: Any, sequences: Sequence[int] | None) -> Iterator[None]:
        homes: Homes = "rows" if sequences is None else [number % devices.num_devices for number in sequences]
        given = None if placement is not None else devices
        with prune_destinations(
            model, placement, rule=rule, topology=given, homes=homes, renormalise=renormalise, count=counter
        ):
            yield

    settings = {
        **rule.describe(),
        "asked": {"p": choice.p} if choice.p is not None else {"peak": choice.peak},
        "topology": devices.to_json(),
        "placement": "linear" if placement is None else dict(placement.method),
        "renormalise": "as the model does" if renormalise is None else renormalise,
    }
    return Change("pruning", apply, settings, lambda: {"measured": _without_layers(counter)})


def widths(model: Any, plan: WidthPlan) -> Change:
    """Experts that run only as wide as a plan says; what was measured is the share of full expert bytes.

    Args:
        model: the model that will be changed.
        plan: made from a profile of it.

    Raises:
        ConfigError: when the plan is of another model.
    """
    counter = WidthCounter()
    require_shape(plan, spec_of(model))
    require_plan(model, plan)

    @contextmanager
    def apply(model: Any, sequences: Sequence[int] | None) -> Iterator[None]:
        with apply_widths(model, plan, count=counter):
            yield

    told = {name: value for name, value in plan.settings.items() if name not in ("expected_bytes_by_layer", "profile")}
    return Change("widths", apply, {"policy": plan.policy, **told}, lambda: {"measured": _without_layers(counter)})


def rounding() -> Change:
    """Experts' weights in eight bits, as a store of `coterie pack --bits 8` holds them; of one model."""
    kept: dict[int, Any] = {}

    @contextmanager
    def apply(model: Any, sequences: Sequence[int] | None) -> Iterator[None]:
        with rounded(model, kept):
            yield

    return Change("rounding", apply, {"bits": 8})


def require_shape(plan: WidthPlan, spec: MoESpec) -> None:
    """Refuse a plan for another number of layers, experts or chosen experts.

    Raises:
        ConfigError: naming both.
    """
    theirs, ours = ((each.num_layers, each.num_experts, each.top_k) for each in (plan.spec, spec))
    if theirs != ours:
        raise ConfigError(
            f"the widths are for {plan.spec.model} ({theirs[0]} MoE layers of {theirs[1]} experts, top-{theirs[2]}), "
            f"the model has {ours[0]} of {ours[1]}, top-{ours[2]}; profile this model and plan its widths from that"
        )


def _fitted(
    choice: RuleChoice,
    spec: MoESpec,
    trace: RoutingTrace | None,
    device_LE: Any,
    topology: Topology,
    progress: Progress,
) -> PruningRule:
    """The rule with its strength."""
    from coterie.pruning.destinations import Cap, Naive

    if choice.p is not None and choice.name in ("cap", "naive"):
        return Cap(choice.p) if choice.name == "cap" else Naive(choice.p)
    if trace is None:
        what = "the rule priced" if choice.name == "priced" else "a target peak"
        raise ConfigError(f"{what} is fitted on a trace of the model; record one on other text (coterie record; --fit)")
    ours, theirs = ((each.num_layers, each.num_experts, each.top_k) for each in (spec, trace.spec))
    if ours != theirs:
        raise TraceError(
            f"the trace to fit on has {theirs[0]} MoE layers of {theirs[1]} experts, top-{theirs[2]}, the model "
            f"{ours[0]} of {ours[1]}, top-{ours[2]}; record one with this model"
        )
    return fit_rule(choice, RoutedTrace(trace, device_LE, topology), progress=progress)


def _without_layers(counter: Any) -> dict[str, Any]:
    """A counter's means over tokens and layers; windows overlap, and tokens of context count too."""
    figures: dict[str, Any] = counter.stats().to_json()
    del figures["layers"]
    return figures
