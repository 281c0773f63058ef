"""The cache and its policies in plain Python, one block at a time: slow, and what the rest is held to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

Block = tuple[int, int, int]
"""(layer, expert, block)."""
Visit = Mapping[int, int]
"""What one layer asks of each of its experts: expert -> blocks."""


class Worth(Protocol):
    """What a policy is to the reference cache."""

    def touch(self, layer: int, need: Visit) -> None:
        """Learn what a layer is about to use."""

    def worth(self, block: Block, distance: int) -> float:
        """What keeping a block is worth, its layer being `distance` layers ahead."""
        ...


class ReferenceCache:
    """Prefixes of experts within a budget; the block evicted next is always the tail block worth least."""

    def __init__(self, num_layers: int, budget: int, policy: Worth, by_layer: bool = False) -> None:
        self.num_layers, self.budget, self.policy, self.by_layer = num_layers, budget, policy, by_layer
        self.held: dict[tuple[int, int], int] = {}

    def serve(self, layer: int, need: Visit) -> tuple[int, int]:
        """Make a layer's blocks resident; returns (experts with anything missing, blocks read)."""
        self.policy.touch(layer, need)
        missing = {expert: blocks - self.held.get((layer, expert), 0) for expert, blocks in need.items()}
        missing = {expert: blocks for expert, blocks in missing.items() if blocks > 0}
        coming = sum(missing.values())
        while sum(self.held.values()) + coming > self.budget:
            self._evict(layer, need, coming)
        for expert in missing:
            self.held[layer, expert] = need[expert]
        return len(missing), coming

    def _evict(self, layer: int, need: Visit, coming: int) -> None:
        pinned = {(layer, expert): blocks for expert, blocks in need.items()}
        tails = [(*key, blocks - 1) for key, blocks in self.held.items() if blocks > pinned.get(key, 0)]
        if self.by_layer:
            fullest = max({tail[0] for tail in tails}, key=lambda other: self._fullness(other, layer, coming))
            tails = [tail for tail in tails if tail[0] == fullest]
        worst = min(tails, key=lambda tail: (self.policy.worth(tail, self._ahead(tail[0], layer)), tail[:2]))
        self.held[worst[:2]] = worst[2]

    def _ahead(self, layer: int, now: int) -> int:
        return (layer - now - 1) % self.num_layers + 1

    def _fullness(self, layer: int, now: int, coming: int) -> tuple[int, int]:
        """Blocks held, those about to come included; of equals, the layer visited last."""
        held = sum(blocks for (other, _), blocks in self.held.items() if other == layer)
        return held + (coming if layer == now else 0), -((now - layer) % self.num_layers)


class ReferenceLRU:
    """Worth: when it was used last."""

    def __init__(self) -> None:
        self.visits, self.last = 0, dict[Block, int]()

    def touch(self, layer: int, need: Visit) -> None:
        """See `Worth`."""
        self.visits += 1
        self.last.update((block, self.visits) for block in _blocks(layer, need))

    def worth(self, block: Block, distance: int) -> float:
        """See `Worth`."""
        return self.last.get(block, 0)


class ReferenceLFU:
    """Worth: how often it was used."""

    def __init__(self) -> None:
        self.uses = dict[Block, int]()

    def touch(self, layer: int, need: Visit) -> None:
        """See `Worth`."""
        for block in _blocks(layer, need):
            self.uses[block] = self.uses.get(block, 0) + 1

    def worth(self, block: Block, distance: int) -> float:
        """See `Worth`."""
        return self.uses.get(block, 0)


class ReferenceReuse:
    """Worth: two moving averages, recomputed from the whole history."""

    def __init__(self, num_layers: int, short: float, long: float, weight: float, near: float) -> None:
        self.num_layers, self.short, self.long, self.weight, self.near = num_layers, short, long, weight, near
        self.history: dict[int, list[set[Block]]] = {}

    def touch(self, layer: int, need: Visit) -> None:
        """See `Worth`."""
        self.history.setdefault(layer, []).append(set(_blocks(layer, need)))

    def worth(self, block: Block, distance: int) -> float:
        """See `Worth`."""
        averages = []
        for stays in (self.short, self.long):
            average = 0.0
            for used in self.history.get(block[0], []):
                average = stays * average + (1 - stays) * (block in used)
            averages.append(average)
        mean = self.weight * averages[0] + (1 - self.weight) * averages[1]
        return mean * (1 + self.near * (1 - distance / self.num_layers))


