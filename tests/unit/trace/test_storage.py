"""A trace on disk: what is saved comes back, and what is damaged is one clear error."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from coterie.errors import ConfigError, TraceError
from coterie.spec import MoESpec
from coterie.trace import storage
from coterie.trace.routing_trace import RoutingTrace
from coterie.trace.storage import ARRAY_FIELDS, is_safetensors, writing

SPEC = MoESpec("toy", 2, 8, 3, num_groups=2, layer_ids=(1, 2), num_model_layers=3)


def make(**fields: Any) -> RoutingTrace:
    ids = np.argsort(np.random.default_rng(0).random((2, 30, 8)), axis=2)[:, :, :3].astype(np.uint8)
    return RoutingTrace(ids, SPEC, **fields)


def full() -> RoutingTrace:
    """Every field, in dtypes of every size, so that alignment matters."""
    rng = np.random.default_rng(1)
    return make(
        weights=rng.random((2, 30, 3)).astype(np.float16), kept=rng.random((2, 30, 3)) < 0.7,
        sequence_ids=np.arange(30, dtype=np.int64) // 7, positions=np.arange(30, dtype=np.int32),
        phase=np.zeros(30, dtype=np.uint8), step=np.arange(30, dtype=np.uint16),
        home_ids=np.arange(30, dtype=np.int8) % 4, weight_ordered=True,
        provenance={"source": "ü.npz", "dropped": {"a": 1}},
    )  # fmt: skip


@pytest.mark.parametrize("copy_bytes", [2**24, 7])
def test_everything_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copy_bytes: int) -> None:
    monkeypatch.setattr(storage, "_COPY_BYTES", copy_bytes)
    trace = full()
    trace.save(tmp_path / "t.safetensors")
    read = RoutingTrace.load(tmp_path / "t.safetensors")
    for name in ARRAY_FIELDS:
        np.testing.assert_array_equal(getattr(read, name), getattr(trace, name))
        assert getattr(read, name).dtype == getattr(trace, name).dtype
    assert (read.spec, read.weight_ordered, read.provenance) == (SPEC, True, trace.provenance)
    assert read.fingerprint() == trace.fingerprint()
    assert [path.name for path in tmp_path.iterdir()] == ["t.safetensors"]


def test_what_is_absent_stays_absent(tmp_path: Path) -> None:
    make().save(tmp_path / "t.safetensors")
    read = RoutingTrace.load(tmp_path / "t.safetensors")
    assert all(getattr(read, name) is None for name in ARRAY_FIELDS if name != "expert_ids")
    assert not read.weight_ordered


def test_the_safetensors_library_reads_it(tmp_path: Path) -> None:
    trace = full()
    trace.save(tmp_path / "t.safetensors")
    arrays = load_file(tmp_path / "t.safetensors")
    assert set(arrays) == set(ARRAY_FIELDS)
    for name, values in arrays.items():
        np.testing.assert_array_equal(values, getattr(trace, name))


def test_a_trace_is_mapped_and_cannot_be_written_to(tmp_path: Path) -> None:
    make().save(tmp_path / "t.safetensors")
    read = RoutingTrace.load(tmp_path / "t.safetensors")
    assert isinstance(read.expert_ids, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        read.expert_ids[0, 0, 0] = 1


def test_a_trace_can_be_saved_over_the_file_it_is_mapped_from(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    full().save(path)
    RoutingTrace.load(path).save(path)
    np.testing.assert_array_equal(RoutingTrace.load(path).weights, full().weights)


def test_an_unfinished_file_is_not_there(tmp_path: Path) -> None:
    def interrupted() -> None:
        with writing(tmp_path / "t.safetensors", {"expert_ids": (np.uint8, (2, 3, 1))}, {}) as target:
            target["expert_ids"][0] = 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"cannot write .*free some space"),
        writing(tmp_path / "t.safetensors", {"expert_ids": (np.uint8, (2**20, 2**21, 2**20))}, {}),
    ):
        raise AssertionError("there is no room")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [np.dtype(np.uint64), np.dtype(">i4")])
def test_a_dtype_that_cannot_be_stored_is_named(tmp_path: Path, dtype: Any) -> None:
    trace = make(sequence_ids=np.zeros(30, dtype=dtype))
    with pytest.raises(TraceError, match="sequence_ids has dtype"):
        trace.save(tmp_path / "t.safetensors")
    assert list(tmp_path.iterdir()) == []


def write_raw(path: Path, change: Any = None, arrays: Any = None) -> None:
    """A trace file by the library, with the metadata changed."""
    trace = make()
    metadata = storage.describe(trace)
    if change is not None:
        change(metadata)
    arrays = {"expert_ids": np.ascontiguousarray(trace.expert_ids)} if arrays is None else arrays
    save_file(arrays, path, {"coterie": json.dumps(metadata)})


def put(*path_and_value: Any) -> Any:
    *path, last, value = path_and_value

    def change(data: Any) -> None:
        for key in path:
            data = data[key]
        data[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (put("kind", "profile"), "holds a profile, not a routing trace"),
        (put("schema_version", 2), "trace schema 2, this version reads up to 1; upgrade"),
        (put("schema_version", "one"), "no routing trace"),
        (put("spec", {}), "lacks model, num_experts, num_layers, top_k"),
        (put("spec", 5), "no routing trace"),
        (put("spec", "top_k", 4), "but the spec says 2 layers and top-4"),
        (put("spec", "num_experts", 6), "expert id [67]"),
        (put("spec", "num_experts", 0), "at least 1"),
        (put("provenance", [1, 2]), "no routing trace"),
        (put("provenance", "text"), "no routing trace"),
        (lambda data: data.pop("kind"), "no routing trace"),
        (lambda data: data.pop("provenance"), "no routing trace"),
    ],
)
def test_metadata_that_cannot_be(tmp_path: Path, change: Any, words: str) -> None:
    path = tmp_path / "t.safetensors"
    write_raw(path, change)
    with pytest.raises(TraceError, match=words) as raised:
        RoutingTrace.load(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"other": np.zeros(3)}, "holds no expert_ids"),
        ({"expert_ids": np.zeros((2, 30, 3), dtype=np.int64)}, "dtype int64"),
        ({"expert_ids": np.zeros((2, 30, 3), dtype=np.uint64)}, "dtype U64"),
        ({"expert_ids": np.zeros((2, 0, 3), dtype=np.uint8)}, r"shape \[2, 0, 3\]"),
        ({"expert_ids": np.zeros((), dtype=np.uint8)}, "shape"),
        ({"expert_ids": make().expert_ids.copy(), "weights": np.full((2, 30, 3), np.nan, np.float32)}, "weight nan"),
        ({"expert_ids": make().expert_ids.copy(), "home_ids": np.zeros(30, np.float32)}, "home_ids has dtype float32"),
        ({"expert_ids": make().expert_ids.copy(), "step": np.zeros((), np.int32)}, "step has shape"),
    ],
)
def test_arrays_that_cannot_be(tmp_path: Path, arrays: Any, words: str) -> None:
    write_raw(tmp_path / "t.safetensors", None, arrays)
    with pytest.raises(TraceError, match=words):
        RoutingTrace.load(tmp_path / "t.safetensors")


@pytest.mark.parametrize("keep", [0, 5, 8, 40, -1])
def test_a_truncated_file(tmp_path: Path, keep: int) -> None:
    full().save(tmp_path / "whole.safetensors")
    data = (tmp_path / "whole.safetensors").read_bytes()
    (tmp_path / "t.safetensors").write_bytes(data[:keep])
    with pytest.raises(TraceError, match="truncated or no safetensors file"):
        RoutingTrace.load(tmp_path / "t.safetensors")


@pytest.mark.parametrize(
    "data",
    [b"not at all", struct.pack("<Q", 2**60) + b"{}", struct.pack("<Q", 4) + b"\xff\xff{}", b"\0" * 100],
)
def test_no_safetensors_file(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "t.safetensors").write_bytes(data)
    with pytest.raises(TraceError, match="truncated or no safetensors file"):
        RoutingTrace.load(tmp_path / "t.safetensors")


def test_a_file_of_another_program(tmp_path: Path) -> None:
    save_file({"weight": np.zeros(4)}, tmp_path / "model.safetensors")
    with pytest.raises(TraceError, match="no routing trace; import its source first"):
        RoutingTrace.load(tmp_path / "model.safetensors")


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="does not exist; check the path"):
        RoutingTrace.load(tmp_path / "t.safetensors")
    with pytest.raises(TraceError):
        RoutingTrace.load(tmp_path)


def test_is_safetensors(tmp_path: Path) -> None:
    make().save(tmp_path / "t")
    assert is_safetensors(tmp_path / "t")
    (tmp_path / "zip").write_bytes(b"PK\x03\x04 and so on")
    assert not is_safetensors(tmp_path / "zip")
    assert not is_safetensors(tmp_path / "missing")
    assert not is_safetensors(tmp_path)
