"""Rows that no router made are told from those that one did."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from coterie import data
from coterie.placement.driver import prepare
from coterie.profile.coactivation import coactivation_counts
from coterie.profile.from_histogram import CHANCE, chance_ratio, rebuilt_from_histogram
from coterie.spec import MoESpec
from coterie.topology import Topology
from coterie.trace.open import open_trace
from coterie.trace.routing_trace import RoutingTrace


def independent(tokens: int = 3000, layers: int = 3, experts: int = 32, top_k: int = 4) -> np.ndarray[Any, Any]:
    """Ids [L, T, K] drawn by popularity alone, without replacement within a token."""
    rng = np.random.default_rng(1)
    popular_LE = rng.normal(0, 0.8, (layers, 1, experts))
    return np.argsort(-(popular_LE + rng.gumbel(size=(layers, tokens, experts))), axis=2)[:, :, :top_k].astype(np.uint8)


def trace_of(ids: np.ndarray[Any, Any], **about: Any) -> RoutingTrace:
    return RoutingTrace(ids, MoESpec("toy", ids.shape[0], 32, ids.shape[2]), provenance=about)


@pytest.mark.parametrize("name", data.NAMES)
def test_real_routing_is_not_suspected(name: str) -> None:
    assert rebuilt_from_histogram(open_trace(name)) is None


def test_rows_drawn_from_a_histogram_are(make_trace: Any) -> None:
    found = rebuilt_from_histogram(trace_of(independent()))
    assert found is not None
    assert "no company" in found
    assert rebuilt_from_histogram(make_trace(tokens=3000)) is None  # the toys keep company


def test_sorted_blocks_are() -> None:
    ids = independent()
    load_E = np.bincount(ids[0].ravel(), minlength=32)
    column = np.repeat(np.arange(32), load_E)
    blocks = column.reshape(4, -1).T.astype(np.uint8)[None].repeat(3, axis=0)
    mixed = blocks[:, np.random.default_rng(0).permutation(blocks.shape[1])]
    for made in (blocks, blocks[:, ::-1], mixed):
        found = rebuilt_from_histogram(trace_of(made))
        assert found is not None
        assert "sorted blocks" in found


@pytest.mark.parametrize("name", data.NAMES)
def test_rows_rebuilt_from_the_loads_of_real_traces_are(name: str) -> None:
    """Shuffled entries, draws by popularity, blocks by id or popularity, in order or shuffled: the tools' ways."""
    trace = open_trace(name)
    rng = np.random.default_rng(2)
    layers, tokens, top_k = trace.expert_ids.shape
    experts = trace.spec.num_experts
    load_LE = np.stack([np.bincount(np.ravel(ids), minlength=experts) for ids in trace.expert_ids])
    in_blocks = np.stack([np.repeat(np.arange(experts), load_E).reshape(top_k, tokens).T for load_E in load_LE])
    popular = np.stack([
        np.repeat(np.argsort(-load_E), np.sort(load_E)[::-1]).reshape(top_k, tokens).T for load_E in load_LE
    ])  # fmt: skip
    dealt = np.stack([rng.permutation(np.repeat(np.arange(experts), load_E)).reshape(tokens, top_k)
                      for load_E in load_LE])  # fmt: skip
    scores = np.log(load_LE + 1e-9)[:, None] + rng.gumbel(size=(layers, tokens, experts))
    drawn = np.argsort(-scores, axis=2)[:, :, :top_k]
    order = rng.permutation(tokens)
    for made in (in_blocks, popular, in_blocks[:, order], popular[:, order], dealt, drawn):
        assert rebuilt_from_histogram(RoutingTrace(made.astype(np.uint8), trace.spec)) is not None


@pytest.mark.parametrize("tokens", [1000, 2000])
@pytest.mark.parametrize("name", data.NAMES)
def test_short_real_traces_are_not_suspected(name: str, tokens: int) -> None:
    trace = open_trace(name)
    ids = np.asarray(trace.expert_ids)
    for first in range(0, ids.shape[1] - tokens, tokens):
        assert rebuilt_from_histogram(RoutingTrace(ids[:, first : first + tokens], trace.spec)) is None


def test_what_cannot_be_told_or_says_so_itself_is_left_alone() -> None:
    assert rebuilt_from_histogram(trace_of(independent(tokens=900))) is None
    assert rebuilt_from_histogram(trace_of(independent(), synthetic=True)) is None
    assert rebuilt_from_histogram(trace_of(independent(top_k=1))) is None
    assert chance_ratio(np.diag([5, 3, 2])) is None


def test_the_ratio_is_about_one_by_chance_and_grows_with_company() -> None:
    ids = independent()
    by_chance = chance_ratio(coactivation_counts(ids[0], None, 32))
    assert by_chance is not None
    assert 0.7 < by_chance < 1.2
    ids[0, : len(ids[0]) // 5] = [0, 1, 2, 3]  # a fifth of the tokens keep one company
    together = chance_ratio(coactivation_counts(ids[0], None, 32))
    assert together is not None
    assert together > 5 * CHANCE


def test_placing_such_a_trace_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="rebuilt from load histograms"):
        prepare(trace_of(independent()), Topology.parse("4"))
