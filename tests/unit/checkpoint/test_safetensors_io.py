"""Headers of safetensors files: what the format's own library wrote is what is read; damage is named."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from safetensors.numpy import save_file

from coterie.checkpoint.safetensors_io import has_weights, read_header, read_headers
from coterie.errors import CheckpointError

TENSORS = {
    "a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b.c": np.arange(5, dtype=np.uint8),
    "empty": np.zeros((0, 7), np.float16),
    "scalar": np.array(3.0),
}


@pytest.fixture
def file(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors", {"format": "np"})
    return tmp_path / "model.safetensors"


def test_every_tensor_is_found_where_its_bytes_are(file):
    found = read_header(file)
    assert found.keys() == TENSORS.keys()
    data = file.read_bytes()
    for name, tensor in found.items():
        assert tensor.shape == TENSORS[name].shape
        assert data[tensor.start : tensor.start + tensor.nbytes] == TENSORS[name].tobytes()
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "a": "F32", "b.c": "U8", "empty": "F16", "scalar": "F64",
    }  # fmt: skip
    assert read_headers(file.parent) == found


def test_truncation_anywhere_is_noticed(file, tmp_path):
    data = file.read_bytes()
    cut = tmp_path / "cut.safetensors"
    for length in (*range(0, len(data), 7), len(data) - 1):
        cut.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match="truncated"):
            read_header(cut)


def entry(**changes):
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


@pytest.mark.parametrize(
    "header",
    [
        b"[]", b"{", b"\xff\xfe", b"null",
        {"a": 1}, {"a": {}}, entry(shape=None), entry(shape=["x"]), entry(data_offsets=[8, 0]),
        entry(data_offsets=[-8, 0]), entry(data_offsets=[0]), entry(data_offsets="08"), entry(shape=[0]),
        entry(data_offsets=[0, 0]),
    ],
)  # fmt: skip
def test_a_header_of_nonsense_is_refused(header, tmp_path):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (tmp_path / "bad").write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(CheckpointError, match="bad"):
        read_header(tmp_path / "bad")


def test_a_header_longer_than_the_format_allows_is_refused(tmp_path):
    (tmp_path / "bad").write_bytes(struct.pack("<Q", 2**63) + b"{}")
    with pytest.raises(CheckpointError, match="truncated or no safetensors file"):
        read_header(tmp_path / "bad")


@pytest.fixture
def sharded(tmp_path):
    weight_map = {}
    for number, (name, tensor) in enumerate(TENSORS.items()):
        weight_map[name] = f"model-{number}.safetensors"
        save_file({name: tensor}, tmp_path / weight_map[name])
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def test_shards_are_read_together(sharded):
    assert has_weights(sharded.parent)
    assert read_headers(sharded.parent).keys() == TENSORS.keys()


def test_missing_shards_are_counted(sharded):
    (sharded.parent / "model-1.safetensors").unlink()
    (sharded.parent / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks 2 of its 4 weight files, model-1\.safetensors"):
        read_headers(sharded.parent)


def test_a_tensor_that_is_not_where_the_index_says_is_named(sharded):
    document = json.loads(sharded.read_text())
    document["weight_map"]["extra"] = "model-0.safetensors"
    sharded.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=r"places extra in model-0\.safetensors, which does not hold it"):
        read_headers(sharded.parent)


@pytest.mark.parametrize(
    "text", ["[]", "{}", "{", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../x"}}']
)
def test_an_index_of_nonsense_is_refused(text, sharded):
    sharded.write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        read_headers(sharded.parent)


def test_a_folder_without_weights_says_what_it_lacks(tmp_path):
    assert not has_weights(tmp_path)
    with pytest.raises(CheckpointError, match="holds no weights"):
        read_headers(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"holds PyTorch \.bin weights"):
        read_headers(tmp_path)
