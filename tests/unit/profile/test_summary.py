"""The summary of a trace, and the command that prints it."""

import json

import numpy as np
import pytest

from coterie.profile.combinations import combination_counts, top_share
from coterie.profile.load import imbalance, trace_load
from coterie.profile.summary import summarise
from coterie.spec import MoESpec
from coterie.trace.routing_trace import RoutingTrace
from coterie.trace.synthetic import synthesize


def test_means_are_over_layers():
    trace = synthesize(3, 16, 4, 400)
    heard = []
    summary = summarise(trace, lambda what, done, total: heard.append((done, total)))
    assert heard == [(1, 3), (2, 3), (3, 3)]
    load_LE = trace_load(trace)
    assert summary["load_imbalance"] == pytest.approx(np.mean([imbalance(row) for row in load_LE]))
    assert summary["skew"] == pytest.approx(np.mean([top_share(combination_counts(trace, i)) for i in range(3)]))
    assert [layer["skew"] for layer in summary["per_layer"]] == [
        top_share(combination_counts(trace, layer)) for layer in range(3)
    ]
    assert summary["per_layer"][0]["pairs_for_60"] < summary["per_layer"][0]["pairs_for_90"]
    assert (summary["layers"], summary["experts"], summary["top_k"], summary["tokens"]) == (3, 16, 4, 400)
    assert summary["sequences"] == trace.num_sequences
    assert summary["synthetic"] is True
    assert summary["pairs"] == "anchor pairs"
    json.dumps(summary, allow_nan=False)


def test_phases_pruning_dropped_rows_and_model_layers():
    trace = RoutingTrace(
        np.array([[[0, 1], [1, 2], [3, 0]]], dtype=np.uint8),
        MoESpec("m", 1, 4, 2, layer_ids=(5,)),
        kept=np.array([[[True, True], [True, False], [True, True]]]),
        phase=np.array([0, 0, 1], dtype=np.uint8),
        provenance={"dropped": {"warm_up": 7, "padding": 0}},
    )
    summary = summarise(trace)
    assert summary["phases"] == {"prefill": 2, "decode": 1}
    assert summary["kept"] == pytest.approx(5 / 6)
    assert summary["dropped"] == {"warm_up": 7, "padding": 0}
    assert summary["sequences"] == 0
    assert summary["synthetic"] is False
    layer = summary["per_layer"][0]
    assert (layer["model_layer"], layer["unused_experts"]) == (5, 1)
    assert layer["load_imbalance"] == pytest.approx(2 / (5 / 4))
    assert layer["skew"] == pytest.approx(1.0)  # two uses, two of six pairs, a quarter of six rounded up is two


def test_without_weights_the_pairs_are_named_so():
    ids = np.array([[[0, 1, 2], [1, 2, 3]]], dtype=np.uint8)
    assert summarise(RoutingTrace(ids, MoESpec("m", 1, 4, 3)))["pairs"] == "pairs"


def test_top_one_has_no_skew():
    summary = summarise(RoutingTrace(np.zeros((1, 3, 1), dtype=np.uint8), MoESpec("m", 1, 4, 1)))
    assert summary["skew"] is None
    assert summary["per_layer"][0]["pairs_for_60"] is None
    assert summary["load_imbalance"] == 4.0
