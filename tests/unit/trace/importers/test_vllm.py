"""vLLM's arrays, alone and inside responses, with dense layers and prompts that several choices share."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest

from coterie.errors import TraceError
from coterie.trace.importers import base, vllm
from coterie.trace.open import open_trace


def routing(tokens: int, layers: int = 4, dense=(0,), top_k: int = 2, seed: int = 0) -> np.ndarray:
    ids = np.argsort(np.random.default_rng(seed).random((tokens, layers, 8)), axis=2)[:, :, :top_k].astype(np.uint8)
    ids[:, list(dense)] = 0
    return ids


def encoded(ids: np.ndarray, **kwargs) -> str:
    file = io.BytesIO()
    np.save(file, ids, **kwargs)
    return base64.b64encode(file.getvalue()).decode()


def document(folder: Path, value: object) -> Path:
    (folder / "t.json").write_text(json.dumps(value))
    return folder / "t.json"


def test_a_lone_array_says_nothing_of_sequences(tmp_path):
    ids = routing(9, dense=(0, 2))
    np.save(tmp_path / "t.npy", ids)
    trace = open_trace(tmp_path / "t.npy", num_experts=8)
    assert np.array_equal(trace.expert_ids, ids[:, [1, 3]].transpose(1, 0, 2))
    assert (trace.spec.layer_ids, trace.spec.num_model_layers) == ((1, 3), 4)
    assert trace.sequence_ids is None
    assert trace.provenance["inferred"] == {"dense_layers": "[0, 2]: zero for every token"}


def test_pieces_of_any_size_write_the_same(tmp_path, monkeypatch):
    for number, size in enumerate((5, 8)):
        np.save(tmp_path / f"{number}.npy", routing(size, seed=number))
    whole = open_trace(tmp_path)
    monkeypatch.setattr(vllm, "PIECE_BYTES", 20)
    assert np.array_equal(open_trace(tmp_path).expert_ids, whole.expert_ids)
    assert open_trace(tmp_path).positions.tolist() == [*range(5), *range(8)]
    assert base.PIECE_BYTES > 20


def test_choices_share_a_prompt_that_ran_once(tmp_path):
    prompt, first, second = routing(4), routing(3, seed=1), routing(2, seed=2)
    choices = [{"routed_experts": encoded(first)}, {"routed_experts": encoded(second)}]
    trace = open_trace(document(tmp_path, {"choices": choices, "prompt_routed_experts": encoded(prompt)}))
    assert np.array_equal(trace.expert_ids.transpose(1, 0, 2), np.concatenate([prompt, first, second])[:, 1:])
    assert trace.sequence_ids.tolist() == [0] * 7 + [1] * 2
    assert trace.positions.tolist() == [*range(7), 4, 5]


def test_nested_lists_null_choices_and_prompts_alone(tmp_path):
    value = [
        {"choices": [{"routed_experts": None}], "prompt_routed_experts": routing(4).tolist()},
        {"choices": [{"routed_experts": routing(3, seed=1).tolist()}], "prompt_routed_experts": None},
    ]
    trace = open_trace(document(tmp_path, value))
    assert trace.sequence_ids.tolist() == [0] * 4 + [1] * 3


def test_a_first_line_longer_than_a_glance_is_still_a_record(tmp_path, monkeypatch):
    lines = [json.dumps({"routed_experts": encoded(routing(40, seed=seed))}) for seed in range(2)]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    whole = open_trace(tmp_path / "t.jsonl")
    monkeypatch.setattr(vllm, "_SNIFF_BYTES", 100)
    assert np.array_equal(open_trace(tmp_path / "t.jsonl").expert_ids, whole.expert_ids)
    assert whole.num_sequences == 2


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ([routing(5).astype(np.float32)], r"0.npy is \[5, 4, 2\] float32; it is \[tokens, hidden layers, k\] integers"),
        ([routing(5)[0]], r"0.npy is \[4, 2\] uint8"),
        ([routing(5).astype(np.int16) - 1], "expert id -1"),
        ([routing(5), routing(5, layers=5)], r"1.npy has \[5, 2\] layers and experts a token, others \[4, 2\]"),
        ([routing(5, dense=range(4))], "all 5 rows of routed_experts are zero"),
        ([routing(0)], "holds no routed_experts"),
        ([np.zeros((5, 5000, 2), dtype=np.uint8)], "1 to 4096 layers are read"),
        ([np.full((2, 2, 2), 7, dtype=np.uint8)], "names an expert twice"),
    ],
)
def test_arrays_that_cannot_be_are_refused(tmp_path, arrays, message):
    for number, array in enumerate(arrays):
        np.save(tmp_path / f"{number}.npy", array)
    with pytest.raises(TraceError, match=message):
        open_trace(tmp_path)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("no base64!", "routed_experts in line 1 is no base64"),
        (base64.b64encode(b"junk").decode(), r"no \.npy array"),
        (encoded(routing(5))[:-8], "it is truncated"),
        (encoded(np.array([{}], dtype=object), allow_pickle=True), "pickled Python objects, which are never loaded"),
        ([[1], [1, 2]], "neither a base64 .npy nor"),
        ([[[10**30, 1]]], r"object|neither"),
        ({"a": 1}, r"is \[\] object"),
        (3, r"is \[\] int64"),
    ],
)
def test_responses_that_cannot_be_are_refused(tmp_path, value, message):
    with pytest.raises(TraceError, match=message):
        open_trace(document(tmp_path, {"routed_experts": value}))


def test_nesting_without_end_is_refused(tmp_path):
    value: object = {"routed_experts": encoded(routing(5))}
    for _ in range(100):
        value = [value]
    with pytest.raises(TraceError, match="nested more than 64 deep"):
        open_trace(document(tmp_path, value))


def test_pickled_files_are_refused(tmp_path):
    np.save(tmp_path / "t.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(TraceError, match="pickled Python objects, which are never loaded"):
        open_trace(tmp_path / "t.npy")