class ReferenceBelady:
    """Worth: how near its next use is, looked up in the visits to come."""

    def __init__(self, visits: Sequence[tuple[int, Visit]]) -> None:
        self.visits, self.now = visits, -1

    def touch(self, layer: int, need: Visit) -> None:
        """See `Worth`."""
        self.now += 1

    def worth(self, block: Block, distance: int) -> float:
        """See `Worth`."""
        for later in range(self.now + 1, len(self.visits)):
            layer, need = self.visits[later]
            if layer == block[0] and need.get(block[1], 0) > block[2]:
                return -later
        return -math.inf


class ReferenceCompanyModel:
    """`CompanyModel` with a dictionary of weights and one expert at a time."""

    def __init__(
        self, num_layers: int, num_experts: int, back: Sequence[int], averages: tuple[float, float], rate: float,
        dense_rate: float,
    ) -> None:  # fmt: skip
        self.num_layers, self.num_experts = num_layers, num_experts
        self.back = [number for number in back if number < num_layers]
        self.rates, self.rate, self.dense_rate = averages, rate, dense_rate
        self.visits: dict[int, list[set[int]]] = {layer: [] for layer in range(num_layers)}
        self.weights: dict[tuple[int, int, int, int], list[float]] = {}
        self.dense = {layer: [[0.0, 1.0], [0.7, 1.0], [0.0, 1.0], [0.0, 1.0]] for layer in range(num_layers)}

    def inputs(self, layer: int, at: int) -> tuple[list[list[float]], set[tuple[int, int]]]:
        """Features of every expert of `layer`, and its company as (source, expert), after the visit of layer `at`."""
        company = set[tuple[int, int]]()
        for source, number in enumerate(self.back):
            company |= {(source, expert) for expert in self._visit((at - number) % self.num_layers, 1)}
        company |= {(len(self.back), expert) for expert in self._visit(layer, 2 if at == layer else 1)}
        features = []
        for expert in range(self.num_experts):
            logits = []
            for stays in self.rates:
                average = 1 / self.num_experts
                for chosen in self.visits[layer]:
                    average = stays * average + (1 - stays) * (expert in chosen)
                share = min(max(average, 1e-3), 1 - 1e-3)
                logits.append(math.log(share / (1 - share)))
            features.append([*logits, float(expert in self._visit(layer, 1)), 1.0])
        return features, company

    def chance(self, layer: int, expert: int, features: Sequence[float], company: Iterable[tuple[int, int]]) -> float:
        """The chance of one expert."""
        logit = sum(self.dense[layer][i][0] * value for i, value in enumerate(features))
        logit += sum(self.weights.get((layer, *source, expert), (0.0,))[0] for source in company)
        return 1 / (1 + math.exp(-logit))

    def correct(
        self, layer: int, expert: int, features: Sequence[float], company: Iterable[tuple[int, int]], missed: float
    ) -> None:
        """Adagrad's step on the logistic loss of one expert's prediction."""
        for i, value in enumerate(features):
            entry = self.dense[layer][i]
            entry[1] += (missed * value) ** 2
            entry[0] -= self.dense_rate * missed * value / math.sqrt(entry[1])
        for source in company:
            entry = self.weights.setdefault((layer, *source, expert), [0.0, 0.1])
            entry[1] += missed**2
            entry[0] -= self.rate * missed / math.sqrt(entry[1])

    def _visit(self, layer: int, ago: int) -> set[int]:
        return self.visits[layer][-ago] if len(self.visits[layer]) >= ago else set()


def _blocks(layer: int, need: Visit) -> Iterable[Block]:
    return ((layer, expert, block) for expert, blocks in need.items() for block in range(blocks))
