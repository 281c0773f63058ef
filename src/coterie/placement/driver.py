"""From a trace to placements: fit on the earlier sequences, choose on a slice of them, measure on the rest."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

import coterie
from coterie.errors import ConfigError, InfeasiblePlacement
from coterie.placement.candidates import Candidates, Measured, Setting, measure_candidates, propose
from coterie.placement.copies import FEWEST_DEVICES, check_rule
from coterie.placement.groups import has_freedom
from coterie.placement.methods import get_copy_method, get_method
from coterie.placement.metrics import LayerMetrics, full_metrics
from coterie.placement.numbering import EXPERT_ORDER_KEY
from coterie.placement.objective import Objective
from coterie.placement.placement import Placement
from coterie.placement.problem import TRIAL_TOKENS
from coterie.profile.from_histogram import REBUILT, rebuilt_from_histogram
from coterie.progress import Progress, silent
from coterie.spec import MoESpec
from coterie.topology import Topology
from coterie.trace.routing_trace import ALL_TOKENS, RoutingTrace, TokenSelector
from coterie.trace.splits import split

VALIDATION_SHARE = 0.2
STANDARD_ERRORS = 2
_COMPILE_TOKENS = 8
COMPARED = ("linear", "eplb", "cap", "coterie")


def prepare(
    trace: RoutingTrace,
    topology: Topology,
    *,
    seed: int = 0,
    keep_groups: bool | None = None,
    objective: Objective | None = None,
    progress: Progress = silent,
    redundant: int = 0,
    dispatch: str = FEWEST_DEVICES,
) -> Setting:
    """The setting that `place`, `spectrum` and `compare` work in.

    Args:
        trace: the routing.
        topology: where experts can live.
        seed: of every tie and search.
        keep_groups: keep router groups whole; None: if the model routes by groups.
        objective: what is minimised; None: the default for the topology.
        progress: told how far it is.
        redundant: slots of a layer for copies of experts.
        dispatch: the rule by which tokens choose copies, one of `copies.RULES`.

    Raises:
        InfeasiblePlacement: when the experts do not fit the topology.
        ConfigError: when groups are to be kept and the model has none, or copies are wanted that cannot be.
    """
    spec = trace.spec
    require_possible(spec, topology, redundant, dispatch, keep_groups=keep_groups)
    if redundant:
        keep_groups = False  # groups matter where experts are renumbered; copies cannot be
    suspicion = rebuilt_from_histogram(trace)
    if suspicion:
        warnings.warn(f"the trace may be rebuilt from load histograms: {suspicion}; {REBUILT}", stacklevel=2)
    if keep_groups and spec.num_groups == 1:
        raise ConfigError(f"--keep-groups needs a model that routes by groups; {spec.model} has num_groups = 1")
    grouped = spec.num_groups > 1 if keep_groups is None else keep_groups
    if grouped and not has_freedom(spec.num_experts, spec.num_groups, topology):
        warnings.warn(
            f"keeping {spec.num_groups} router groups whole on {topology} leaves no freedom: every placement has the "
            "same traffic; use another number of devices",
            stacklevel=2,
        )
    objective = objective or Objective.for_topology(topology)
    return Setting(trace, topology, objective, seed, grouped, progress, redundant, dispatch)


def require_possible(
    spec: MoESpec,
    topology: Topology,
    redundant: int = 0,
    dispatch: str = FEWEST_DEVICES,
    method: str | None = None,
    *,
    keep_groups: bool | None = None,
) -> None:
    """Raise for what `prepare` or a method would refuse of any trace of a model, without having one.

    Args:
        spec: the model's shape.
        topology: where experts can live.
        redundant: slots of a layer for copies of experts.
        dispatch: the rule by which tokens choose copies.
        method: a name of `METHODS` that is to place; None: any.
        keep_groups: see `prepare`.

    Raises:
        InfeasiblePlacement: when the experts do not fit the topology.
        ConfigError: for an unknown rule or method, one that places no copies, or copies that cannot be.
    """
    check_rule(dispatch)
    if method is not None:
        (get_copy_method if redundant else get_method)(method)
    slots_G = topology.slots(spec.num_experts + redundant)
    if redundant:
        _check_copies(redundant, int(slots_G.max()), spec.num_experts, topology, keep_groups=keep_groups)


def _check_copies(
    redundant: int, most_slots: int, num_experts: int, topology: Topology, *, keep_groups: bool | None
) -> None:
    if redundant < 0:
        raise ConfigError(f"--redundant {redundant}; slots for copies are at least 0")
    if most_slots > num_experts:
        raise ConfigError(
            f"--redundant {redundant} gives a device of {topology} {most_slots} slots; a device holds each of "
            f"{num_experts} experts once at most: use {num_experts * (topology.num_devices - 1)} at most"
        )
    if keep_groups:
        raise ConfigError(
            "--keep-groups and --redundant exclude each other: groups are kept for renumbering, which has no copies"
        )


def place(setting: Setting, method: str = "coterie", balance: float | None = None, heldout: float = 0.2) -> Placement:
    """One placement, chosen on a validation slice and measured on held-out sequences.

    Without `balance` the choice is, among placements whose B, DPT and peak traffic on the validation slice are no
    worse than those of CAP's Algorithm 1 (beyond chance), the one with the lowest objective. With `balance` it is
    the cheapest with at most that B on the validation slice. The chosen price of balance is then applied to
    candidates fitted on validation and fitting tokens together. B is a maximum, and on a small slice chance raises it:
    where no candidate reaches the limit there, the limit holds on all the fitting tokens instead, with a warning.

    Args:
        setting: trace, topology, objective, seed.
        method: a name of `METHODS`.
        balance: largest B wanted, at least 1; None: the default choice.
        heldout: share of the tokens, the latest sequences, that only measure; 0: none.

    Raises:
        ConfigError: for an unknown method or a balance below 1.
        InfeasiblePlacement: when no candidate reaches the balance even on the fitting tokens.
    """
    parts = _parts(setting, heldout)
    candidates, point = choose(setting, method, parts[0], balance)
    return _placement(setting, method, candidates, point, parts, {"balance": balance, "heldout": heldout})


def spectrum(setting: Setting, points: int, method: str = "coterie", heldout: float = 0.2) -> list[Placement]:
    """At most `points` placements, from the least communication to the best balance, on the Pareto front.

    B is spaced geometrically between both ends; points that would repeat are left out.

    Args:
        setting: trace, topology, objective, seed.
        points: how many, at least 1.
        method: a name of `METHODS`.
        heldout: share of the tokens that only measure; 0: none.
    """
    if points < 1:
        raise ConfigError(f"a spectrum of {points} points; ask for at least 1")
    parts = _parts(setting, heldout)
    candidates = propose(setting, method, parts[0])
    chosen = spaced_points(candidates.path.means(candidates.fit.values("balance")), points)
    options = {"spectrum": points, "heldout": heldout}
    return [_placement(setting, method, candidates, point, parts, options) for point in chosen]


def compare(setting: Setting, heldout: float = 0.5, methods: Sequence[str] = COMPARED) -> dict[str, Any]:
    """Every method's metrics on the fitting part and on held-out sequences, and the seconds each took."""
    parts = split(setting.trace, heldout)
    _compile(setting, methods)
    rows: dict[str, Any] = {}
    for method in methods:
        started = time.perf_counter()
        candidates, point = choose(setting, method, parts.first)
        seconds = time.perf_counter() - started
        device_LE = candidates.placement(point)
        fit, unseen = (
            full_metrics(setting.trace, device_LE, setting.topology, part, setting.dispatch)
            for part in (parts.first, parts.second)
        )
        rows[method] = {**fit, "seconds": seconds, "heldout": unseen}
    about = {"fit_tokens": parts.num_first, "heldout_tokens": parts.num_second, "split_by": parts.by}
    return {
        "methods": rows,
        "trace": {**describe_trace(setting.trace), **about},
        "topology": setting.topology.to_json(),
        **({"redundant": setting.redundant, "dispatch": setting.dispatch} if setting.redundant else {}),
        "seed": setting.seed,
        "objective": setting.objective.to_json(),
        "coterie": coterie.__version__,
    }


