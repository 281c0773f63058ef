"""Set a rule's strength on a trace: by threshold, or so that the busiest device gets no more than a target.

Every rule means the same by its target: remote peak traffic, averaged over the layers, of the tokens it is fitted on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from coterie.errors import ConfigError, unknown_name
from coterie.progress import Progress, silent
from coterie.pruning.destinations import Cap, Naive, Priced, PruningRule
from coterie.pruning.prices import Prices, fit_prices
from coterie.pruning.routed import RoutedTrace, peaks, squared_loss
from coterie.trace.routing_trace import ALL_TOKENS, TokenSelector

FLOORS = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9)
_ABOUT = 1.01  # squared losses so near to one another count as equal
THRESHOLD_STEPS = 10_000  # thresholds p are multiples of one ten-thousandth
Rule = TypeVar("Rule", bound=PruningRule)


@dataclass(frozen=True)
class RuleChoice:
    """Which rule, and how much it may drop; exactly one of `p` and `peak`.

    Attributes:
        name: "cap", "naive" or "priced".
        p: share of a token's weight that may be dropped; for "priced", the peak that CAP's rule reaches with it.
        peak: target of the remote peak traffic, visits per token, mean over layers.
        floor: for "priced", the least share of its weight a token keeps; None: the highest of `FLOORS`
            with which the target is met at about the least `squared_loss`.
    """

    name: str = "cap"
    p: float | None = None
    peak: float | None = None
    floor: float | None = 0.0

    def __post_init__(self) -> None:
        if self.name not in RULES:
            raise unknown_name("pruning rule", self.name, RULES)
        if (self.p is None) == (self.peak is None):
            given = "both" if self.p is not None else "neither"
            raise ConfigError(f"pruning needs a threshold p or a target peak, {given} given; choose one of them")
        if self.p is not None:
            Cap(self.p)  # checks the range
        if self.peak is not None and not 0 <= self.peak <= 1:
            raise ConfigError(f"peak = {self.peak:g} is not within 0 and 1; it is visits per token, e.g. 0.35")
        if self.floor and self.name != "priced":
            raise ConfigError(f"a floor belongs to the rule priced, not to {self.name}, whose p bounds the loss")


def fit_rule(
    choice: RuleChoice, routed: RoutedTrace, tokens: TokenSelector = ALL_TOKENS, progress: Progress = silent
) -> PruningRule:
    """The chosen rule with its strength set on the selected tokens.

    Raises:
        ConfigError: when the rule cannot bring the peak down to the target.
    """
    return RULES[choice.name](choice, routed, tokens, progress)


def _fit_cap(choice: RuleChoice, routed: RoutedTrace, tokens: TokenSelector, progress: Progress) -> Cap:
    return Cap(choice.p) if choice.p is not None else _fit_p(Cap, choice, routed, tokens, progress)


def _fit_naive(choice: RuleChoice, routed: RoutedTrace, tokens: TokenSelector, progress: Progress) -> Naive:
    return Naive(choice.p) if choice.p is not None else _fit_p(Naive, choice, routed, tokens, progress)


def _fit_p(
    rule: Callable[[float], Rule], choice: RuleChoice, routed: RoutedTrace, tokens: TokenSelector, progress: Progress
) -> Rule:
    """The least p, in ten-thousandths, that reaches the target peak."""
    assert choice.peak is not None
    return weakest(lambda n: rule(n / THRESHOLD_STEPS), THRESHOLD_STEPS, routed, tokens, choice.peak, progress)


def _fit_priced(choice: RuleChoice, routed: RoutedTrace, tokens: TokenSelector, progress: Progress) -> Priced:
    """The least prices that reach the target peak, or the peak that CAP's rule reaches with the given p.

    One price of traffic serves every layer (`prices`): the lowest with which the target is met.
    """
    peak = choice.peak if choice.p is None else float(peaks(routed, Cap(choice.p), tokens).mean())
    assert peak is not None
    prices = fit_prices(routed, tokens, progress)
    floor = choose_floor(prices, routed, tokens, peak, progress) if choice.floor is None else choice.floor
    return priced_at(prices, floor, routed, tokens, peak, progress)


def priced_at(
    prices: Prices, floor: float, routed: RoutedTrace, tokens: TokenSelector, peak: float, progress: Progress = silent
) -> Priced:
    """The least prices that bring the selected tokens' peak within a target, at a floor."""
    return weakest(lambda n: Priced(prices.theta(n), floor), prices.num_strengths, routed, tokens, peak, progress)


def choose_floor(
    prices: Prices, routed: RoutedTrace, tokens: TokenSelector, peak: float, progress: Progress = silent
) -> float:
    """The highest floor of `FLOORS` that meets the target peak at about the least `squared_loss`; 0 where none does.

    Source: beyond the papers. Without a floor prices lose the least weight, but all of it for some tokens. A floor that
    costs nothing where it is fitted is kept: on other tokens, whose busy devices differ, it limits what one can lose.
    """
    found = {}
    for floor in FLOORS:
        try:
            found[floor] = squared_loss(routed, priced_at(prices, floor, routed, tokens, peak, progress), tokens)
        except ConfigError:  # higher floors leave more traffic still
            break
    return max((floor for floor in found if found[floor] <= _ABOUT * min(found.values())), default=0.0)


def weakest(
    rule_at: Callable[[int], Rule],
    strengths: int,
    routed: RoutedTrace,
    tokens: TokenSelector,
    target: float,
    progress: Progress = silent,
) -> Rule:
    """The rule of least strength whose remote peak traffic is within the target, by bisection.

    Args:
        rule_at: the rule of each strength, 0 .. strengths - 1, the last the strongest.
        strengths: how many there are.
        routed: the trace and its devices.
        tokens: what to measure on.
        target: remote visits per token to the busiest device, mean over layers.
        progress: told of every measurement.

    Raises:
        ConfigError: when the strongest rule leaves a higher peak.
    """
    tries = (strengths - 1).bit_length() + 1

    def peak_at(strength: int, done: int) -> float:
        peak = float(peaks(routed, rule_at(strength), tokens).mean())
        progress("meeting the target peak", done, tries)
        return peak

    limit = target + 1e-12  # a mean over layers is rounded
    low, high, done = 0, strengths - 1, 1
    strongest = peak_at(high, done)
    if strongest > limit:
        rule = rule_at(high)
        remedy = " or lower the floor" if isinstance(rule, Priced) else ", or use the rule priced"
        raise ConfigError(
            f"rule {rule.name} cannot bring the remote peak traffic down to {target:g}: "
            f"{strongest:.4f} is left at its strongest; ask for a higher peak{remedy}"
        )
    while low < high:
        middle, done = (low + high) // 2, done + 1
        low, high = (low, middle) if peak_at(middle, done) <= limit else (middle + 1, high)
    return rule_at(high)


RULES: dict[str, Callable[[RuleChoice, RoutedTrace, TokenSelector, Progress], PruningRule]] = {
    "cap": _fit_cap,
    "naive": _fit_naive,
    "priced": _fit_priced,
}
"""How each rule's strength is set, by name."""
