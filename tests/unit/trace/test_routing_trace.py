"""A trace in memory: what it refuses, homes, selections and what tells two apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from coterie.errors import TraceError
from coterie.spec import MoESpec
from coterie.trace.routing_trace import RoutingTrace

SPEC = MoESpec("toy", 2, 8, 3)
IDS = np.argsort(np.random.default_rng(0).random((2, 10, 8)), axis=2)[:, :, :3].astype(np.uint8)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"expert_ids": IDS.astype(np.int64)}, "dtype int64; a trace stores uint8 or uint16"),
        ({"expert_ids": IDS.astype(np.float32)}, "dtype float32"),
        ({"expert_ids": IDS[0]}, r"shape \(10, 3\)"),
        ({"expert_ids": IDS[:, :0]}, "the trace is empty"),
        ({"expert_ids": IDS[:1]}, "but the spec says 2 layers and top-3"),
        ({"expert_ids": IDS[:, :, :2]}, "but the spec says 2 layers and top-3"),
        ({"weights": np.ones((2, 10, 2))}, r"weights has shape \(2, 10, 2\), expert_ids \(2, 10, 3\)"),
        ({"weights": np.ones((2, 10, 3), dtype=int)}, "weights has dtype int64"),
        ({"kept": np.ones((2, 9, 3), dtype=bool)}, r"kept has shape"),
        ({"sequence_ids": np.zeros(9, dtype=int)}, "one for each of 10 tokens"),
        ({"positions": np.zeros((10, 1), dtype=int)}, "one for each of 10 tokens"),
        ({"sequence_ids": np.zeros(10)}, "sequence_ids has dtype float64; a trace stores integers"),
        ({"home_ids": np.full(10, np.nan)}, "home_ids has dtype float64"),
        ({"phase": np.array(["prefill"] * 10)}, "phase has dtype"),
    ],
)
def test_what_cannot_be_a_trace(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(TraceError, match=words):
        RoutingTrace(**{"expert_ids": IDS, "spec": SPEC, **fields})


def test_homes_are_recorded_or_follow_the_sequence_or_the_token() -> None:
    bare = RoutingTrace(IDS, SPEC)
    assert bare.homes(4).tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert bare.homes(4, slice(3, 6)).tolist() == [3, 0, 1]
    assert bare.homes(4, np.array([1, 9])).tolist() == [1, 1]
    in_sequences = replace(bare, sequence_ids=np.array([7] * 4 + [2] * 6, dtype=np.uint8))
    assert in_sequences.homes(4).tolist() == [3] * 4 + [2] * 6
    assert in_sequences.num_sequences == 2
    recorded = replace(in_sequences, home_ids=np.arange(10, dtype=np.int32) % 3)
    assert recorded.homes(3, slice(8, 10)).tolist() == [2, 0]
    assert recorded.homes(8).tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("bad", [4, -1])
def test_a_recorded_home_that_is_no_device_is_named(bad: int) -> None:
    homes = np.array([0, 1, 2, 3, bad, 0, 1, 2, 3, 0])
    with pytest.raises(TraceError, match=f"home device {bad}, the topology has 4"):
        RoutingTrace(IDS, SPEC, home_ids=homes).homes(4)


def test_a_layer_of_selected_tokens() -> None:
    weights, kept = np.random.default_rng(1).random(IDS.shape), IDS != 5
    trace = RoutingTrace(IDS, SPEC, weights=weights, kept=kept)
    for tokens in (slice(None), slice(2, 7), np.array([0, 4, 9])):
        found = trace.layer(1, tokens)
        np.testing.assert_array_equal(found.expert_ids_TK, IDS[1, tokens])
        np.testing.assert_array_equal(found.weights_TK, weights[1, tokens])
        np.testing.assert_array_equal(found.kept(), kept[1, tokens])
    bare = RoutingTrace(IDS, SPEC).layer(0)
    assert bare.weights_TK is bare.kept_TK is None
    assert bare.kept().all()
    assert bare.kept().shape == (10, 3)


def test_weights_that_are_needed_are_asked_for() -> None:
    with pytest.raises(TraceError, match="pruning needs routing weights and this trace has none"):
        RoutingTrace(IDS, SPEC).require_weights("pruning")
    weights = np.ones(IDS.shape)
    assert RoutingTrace(IDS, SPEC, weights=weights).require_weights("pruning") is weights


def test_pruned_it_says_so() -> None:
    trace = RoutingTrace(IDS, SPEC, provenance={"source": "a.npz"})
    pruned = trace.with_kept(IDS > 2, {"pruned": "cap"})
    assert pruned.provenance == {"source": "a.npz", "pruned": "cap"}
    assert trace.kept is None
    np.testing.assert_array_equal(pruned.layer(0).kept(), IDS[0] > 2)


def test_fingerprints_tell_traces_apart() -> None:
    trace = RoutingTrace(IDS, SPEC)
    changed = IDS.copy()
    changed[1, 9, 0] = (changed[1, 9].sum() + 1) % 8
    others = [RoutingTrace(changed, SPEC), RoutingTrace(IDS[:, :9], SPEC), RoutingTrace(IDS, replace(SPEC, model="b"))]
    assert len({one.fingerprint() for one in [trace, *others]}) == 4
    assert RoutingTrace(IDS.copy(), SPEC).fingerprint() == trace.fingerprint()
    assert len(trace.fingerprint()) == 16


def test_a_fingerprint_reads_a_bounded_part_of_a_long_trace() -> None:
    ids = np.zeros((1, 3_000_000, 1), dtype=np.uint8)
    trace = RoutingTrace(ids, MoESpec("toy", 1, 8, 1))
    before = trace.fingerprint()
    ids[0, 0] = 1
    assert trace.fingerprint() != before