def _compile(setting: Setting, methods: Sequence[str]) -> None:
    """Have the kernels compiled (once on a machine; later they are loaded), so that no method's seconds hold it."""
    setting.progress("compiling, once on this machine", 0, 1)
    for method in methods:
        propose(replace(setting, progress=silent), method, slice(0, _COMPILE_TOKENS))
    setting.progress("compiling, once on this machine", 1, 1)


def choose(
    setting: Setting, method: str, fitting: TokenSelector, balance: float | None = None
) -> tuple[Candidates, int]:
    """Candidates fitted on `fitting`, and the point of their path that was chosen; see `place`."""
    if balance is not None and not 1 <= balance < np.inf:
        raise ConfigError(
            f"balance = {balance:g}; B is the largest device load over the mean: a number from 1 on, 1 being even"
        )
    if method in ("linear", "eplb", "cap") and balance is None:
        return propose(setting, method, fitting), 0
    inner = split(setting.trace, VALIDATION_SHARE, fitting)
    trial = propose(setting, method, inner.first, TRIAL_TOKENS)  # it only finds a price
    validation = measure_candidates(setting, trial, inner.second)
    balances = trial.path.means(validation.values("balance"))
    if balance is None:
        reference = propose(setting, "cap", inner.first)
        cap = measure_candidates(setting, reference, inner.second).at(reference.path.choice(0))
        point = _default_point(setting.objective, trial, validation, cap)
    else:
        point = int(np.argmax(balances <= balance)) if balances.min() <= balance else trial.path.num_points - 1
    price = float(trial.path.price_S[point - 1]) if point else -np.inf
    final = propose(setting, method, fitting)
    chosen = final.path.at_price(price)
    if balance is not None:  # the refitted candidates must keep the promise, too
        fitted = final.path.means(final.fit.values("balance"))
        again = final.path.means(measure_candidates(setting, final, inner.second).values("balance"))
        if balances.min() <= balance and again.min() <= balance:
            within = _within(again, balance, method)  # B falls along the path where it was fitted; here it need not
            chosen = int(next((candidate for candidate in within if candidate >= chosen), within[-1]))
        else:
            chosen = int(_within(fitted, balance, method)[0])
            warnings.warn(
                f"B <= {balance:g} holds on the fitting tokens ({fitted[chosen]:.3f}) but not on the validation slice "
                f"({again[chosen]:.3f}), where the most balanced placement has {again.min():.3f}; a longer trace "
                "makes both agree",
                stacklevel=3,
            )
    return final, chosen


