"""Destination pruning one token at a time in plain Python: slow, obvious, and what the fast forms are tested against.

A token is a list of (device, weight) pairs, one for each expert it still keeps, in slot order; the functions return
the set of devices kept or, for the naive rule, the list of slots kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

from coterie.errors import ConfigError

TOLERANCE = 1e-6
MAX_EXACT_DEVICES = 16

Token = Sequence[tuple[int, float]]


def shares(token: Token) -> list[float]:
    """The weights of a token's experts divided by their sum; equal shares where all are zero."""
    total = 0.0
    for _, weight in token:
        total += weight
    return [weight / total if total > 0 else 1 / len(token) for _, weight in token]


def device_weights(token: Token) -> dict[int, float]:
    """`a_d`, the token's share of weight on each device it visits, in order of first use."""
    weights: dict[int, float] = {}
    for (device, _), share in zip(token, shares(token), strict=True):
        weights[device] = weights.get(device, 0.0) + share
    return weights


def order_to_keep(weights: Mapping[int, float], home: int, cost: Mapping[int, float]) -> list[int]:
    """Devices in the order CAP keeps them: home, then falling a/c; ties by lower cost, then lower device."""
    remote = [device for device in weights if device != home]
    remote.sort(key=lambda device: (-weights[device] / cost[device], cost[device], device))
    return [home, *remote] if home in weights else remote


def cap(token: Token, home: int, cost: Mapping[int, float], p: float) -> set[int]:
    """Devices that CAP's rule keeps.

    Args:
        token: the experts the token keeps so far.
        home: the token's own device, or -1 for none.
        cost: of reaching each device from home: 0 for home itself.
        p: share of the weight that may be dropped, in [0, 1).
    """
    weights = device_weights(token)
    if p == 0:
        return set(weights)
    kept: set[int] = set()
    kept_weight = 0.0
    for device in order_to_keep(weights, home, cost):
        if device == home or kept_weight < 1 - p:
            kept.add(device)
            kept_weight += weights[device]
    for device in sorted(kept - {home}, key=lambda device: (-cost[device], weights[device], -device)):
        if kept_weight - weights[device] >= 1 - p - TOLERANCE:
            kept.remove(device)
            kept_weight -= weights[device]
    return kept


def exact(token: Token, home: int, cost: Mapping[int, float], p: float) -> set[int]:
    """The cheapest devices that hold at least 1-p of the weight, by trying every set; of equal cost the heaviest.

    Raises:
        ConfigError: when the token visits too many devices to try every set.
    """
    weights = device_weights(token)
    remote = sorted(device for device in weights if device != home)
    if len(remote) > MAX_EXACT_DEVICES:
        raise ConfigError(
            f"a token visits {len(remote)} remote devices; the exact solver tries every set of at most "
            f"{MAX_EXACT_DEVICES}: use the rule cap"
        )
    if p == 0:
        return set(weights)
    best: tuple[float, float, tuple[int, ...]] | None = None
    for size in range(len(remote) + 1):
        for chosen in combinations(remote, size):
            kept_weight = weights.get(home, 0.0) + sum(weights[device] for device in chosen)
            if kept_weight >= 1 - p - TOLERANCE:
                candidate = (sum(cost[device] for device in chosen), -kept_weight, chosen)
                best = candidate if best is None else min(best, candidate)
    chosen = best[2] if best else ()
    return {*chosen, home} if home in weights else set(chosen)


def priced(token: Token, home: int, cost: Mapping[int, float], theta: Mapping[int, float], floor: float) -> set[int]:
    """Devices that the priced rule keeps.

    Args:
        token: the experts the token keeps so far.
        home: the token's own device, or -1 for none.
        cost: of reaching each device from home.
        theta: for each device the least weight that is worth one unit of cost.
        floor: the least share of its weight a token keeps; devices return in CAP's order until it is reached.
    """
    weights = device_weights(token)
    kept = [d for d in weights if d == home or weights[d] >= theta[d] * cost[d]]
    kept_weight = 0.0
    for device in kept:
        kept_weight += weights[device]
    for device in order_to_keep(weights, home, cost):
        if device not in kept and kept_weight < floor:
            kept.append(device)
            kept_weight += weights[device]
    return set(kept)


def naive(token: Token, p: float) -> list[int]:
    """Slots that stay when the lowest weights go while their sum is within p; of equal weights the later slot goes."""
    share = shares(token)
    kept = list(range(len(token)))
    dropped = 0.0
    for slot in sorted(kept, key=lambda slot: (share[slot], -slot)):
        dropped += share[slot]
        if p == 0 or dropped > p + TOLERANCE:
            break
        kept.remove(slot)
    return kept
