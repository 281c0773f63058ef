"""Tabu search against recomputed costs and, where there are few placements, against all of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from coterie.placement import search
from coterie.placement.search import Archive, Situation, Weights, cost_of, new_archive, tabu_search
from coterie.placement.state import build_hypergraph, build_level

UNLIMITED = 1e9


@dataclass
class Layer:
    """Token sets [T] with their windows, and the devices of E experts."""

    sets: list[list[int]]
    window: list[int]
    experts: int
    node_G: np.ndarray
    weights: Weights
    speed_G: np.ndarray
    price_G: np.ndarray

    def cost(self, device_E: np.ndarray) -> float:
        """What `search` says it minimises, in plain words."""
        devices, nodes = 0.0, 0
        visits_WG = np.zeros((max(self.window) + 1, self.node_G.size), dtype=int)
        for experts, window in zip(self.sets, self.window, strict=True):
            visited = {int(device_E[e]) for e in experts}
            devices += float(self.price_G[list(visited)].sum())
            nodes += len({int(self.node_G[g]) for g in visited})
            visits_WG[window, list(visited)] += 1
        peak = (visits_WG * self.price_G).max(axis=1).sum()
        return (self.weights.device * devices + self.weights.node * nodes + self.weights.peak * peak) / len(self.sets)

    def shares(self) -> np.ndarray:
        """Load of each expert in each window over what speed 1 has there in balance, [W, E]."""
        load_WE = np.zeros((max(self.window) + 1, self.experts))
        for experts, window in zip(self.sets, self.window, strict=True):
            load_WE[window, experts] += 1
        return load_WE * self.speed_G.sum() / load_WE.sum(axis=1, keepdims=True)

    def loads(self, device_E: np.ndarray) -> np.ndarray:
        """Time of each device in each window over what it is in balance, [W, G]."""
        return self.shares() @ np.eye(self.node_G.size)[device_E] / self.speed_G

    def balance(self, device_E: np.ndarray) -> float:
        """B, averaged over windows."""
        return float(self.loads(device_E).max(axis=1).mean())

    def penalised(self, device_E: np.ndarray, limit: float) -> float:
        """The cost and what exceeding the limit on B costs."""
        excess = np.maximum(self.loads(device_E) - limit, 0).sum(axis=1).mean()
        return self.cost(device_E) + 4.0 * float(excess)

    def situation(self, group_E: np.ndarray | None = None) -> Situation:
        rows = np.full((len(self.sets), max(map(len, self.sets))), -1, dtype=np.int32)
        for row, experts in zip(rows, self.sets, strict=True):
            row[: len(experts)] = sorted(experts)
        once = np.ones(len(rows), dtype=np.int64)
        graph = build_hypergraph(rows, once, np.array(self.window, dtype=np.int32), self.experts)
        groups = np.zeros(self.experts, dtype=np.int32) if group_E is None else group_E.astype(np.int32)
        return Situation(
            graph, self.node_G.astype(np.int32), groups, self.shares(), len(self.sets), self.weights,
            1 / self.speed_G, self.price_G,
        )  # fmt: skip


def make_layer(
    experts: int = 8, devices: int = 4, nodes: int = 1, windows: int = 1, seed: int = 0, tokens: int = 60,
    speeds: list[float] | None = None, prices: list[float] | None = None,
) -> Layer:  # fmt: skip
    """Tokens that choose two to four experts, popular ones more often."""
    rng = np.random.default_rng([seed, experts, devices, nodes, windows])
    popular = rng.dirichlet(np.full(experts, 2.0))
    sizes = rng.integers(2, min(4, experts - 1) + 1, tokens)
    sets = [rng.choice(experts, size, replace=False, p=popular).tolist() for size in sizes]
    node_G = np.arange(devices) // (devices // nodes)
    weights = Weights(1.0, 1.5 if nodes > 1 else 0.0, 0.75 * devices)
    speed_G, price_G = (np.array(given or [1.0] * devices) for given in (speeds, prices))
    return Layer(sets, (np.arange(tokens) * windows // tokens).tolist(), experts, node_G, weights, speed_G, price_G)


LAYERS = {
    "one node": {},
    "two nodes": {"nodes": 2},
    "windows": {"windows": 3},
    "windows, nodes": {"windows": 2, "nodes": 2},
    "unequal speeds": {"speeds": [1.0, 0.5, 1.0, 2.0], "windows": 2},
    "unequal links": {"prices": [0.75, 0.75, 1.5, 1.0], "nodes": 2},
    "two devices": {"experts": 7, "devices": 2},
    "three devices": {"experts": 8, "devices": 3},
    "one expert a device": {"experts": 4, "devices": 4, "nodes": 2},
}


def placements(slots: list[int]) -> Iterator[np.ndarray]:
    """Every way to put experts on devices with so many slots."""
    experts = sum(slots)

    def fill(device: int, free: tuple[int, ...], device_E: np.ndarray) -> Iterator[np.ndarray]:
        if device == len(slots):
            yield device_E.copy()
            return
        for chosen in itertools.combinations(free, slots[device]):
            device_E[list(chosen)] = device
            yield from fill(device + 1, tuple(e for e in free if e not in chosen), device_E)

    return fill(0, tuple(range(experts)), np.zeros(experts, dtype=np.int32))


def random_start(layer: Layer, seed: int) -> np.ndarray:
    even = np.arange(layer.experts) % layer.node_G.size
    return np.random.default_rng(seed).permutation(even).astype(np.int32)


def run(layer: Layer, start_E: np.ndarray, limits: list[float], limit: float = UNLIMITED, seed: int = 1) -> Archive:
    archive = new_archive(np.array(limits), layer.experts)
    tabu_search(layer.situation(), start_E, limit, 50, 2000, seed, archive)
    return archive


@pytest.mark.parametrize("name", LAYERS)
def test_the_cost_is_what_it_says(name: str) -> None:
    layer = make_layer(**LAYERS[name])
    for seed in range(5):
        device_E = random_start(layer, seed)
        situation = layer.situation()
        devices = build_level(situation.graph, device_E, layer.node_G.size, True)
        nodes = build_level(situation.graph, situation.node_G[device_E], int(layer.node_G.max()) + 1, False)
        assert cost_of(situation, devices, nodes) == pytest.approx(layer.cost(device_E))


@pytest.mark.parametrize("name", LAYERS)
def test_the_best_swap_is_the_best_of_all_swaps(name: str) -> None:
    """Pairs are dismissed by bounds; the one that is chosen must be the one that trying all would choose."""
    layer = make_layer(**LAYERS[name])
    situation, rng = layer.situation(np.arange(layer.experts) % 3 // 2), np.random.default_rng(1)
    for limit in (1.0, 1.2, UNLIMITED):
        for seed in range(3):
            device_E = random_start(layer, seed)
            devices = build_level(situation.graph, device_E, layer.node_G.size, True)
            nodes = build_level(situation.graph, situation.node_G[device_E], int(layer.node_G.max()) + 1, False)
            tabu_EG = rng.integers(0, 2, (layer.experts, layer.node_G.size)) * 100
            aspiration = -0.1
            changes = {}
            for a, b in itertools.combinations(range(layer.experts), 2):
                g, h = device_E[a], device_E[b]
                if g != h and situation.group_E[a] == situation.group_E[b]:
                    swapped = device_E.copy()
                    swapped[[a, b]] = swapped[[b, a]]
                    change = layer.penalised(swapped, limit) - layer.penalised(device_E, limit)
                    if not (tabu_EG[a, h] and tabu_EG[b, g]) or change < aspiration:
                        changes[a, b] = change
            a, b, change = search._best_swap(
                situation, devices, nodes, layer.loads(device_E) * layer.speed_G, limit, tabu_EG, 5, aspiration
            )
            if not changes:
                assert a < 0
                continue
            assert change == pytest.approx(min(changes.values()), abs=1e-9)
            assert changes[a, b] == pytest.approx(change, abs=1e-9)


@pytest.mark.parametrize("values", [[5], [3, 9], [7, 7, 7], [4, 8, 1, 6, 8], [0, 0, 0, 2]])
def test_the_busiest_of_the_other_devices(values: list[int]) -> None:
    count = len(values)
    found = np.full((count, count), -1, dtype=np.int64)
    search._max_without(np.array(values, dtype=np.int64), found)
    for g, h in itertools.product(range(count), repeat=2):
        assert found[g, h] == max((value for i, value in enumerate(values) if i not in (g, h)), default=0)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("limit", [UNLIMITED, 1.1])
def test_the_archive_keeps_its_promises(name: str, limit: float) -> None:
    layer = make_layer(**LAYERS[name])
    start_E = random_start(layer, 3)
    archive = run(layer, start_E, [UNLIMITED, 1.3, 1.15, 1.0], limit)
    assert archive.cost_A[0] <= layer.cost(start_E) + 1e-9
    assert (np.diff(archive.cost_A[np.isfinite(archive.cost_A)]) >= -1e-9).all()  # a tighter limit costs no less
    for bound, cost, device_E in zip(*archive, strict=True):
        if np.isfinite(cost):
            assert cost == pytest.approx(layer.cost(device_E))
            assert layer.balance(device_E) <= bound + 1e-6
            np.testing.assert_array_equal(np.bincount(device_E), np.bincount(start_E))


def figures(layer: Layer, every: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`cost` and `balance` of many placements [A, E] at once, [A] each."""
    present_TE = np.zeros((len(layer.sets), layer.experts))
    for row, experts in zip(present_TE, layer.sets, strict=True):
        row[experts] = 1
    window_WT = (np.arange(max(layer.window) + 1)[:, None] == np.array(layer.window)).astype(int)
    visits_ATG = np.einsum("te,aeg->atg", present_TE, np.eye(layer.node_G.size)[every]) > 0
    nodes = sum(visits_ATG[:, :, layer.node_G == node].any(axis=2).sum(axis=1) for node in set(layer.node_G.tolist()))
    peaks = (np.einsum("wt,atg->awg", window_WT, visits_ATG) * layer.price_G).max(axis=2).sum(axis=1)
    weights = layer.weights
    costs = weights.device * (visits_ATG * layer.price_G).sum(axis=(1, 2)) + weights.node * nodes + weights.peak * peaks
    loads_AWG = np.einsum("we,aeg->awg", layer.shares(), np.eye(layer.node_G.size)[every]) / layer.speed_G
    return costs / len(layer.sets), loads_AWG.max(axis=2).mean(axis=1)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("seed", range(4))