def _within(balances: NDArray[np.float64], limit: float, method: str) -> NDArray[np.int64]:
    """The points of a path with at most this B, at least one."""
    within = np.flatnonzero(balances <= limit)
    if not within.size:
        raise InfeasiblePlacement(
            f"no placement by {method} has B <= {limit:g}; the most balanced has {balances.min():.3f} on the fitting "
            "tokens: ask for at least that"
        )
    return within


def _default_point(objective: Objective, trial: Candidates, validation: Measured, cap: Sequence[LayerMetrics]) -> int:
    """The point with the lowest objective among those that are no worse than CAP's Algorithm 1 on the validation slice.

    No worse in B, DPT and peak traffic, each beyond chance: the slice is small, so a mean over layers may exceed
    CAP's by two standard errors of the difference between layers. Where no point is so, balance decides alone.
    """
    path = trial.path
    score = trial.score(objective)
    within = {}
    for name in ("balance", "dpt", "peak_traffic"):
        difference = path.table(validation.values(name)) - np.array([getattr(layer, name) for layer in cap])
        error = difference.std(axis=1) / np.sqrt(len(cap))
        within[name] = difference.mean(axis=1) <= STANDARD_ERRORS * error
    for allowed in (within["balance"] & within["dpt"] & within["peak_traffic"], within["balance"]):
        if allowed.any():
            return int(np.argmin(np.where(allowed, score, np.inf)))
    return path.num_points - 1


def spaced_points(balances: NDArray[np.float64], points: int) -> list[int]:
    """Points of a path, at most so many, whose B is spaced geometrically from the first to the last."""
    limits = np.geomspace(balances[0], balances[-1], points) if points > 1 else balances[:1]
    chosen = [int(np.argmax(balances <= limit + 1e-9)) for limit in limits]
    return sorted(set(chosen))


def _parts(setting: Setting, heldout: float) -> tuple[TokenSelector, TokenSelector | None]:
    if heldout == 0:
        return ALL_TOKENS, None
    parts = split(setting.trace, heldout)
    return parts.first, parts.second


def _placement(
    setting: Setting, method: str, candidates: Candidates, point: int,
    parts: tuple[TokenSelector, TokenSelector | None], options: Mapping[str, Any],
) -> Placement:  # fmt: skip
    device_LE = candidates.placement(point)
    metrics = {
        name: full_metrics(setting.trace, device_LE, setting.topology, tokens, setting.dispatch)
        for name, tokens in zip(("fit", "heldout"), parts, strict=True)
        if tokens is not None
    }
    about = {
        "name": method,
        **options,
        "point": point,
        "seed": setting.seed,
        "keep_groups": setting.keep_groups,
        **({"redundant": setting.redundant, "dispatch": setting.dispatch} if setting.redundant else {}),
        "objective": setting.objective.to_json(),
        "trace": describe_trace(setting.trace),
        "coterie": coterie.__version__,
    }
    make = Placement.from_hosts if setting.redundant else Placement.from_devices
    return make(device_LE, setting.topology, setting.trace.spec, about, metrics)


def describe_trace(trace: RoutingTrace) -> dict[str, Any]:
    """What a result says about the trace it came from."""
    return {
        "model": trace.spec.model, "layers": trace.num_layers, "experts": trace.spec.num_experts,
        "top_k": trace.spec.top_k, "tokens": trace.num_tokens, "sequences": trace.num_sequences,
        "fingerprint": trace.fingerprint(), "synthetic": bool(trace.provenance.get("synthetic", False)),
        EXPERT_ORDER_KEY: trace.provenance.get(EXPERT_ORDER_KEY),
    }  # fmt: skip
