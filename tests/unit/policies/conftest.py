"""Visits to serve: what each layer of each token asks of its experts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

Visits = list[tuple[int, dict[int, int]]]


@pytest.fixture(scope="session")
def make_visits() -> Callable[..., Visits]:
    """Makes visits of `layers` in order, `tokens` times: some experts popular, the last choice likely to return."""

    def make(seed: int, layers: int = 3, experts: int = 6, top_k: int = 2, blocks: int = 4, tokens: int = 60) -> Visits:
        rng = np.random.default_rng(seed)
        liked_LE = rng.normal(0, 1, (layers, experts))
        last_LE = np.zeros((layers, experts))
        visits: Visits = []
        for _ in range(tokens):
            for layer in range(layers):
                worth_E = liked_LE[layer] + last_LE[layer] + rng.gumbel(size=experts)
                chosen = np.argsort(-worth_E)[:top_k]
                last_LE[layer] = 0
                last_LE[layer, chosen] = 1.5
                visits.append((layer, {int(e): int(rng.integers(0, blocks + 1)) for e in chosen}))
        return visits

    return make