def test_on_a_small_layer_nothing_is_better(name: str, seed: int) -> None:
    """Of a few starts one finds the best of all placements; under a limit on B, next to the best at least."""
    layer = make_layer(**LAYERS[name], seed=seed)
    every = np.stack(list(placements(np.bincount(random_start(layer, 0), minlength=layer.node_G.size).tolist())))
    costs, balances = figures(layer, every)
    assert costs[7] == pytest.approx(layer.cost(every[7]))
    for limit, slack in ((UNLIMITED, 1.0), (np.quantile(balances, 0.3), 1.02), (np.quantile(balances, 0.05), 1.02)):
        found = [run(layer, random_start(layer, start), [limit], limit).cost_A[0] for start in range(4)]
        best = costs[balances <= limit + 1e-9].min()
        assert best - 1e-9 <= min(found) <= best * slack + 1e-9


def test_the_same_seed_gives_the_same_placements() -> None:
    layer = make_layer(experts=16, tokens=200, windows=2, nodes=2)
    start_E = random_start(layer, 0)
    first, again = (run(layer, start_E, [UNLIMITED, 1.1], 1.1, seed=5) for _ in range(2))
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, other)


def test_only_experts_of_one_group_change_places() -> None:
    layer = make_layer(experts=12, tokens=150)
    group_E = np.arange(12) // 4
    start_E = random_start(layer, 1)
    archive = new_archive(np.array([UNLIMITED]), 12)
    swaps = tabu_search(layer.situation(group_E), start_E, UNLIMITED, 50, 2000, 1, archive)
    assert swaps > 0
    assert archive.cost_A[0] < layer.cost(start_E)
    for group in range(3):
        inside = group_E == group
        np.testing.assert_array_equal(np.sort(archive.device_AE[0][inside]), np.sort(start_E[inside]))


def test_it_stops_after_the_most_swaps_and_where_there_is_nothing_to_swap() -> None:
    layer = make_layer(experts=12, tokens=150)
    archive = new_archive(np.array([UNLIMITED]), 12)
    assert tabu_search(layer.situation(), random_start(layer, 1), UNLIMITED, 50, 3, 1, archive) == 3
    lonely = new_archive(np.array([UNLIMITED]), 12)
    alone = layer.situation(np.arange(12))
    start_E = random_start(layer, 1)
    assert tabu_search(alone, start_E, UNLIMITED, 50, 100, 1, lonely) == 0
    np.testing.assert_array_equal(lonely.device_AE[0], start_E)


def test_what_was_never_seen_stays_infinite() -> None:
    layer = make_layer()
    archive = run(layer, random_start(layer, 1), [UNLIMITED, 0.5])
    assert np.isfinite(archive.cost_A).tolist() == [True, False]
