"""What a placement costs on routing that came after it, beside one made now, and whether to make it again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import coterie
from coterie.errors import ConfigError
from coterie.placement.balance import linear
from coterie.placement.copies import rule_of
from coterie.placement.driver import STANDARD_ERRORS, choose, describe_trace, prepare
from coterie.placement.methods import METHODS
from coterie.placement.metrics import SCALARS, LayerMetrics, average, measure
from coterie.placement.numbering import EXPERT_ORDER_KEY, expert_order_of_placement, require_same_numbering
from coterie.placement.objective import Objective
from coterie.placement.placement import Placement
from coterie.progress import Progress, silent
from coterie.trace.routing_trace import RoutingTrace
from coterie.trace.splits import split

WORTH = 0.02


def drift(
    placement: Placement,
    trace: RoutingTrace,
    *,
    heldout: float = 0.5,
    worth: float = WORTH,
    method: str | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> dict[str, Any]:
    """A placement, a fresh one and linear on the later sequences of a new trace; ready for JSON.

    The fresh one is made from the earlier sequences, as the placement was made: same method, same limit on B, same
    treatment of router groups. Both are scored by the objective with its price of balance, layer by layer. It is worth
    redoing when the fresh one's mean score is lower by more than `worth` and by more than two standard errors of the
    difference between layers.

    Args:
        placement: made some time ago.
        trace: routing recorded since.
        heldout: share of the new tokens, the latest sequences, that only measure.
        worth: the least gain worth acting on, as a share of the score.
        method: whose placement to make; None: the placement's own, or `coterie` where it is linear or unknown.
        seed: of the fresh placement.
        progress: told how far it is.

    Returns:
        "placements" by name ("then", where the file says what it measured on tokens it had not seen, "now", "fresh"
        and "linear") with their means over layers, "gain", its "standard_error", "redo", "reason" and the setting.

    Raises:
        ConfigError: for another numbering of experts, an unknown method, or a `worth` outside 0 and 1.
        InfeasiblePlacement: when the placement is for another model.
    """
    if not 0 <= worth < 1:
        raise ConfigError(f"worth = {worth:g} is not within 0 and 1; it is a share of the score, e.g. 0.02")
    placement.require_model(trace.spec, "the new trace")
    held = trace.provenance.get(EXPERT_ORDER_KEY)
    require_same_numbering(expert_order_of_placement(placement.method), "the placement", held, "the new trace")
    own = placement.method.get("name")
    chosen = method or (own if own in METHODS and own != "linear" else "coterie")
    copies = placement.num_copies
    groups = placement.method.get("keep_groups") if trace.spec.num_groups > 1 and not copies else None
    setting = prepare(
        trace, placement.topology, seed=seed, keep_groups=groups, progress=progress, redundant=copies,
        dispatch=rule_of(placement.method),
    )  # fmt: skip
    parts = split(trace, heldout)
    candidates, point = choose(setting, chosen, parts.first, placement.method.get("balance") if not method else None)
    evenly = (
        replace(placement.topology, slots_per_device=None) if copies else placement.topology
    )  # linear has no copies
    in_order = np.tile(linear(evenly.slots(trace.spec.num_experts)), (trace.num_layers, 1))
    devices = {"now": placement.where(), "fresh": candidates.placement(point), "linear": in_order}
    layers = {
        name: measure(trace, rows, placement.topology, parts.second, setting.dispatch) for name, rows in devices.items()
    }
    scores = {name: _score(setting.objective, rows) for name, rows in layers.items()}
    then = placement.metrics.get("heldout")
    told = {"then": {name: then[name] for name in SCALARS if name in then}} if then else {}
    return {
        "placements": {**told, **{name: {**average(rows), "score": float(scores[name].mean())} for name, rows in
                                  layers.items()}},
        **_verdict(scores["now"], scores["fresh"], scores["linear"], worth),
        "method": chosen,
        "made_from": placement.method.get("trace"),
        "trace": {
            **describe_trace(trace), "fit_tokens": parts.num_first, "heldout_tokens": parts.num_second,
            "split_by": parts.by,
        },
        "topology": placement.topology.to_json(),
        "objective": setting.objective.to_json(),
        "worth": worth,
        "seed": seed,
        "coterie": coterie.__version__,
    }  # fmt: skip


def _score(objective: Objective, layers: Sequence[LayerMetrics]) -> Any:
    """Cost and priced balance of every layer, [L]."""
    return np.array([objective.cost(layer) + objective.balance * layer.balance for layer in layers])


def _verdict(now_L: Any, fresh_L: Any, linear_L: Any, worth: float) -> dict[str, Any]:
    """How much lower the fresh score is, as a share of the present one, how sure that is, and what follows."""
    base = float(now_L.mean()) or 1.0
    difference_L = (now_L - fresh_L) / base
    gain, error = float(difference_L.mean()), float(difference_L.std() / np.sqrt(difference_L.size))
    sure = gain > STANDARD_ERRORS * error
    redo = bool(gain > worth and sure)
    if redo:
        reason = f"a fresh placement costs {gain:.1%} less"
    elif gain <= 0:
        reason = "a fresh placement costs no less"
    elif not sure:
        reason = f"a fresh placement costs {gain:.1%} less, which may be chance (layers differ by {error:.1%})"
    else:
        reason = f"a fresh placement costs {gain:.1%} less, under the {worth:.1%} that are worth it"
    if now_L.mean() >= linear_L.mean():
        reason += "; linear is no worse than the present one"
    return {"gain": gain, "standard_error": error, "redo": redo, "reason": reason}
