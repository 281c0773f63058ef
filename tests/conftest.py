"""What all tests share: optional packages, hypothesis's profile, and small traces with the skew of real routing."""

from __future__ import annotations

import importlib.util
import os
from typing import Any, Protocol

import numpy as np
import pytest
from hypothesis import settings

from coterie.placement.problem import LayerProblem, build_problem
from coterie.spec import MoESpec
from coterie.topology import Topology
from coterie.trace.routing_trace import RoutingTrace

settings.register_profile("coterie", deadline=None, derandomize=True)
settings.load_profile("coterie")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose package is absent, or fail it where everything was promised to be there."""
    for marker in item.iter_markers("needs"):
        package = marker.args[0]
        if importlib.util.find_spec(package) is None:
            reason = f"needs {package}: pip install 'coterie[{package}]'"
            if os.environ.get("COTERIE_REQUIRE_ALL") == "1":
                pytest.fail(reason, pytrace=False)
            pytest.skip(reason)


class MakeTrace(Protocol):
    """See `make_trace`."""

    def __call__(
        self, layers: int = 2, tokens: int = 600, experts: int = 16, top_k: int = 4, *, seed: int = 0,
        sequences: int = 12, kept: float | None = None, groups: int = 1, **fields: Any,
    ) -> RoutingTrace: ...  # fmt: skip


@pytest.fixture(scope="session")
def make_trace() -> MakeTrace:
    """Makes traces in which some experts are popular, some keep company, and sequences differ in topic.

    Its arguments: shape; `sequences` of equal length, 0 for none; `kept`: the share of entries that is kept, None for
    all; `groups` of the router (said, not obeyed); further fields of `RoutingTrace`.
    """

    def make(
        layers: int = 2, tokens: int = 600, experts: int = 16, top_k: int = 4, *, seed: int = 0,
        sequences: int = 12, kept: float | None = None, groups: int = 1, **fields: Any,
    ) -> RoutingTrace:  # fmt: skip
        rng = np.random.default_rng([seed, layers, tokens, experts, top_k])
        sequence_T = np.arange(tokens) * max(sequences, 1) // tokens
        topics = 4
        topic_T = rng.integers(0, topics, max(sequences, 1))[sequence_T]
        topic_T = np.where(rng.random(tokens) < 0.5, rng.integers(0, topics, tokens), topic_T)
        popular_LE = rng.normal(0, 0.7, (layers, experts))
        liked_LSE = rng.normal(0, 1.5, (layers, topics, experts))
        logit_LTE = popular_LE[:, None] + liked_LSE[:, topic_T] + rng.gumbel(size=(layers, tokens, experts))
        ids = np.argsort(-logit_LTE, axis=2)[:, :, :top_k].astype(np.uint8)
        if sequences:
            fields.setdefault("sequence_ids", sequence_T.astype(np.int32))
        if kept is not None:
            fields["kept"] = rng.random(ids.shape) < kept
        spec = MoESpec("toy", layers, experts, top_k, num_groups=groups)
        return RoutingTrace(ids, spec, **fields)

    return make


class MakeProblem(Protocol):
    """See `make_problem`."""

    def __call__(self, topology: str | Topology = "4", keep_groups: bool = False, **trace: Any) -> LayerProblem: ...


@pytest.fixture(scope="session")
def make_problem(make_trace: MakeTrace) -> MakeProblem:
    """Makes the placement problem of the one layer of a `make_trace`, on a topology."""

    def make(topology: str | Topology = "4", keep_groups: bool = False, **trace: Any) -> LayerProblem:
        parsed = Topology.parse(topology) if isinstance(topology, str) else topology
        return build_problem(make_trace(**{"layers": 1, **trace}), 0, parsed, keep_groups=keep_groups)

    return make
