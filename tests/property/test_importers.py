"""Damaged input of any kind is a trace or one clear error; nothing else comes out."""

from __future__ import annotations

import base64
import io
import json
import zipfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.errors import CoterieError
from coterie.trace.importers.registry import detect
from coterie.trace.open import open_trace


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@cache
def valid(kind: str) -> bytes:
    """A small valid source."""
    ids = np.argsort(np.random.default_rng(0).random((2, 5, 8)), axis=2)[:, :, :2].astype(np.uint8)
    if kind in ("npz-stored", "npz-packed"):
        file = io.BytesIO()
        with zipfile.ZipFile(
            file, "w", zipfile.ZIP_STORED if kind == "npz-stored" else zipfile.ZIP_DEFLATED
        ) as archive:
            archive.writestr("expert_ids.npy", npy(ids))
            archive.writestr("weights.npy", npy(np.ones(ids.shape, dtype=np.float16)))
            archive.writestr("seq_starts.npy", npy(np.array([0, 3, 5])))
            archive.writestr("provenance.npy", npy(np.array('{"a": 1}')))
        return file.getvalue()
    if kind == "npy":
        return npy(np.ascontiguousarray(ids.transpose(1, 0, 2)))
    if kind == "responses":
        return json.dumps({"choices": [{"routed_experts": base64.b64encode(valid("npy")).decode()}]}).encode()
    records = [
        {"layer": layer, "token_idx": token, "topk_ids": ids[layer, token].tolist(), "topk_weights": [0.5, 0.25]}
        for layer in range(2)
        for token in range(5)
    ]
    return "\n".join(map(json.dumps, records)).encode()


def damage(content: bytes, edits: list[tuple[int, int, int]]) -> bytes:
    """Bytes replaced, removed or added here and there."""
    for place, kind, value in edits:
        at = place % (len(content) + 1)
        if kind == 0:
            content = content[:at] + bytes([value]) + content[at + 1 :]
        elif kind == 1:
            content = content[:at] + content[at + value :]
        else:
            content = content[:at] + bytes([value]) * (value % 9) + content[at:]
    return content


edits = st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 2), st.integers(0, 255)), min_size=1, max_size=4)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("npz-stored", "npz"), ("npz-packed", "npz"), ("npy", "vllm"), ("responses", "vllm"), ("records", "jsonl")],
)
@given(edits=edits)
@settings(max_examples=60, deadline=None)
def test_damage_is_an_error_or_still_a_trace(kind, name, edits):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "source"
        path.write_bytes(damage(valid(kind), edits))
        with suppress(CoterieError):
            assert open_trace(path, name).num_tokens > 0
        with suppress(CoterieError):
            detect(path)


@given(content=st.binary(max_size=300), name=st.sampled_from(["npz", "vllm", "jsonl"]))
@settings(max_examples=60, deadline=None)
def test_noise_is_an_error(content, name):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "source"
        path.write_bytes(content)
        with pytest.raises(CoterieError):
            open_trace(path, name)
