"""A small bench store and decisions to replay on it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest


@pytest.fixture(scope="session")
def shape() -> Any:
    """3 layers of 8 experts, top-2, of 256 neurons in 16 blocks; hidden size 128."""
    from coterie.bench.offload.bench_model import BenchShape

    return BenchShape(3, 8, 2, 128, 256)


@pytest.fixture(scope="session")
def store(shape: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from coterie.bench.offload.bench_model import make_bench_store

    return make_bench_store(tmp_path_factory.mktemp("bench") / "store", shape)


@pytest.fixture(scope="session")
def decisions(make_trace: Any) -> Any:
    """Of 90 tokens, with weights and widths by chance; 64 neurons an expert."""
    from coterie.bench.offload.decisions import Decisions, decisions_of_trace

    found = decisions_of_trace(make_trace(layers=3, tokens=90, experts=8, top_k=2, sequences=3))
    rng = np.random.default_rng(1)
    weights_TLK = rng.dirichlet((1, 1), found.ids_TLK.shape[:2]).astype(np.float32)
    return Decisions(found.ids_TLK, weights_TLK, rng.integers(0, 5, found.ids_TLK.shape) * 16, 64)
