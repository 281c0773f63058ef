"""What the parallel benchmark compares: placements and pruning rules fitted on the earlier half of a trace.

The later half is replayed when the table is timed, and nothing is chosen by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from coterie.parallel.candidates import Candidate, make_candidates
from coterie.parallel.replay import Replay, spaced_layers
from coterie.placement.driver import place, prepare
from coterie.placement.placement import Placement
from coterie.progress import Progress, silent
from coterie.pruning.destinations import Cap, Naive, Priced, PruningRule
from coterie.pruning.prices import Prices, fit_prices
from coterie.pruning.routed import RoutedTrace, squared_loss
from coterie.pruning.traffic import kept_weight
from coterie.topology import Topology
from coterie.trace.routing_trace import RoutingTrace, TokenSelector
from coterie.trace.splits import split

HALF = 0.5
COPIES = ", copies"  # ends the names of placements with copies
RULES = ("naive", "cap", "priced", "priced, squares")


@dataclass(frozen=True)
class Routing:
    """A trace in two halves, as steps.

    Attributes:
        trace: with routing weights.
        fit: steps of the earlier half.
        heldout: steps of the later half.
    """

    trace: RoutingTrace
    fit: Replay
    heldout: Replay

    @classmethod
    def of(cls, trace: RoutingTrace, num_devices: int, batch: int, num_layers: int) -> Routing:
        """Halves by whole sequences; so many layers, evenly spaced."""
        parts = split(trace, HALF)
        layers = spaced_layers(trace.num_layers, num_layers)
        fit, heldout = (Replay.of(trace, num_devices, batch, tokens, layers) for tokens in (parts.first, parts.second))
        return cls(trace, fit, heldout)


@dataclass(frozen=True)
class Case:
    """One line of the table before it is timed.

    Attributes:
        placement: its name.
        where: the placement.
        rule: "none", or the pruning rule's name.
        p: what the rule was given.
        replay: held-out steps, pruned.
    """

    placement: str
    where: Placement
    rule: str
    p: float
    replay: Replay

    @property
    def name(self) -> str:
        """What to call it in messages."""
        return self.placement if self.rule == "none" else f"{self.placement}, {self.rule} {self.p:g}"


def candidates_of(
    routing: Routing, topology: Topology, points: int, seed: int, progress: Progress = silent
) -> list[Candidate]:
    """Linear, EPLB, CAP and our spectrum, fitted on the earlier half."""
    setting = prepare(routing.trace, topology, seed=seed, progress=progress)
    return [
        Candidate(each.name.replace("coterie-", "ours-"), each.placement)
        for each in make_candidates(setting, points, "coterie", heldout=HALF)
    ]


def copied(routing: Routing, topology: Topology, redundant: int, seed: int, progress: Progress = silent) -> list[Case]:
    """EPLB and our default pick with slots for copies of experts, nothing dropped; none without such slots."""
    if not redundant:
        return []
    setting = prepare(routing.trace, topology, seed=seed, progress=progress, redundant=redundant)
    made = {"eplb": place(setting, "eplb", heldout=HALF), "ours": place(setting, heldout=HALF)}
    return [Case(f"{name}{COPIES}", placed, "none", 0.0, routing.heldout) for name, placed in made.items()]


def unpruned(candidates: Sequence[Candidate], routing: Routing) -> list[Case]:
    """Every candidate, nothing dropped."""
    return [Case(each.name, each.placement, "none", 0.0, routing.heldout) for each in candidates]


def pruned(
    placement: Placement, routing: Routing, thresholds: Sequence[float], rules: Sequence[str] = RULES,
    progress: Progress = silent,
) -> list[Case]:  # fmt: skip
    """One placement, "ours", with each rule at each threshold; for "priced" see `priced_like_cap`."""
    device_LE, topology = placement.device_of_expert(), placement.topology
    routed, first = RoutedTrace(routing.trace, device_LE, topology), split(routing.trace, HALF).first
    prices = fit_prices(routed, first, progress)
    made: dict[str, Callable[[float], PruningRule]] = {
        "naive": Naive, "cap": Cap,
        "priced": lambda p: priced_like_cap(prices, routed, first, p, mean_loss),
        "priced, squares": lambda p: priced_like_cap(prices, routed, first, p, squared_loss),
    }  # fmt: skip
    return [
        Case("ours", placement, name, p, routing.heldout.pruned(made[name](p), device_LE, topology))
        for p in thresholds
        for name in rules
    ]


def priced_like_cap(
    prices: Prices, routed: RoutedTrace, tokens: TokenSelector, p: float,
    loss: Callable[[RoutedTrace, PruningRule, TokenSelector], float],
) -> Priced:  # fmt: skip
    """The strongest prices that lose at most what CAP's rule at p loses, where both are fitted.

    Equal loss of quality, as far as routing alone tells: the model itself is not run here. Mean lost weight is nearest
    to what perplexity says on models that run (README); its square counts large losses for more.
    """
    limit = loss(routed, Cap(p), tokens)
    low, high = 0, prices.num_strengths - 1
    while low < high:
        middle = (low + high + 1) // 2
        fine = loss(routed, Priced(prices.theta(middle)), tokens) <= limit
        low, high = (middle, high) if fine else (low, middle - 1)
    return Priced(prices.theta(low))


def mean_loss(routed: RoutedTrace, rule: PruningRule, tokens: TokenSelector) -> float:
    """Mean over tokens and layers of the share of its weight that a token loses."""
    lost, count = 0.0, 0
    for layer in range(routed.trace.num_layers):
        for piece in routed.layer_pieces(layer, tokens):
            lost += float((1 - kept_weight(piece, rule.prune_layer(layer, piece))).sum())
            count += len(piece.home_T)
    return lost / count


def at_link_costs(placement: Placement, routing: Routing, p: float, costs: Sequence[float]) -> list[Case]:
    """One placement, "ours", pruned by CAP's rule as if crossing nodes cost so much (Table II)."""
    device_LE, found = placement.device_of_expert(), []
    for cost in costs:
        topology = replace(placement.topology, inter_cost=cost)
        replay = routing.heldout.pruned(Cap(p), device_LE, topology)
        found.append(Case("ours", placement, f"cap, c = {cost:g}", p, replay))
    return found
