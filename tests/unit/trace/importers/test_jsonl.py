"""How records are ordered, numbered and refused."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from coterie.errors import TraceError
from coterie.trace.importers import jsonl as jsonl_module
from coterie.trace.open import open_trace


def write(folder: Path, records: list[dict | str]) -> Path:
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    (folder / "t.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "t.jsonl"


def record(layer: int, token: int, ids=(0, 1), **more) -> dict:
    return {"layer": layer, "token_idx": token, "topk_ids": list(ids), **more}


def grid(layers=(0, 1), tokens=range(3), **more) -> list[dict]:
    return [record(layer, token, [(token + layer) % 4, 4], **more) for layer in layers for token in tokens]


def test_lines_in_any_order_with_blank_ones(tmp_path):
    records = grid((3, 7, 9), range(40))
    random.Random(0).shuffle(records)
    trace = open_trace(write(tmp_path, [*records[:5], "", *records[5:], "  "]))
    assert trace.spec.layer_ids == (3, 7, 9)
    assert trace.sequence_ids is None
    assert trace.positions is None
    for layer, number in enumerate((3, 7, 9)):
        assert trace.expert_ids[layer, :, 0].tolist() == [(token + number) % 4 for token in range(40)]


def test_small_batches_write_the_same(tmp_path, monkeypatch):
    source = write(tmp_path, grid((0, 1), range(40), topk_weights=[0.6, 0.25]))
    whole = open_trace(source)
    monkeypatch.setattr(jsonl_module, "_LINES_AT_ONCE", 7)
    pieces = open_trace(source)
    assert np.array_equal(whole.expert_ids, pieces.expert_ids)
    assert np.array_equal(whole.weights, pieces.weights)
    assert pieces.weights.ravel()[:2].tolist() == pytest.approx([0.6, 0.25])


def test_token_numbers_that_restart_with_each_request(tmp_path):
    trace = open_trace(write(tmp_path, grid(req_id="b") + grid(tokens=range(2), req_id=5)))
    assert trace.sequence_ids.tolist() == [0, 0, 0, 1, 1]
    assert trace.positions.tolist() == [0, 1, 2, 0, 1]


def test_token_numbers_that_run_on_over_requests_in_turn(tmp_path):
    records = [record(layer, token, req_id="ab"[token % 2]) for token in range(6) for layer in (0, 1)]
    trace = open_trace(write(tmp_path, records))
    assert trace.sequence_ids.tolist() == [0, 1, 0, 1, 0, 1]
    assert trace.positions is None


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([*grid(), "{"], "line 7 is no JSON"),
        ([*grid(), '{"layer": 0, "token_idx": 9'], "line 7 is no JSON"),
        ([*grid(), "[1, 2]"], "line 7 is a JSON list"),
        ([*grid(), {"layer": 0, "topk_ids": [1]}], "line 7 lacks token_idx"),
        ([*grid(), record(0, -1)], "line 7: token_idx is -1"),
        ([*grid(), record(0, 1.5)], "line 7: token_idx is 1.5"),
        ([*grid(), record(True, 3)], "line 7: layer is True"),
        ([*grid(), record(0, 3, [1.0, 2.0])], r"line 7: topk_ids is \[1.0, 2.0\]; it is a list of integers"),
        ([*grid(), record(0, 3, [])], r"line 7: topk_ids is \[\]"),
        ([*grid(), record(0, 3, [-1, 2])], "line 7: expert id -1"),
        ([*grid(), record(0, 3, [2**16, 2])], "line 7: expert id 65536"),
        ([*grid(), record(0, 3, [1, 2, 3])], "line 7 has 3 topk_ids, the lines before 2"),
        ([*grid(), record(0, 3, topk_weights=[1, 2])], "line 7: topk_weights are in some lines only"),
        (
            [*grid(topk_weights=[1, 1]), record(0, 3, topk_weights=[1])],
            r"line 7: topk_weights is \[1\]; it is 2 numbers",
        ),
        ([*grid(topk_weights=[1, 1]), record(0, 3, topk_weights=["a", 1])], "line 7: topk_weights is"),
        ([*grid(topk_weights=[1, 1]), record(0, 3, topk_weights=[float("nan"), 1])], "finite numbers"),
        ([*grid(topk_weights=[1, 1]), record(0, 3, topk_weights=[10**400, 0.5])], "finite numbers"),
        (grid(topk_weights=[-0.5, 1]), "routing weight -0.5 in layer 0, token 0"),
        ([*grid(), record(0, 3, req_id=[1])], r"line 7: req_id is \[1\]"),
        ([*grid(), record(1, 2)], "line 7 repeats layer 1, token 2 of line 6"),
        ([*grid()[:-1], record(1, 1)], "line 6 repeats layer 1, token 1 of line 5"),
        (grid()[:-1], "layer 1 of token 2 is missing"),
        ([*grid(), record(0, 10**9)], "layer 0 of token 3 is missing"),
        ([*grid(req_id="a"), *grid(req_id="b")[1:]], "layer 0 of token 0 of request 'b' is missing"),
        ([record(0, 0, [3, 3]), record(0, 1)], "layer 0, token 0 names an expert twice"),
        ([], "is empty|holds no records"),
    ],
)
def test_what_cannot_be_is_refused_by_its_line(tmp_path, records, message):
    with pytest.raises(TraceError, match=message):
        open_trace(write(tmp_path, records), "jsonl")


def test_a_line_without_end_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl_module, "_MAX_LINE_BYTES", 200)
    with pytest.raises(TraceError, match="line 7 is longer than 200 B"):
        open_trace(write(tmp_path, [*grid(), " " * 300]), "jsonl")


def test_deep_nesting_is_no_crash(tmp_path):
    with pytest.raises(TraceError, match="line 1 is no JSON"):
        open_trace(write(tmp_path, ["[" * 100_000]), "jsonl")
