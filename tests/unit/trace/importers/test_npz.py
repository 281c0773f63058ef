"""What an .npz may hold beside ids, and what is refused before it is believed."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from coterie.errors import TraceError
from coterie.trace.open import open_trace

L, T, K, E = 2, 30, 2, 8


def ids(dtype=np.uint8) -> np.ndarray:
    return np.argsort(np.random.default_rng(0).random((L, T, E)), axis=2)[:, :, :K].astype(dtype)


def npz(folder: Path, **arrays) -> Path:
    np.savez_compressed(folder / "t.npz", **({"expert_ids": ids()} | arrays))
    return folder / "t.npz"


def npy(array: np.ndarray, **kwargs) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **kwargs)
    return file.getvalue()


def archive(folder: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(folder / "t.npz", "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return folder / "t.npz"


def header(text: str, version: int = 1) -> bytes:
    body = text.encode()
    return b"\x93NUMPY" + bytes([version, 0]) + len(body).to_bytes(2 if version == 1 else 4, "little") + body


def test_everything_a_trace_holds_is_read(tmp_path):
    rng = np.random.default_rng(1)
    kept = rng.random((L, T, K)) < 0.9
    per_token = {
        "positions": rng.integers(0, 99, T), "phase": rng.integers(0, 2, T), "step": rng.integers(0, 9, T),
        "home_ids": rng.integers(0, 4, T), "sequence_ids": np.sort(rng.integers(0, 5, T)).astype(np.uint16),
    }  # fmt: skip
    weights = rng.random((L, T, K)).astype(">f8")
    spec = {"model": "m", "num_layers": L, "num_experts": E, "top_k": K, "layer_ids": [1, 3], "num_groups": 2}
    source = npz(
        tmp_path, expert_ids=ids(">i4"), weights=weights, kept=kept, spec=np.array(json.dumps(spec)), other=np.ones(3),
        **per_token,
    )  # fmt: skip
    trace = open_trace(source)
    assert np.array_equal(trace.expert_ids, ids())
    assert np.array_equal(trace.weights, weights)
    assert np.array_equal(trace.kept, kept)
    for name, values in per_token.items():
        assert np.array_equal(getattr(trace, name), values), name
    assert (trace.spec.model, trace.spec.layer_ids, trace.spec.num_groups) == ("m", (1, 3), 2)
    assert trace.provenance["inferred"] == {}


def test_margins_without_weights_are_a_trace_without_weights(tmp_path):
    trace = open_trace(npz(tmp_path, margins=np.ones((L, T), dtype=np.float32), prompt=np.zeros(T, dtype=np.uint8)))
    assert trace.weights is None
    assert trace.num_sequences == 1


@pytest.mark.parametrize("name", ["prompt", "example", "sequence_ids"])
def test_sequences_by_any_of_their_names(tmp_path, name):
    assert open_trace(npz(tmp_path, **{name: np.arange(T) // 7})).num_sequences == 5


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"expert_ids": ids(np.float32)}, "expert_ids has dtype float32; expert ids are integers"),
        ({"expert_ids": ids(np.int16) - 1}, r"expert id -1 in layer \d, token \d+; ids run from 0"),
        ({"expert_ids": ids(np.int64) + 2**32}, r"expert id 42949\d+ in layer 0, token 0"),
        ({"expert_ids": np.zeros((L, 0, K), dtype=np.uint8)}, r"shape \[2, 0, 2\]"),
        ({"expert_ids": ids()[0]}, r"shape \[30, 2\]"),
        ({"expert_ids": np.full((L, T, K), 3, dtype=np.uint8)}, "names an expert twice"),
        ({"weights": np.ones((L, T, K + 1), dtype=np.float32)}, r"weights is \[2, 30, 3\] float32"),
        ({"weights": np.ones((L, T, K), dtype=np.int32)}, "weights is .* int32; it is floating-point"),
        ({"weights": np.full((L, T, K), np.nan, dtype=np.float16)}, "routing weight nan in layer 0, token 0"),
        ({"weights": np.full((L, T, K), -1.0)}, "routing weight -1.0"),
        ({"weights": np.ones((L, T, K)), "probs": np.ones((L, T, K))}, "weights and probs, which mean the same"),
        ({"kept": np.ones((L, T, K), dtype=np.uint8)}, "kept is .* uint8; it is bool"),
        ({"example": np.zeros(T - 1, dtype=np.int32)}, "example 29"),
        ({"example": np.zeros(T)}, r"example is \[30\] float64"),
        ({"example": np.arange(T) - 1}, "example holds -1"),
        ({"phase": np.full(T, 2)}, "phase holds 2; its values run from 0 to 1"),
        ({"seq_starts": np.array([0, 40])}, "seq_starts ends at 40"),
        ({"seq_starts": np.array([], dtype=np.int32)}, "seq_starts is empty"),
        ({"seq_starts": np.array([3, 9])}, "does not rise from 0"),
        ({"spec": np.array("{")}, "spec holds no JSON"),
        ({"spec": np.array('{"model": "m"}')}, "spec lacks num_experts"),
        ({"spec": np.array("[1]")}, "spec is a JSON list"),
        ({"spec": np.array([1])}, r"spec is \[1\] int64; it is one JSON string"),
        ({"provenance": np.array("3")}, "provenance is a JSON int"),
        ({"expert_ids": np.asfortranarray(ids())}, "stored column-major"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, arrays, message):
    with pytest.raises(TraceError, match=message) as caught:
        open_trace(npz(tmp_path, **arrays))
    assert str(tmp_path / "t.npz") in str(caught.value)


def test_no_ids_no_trace(tmp_path):
    with pytest.raises(TraceError, match="no expert_ids"):
        open_trace(archive(tmp_path, {"weights.npy": npy(np.ones(3))}))


class Explosive:
    def __reduce__(self):
        return (Path("exploded").touch, ())


@pytest.mark.parametrize("name", ["expert_ids", "weights", "seq_starts", "spec"])
def test_pickles_are_refused_unread(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    hostile = np.empty((L, T, K), dtype=object)
    hostile[...] = Explosive()
    members = {"expert_ids.npy": npy(ids())} | {f"{name}.npy": npy(hostile, allow_pickle=True)}
    with pytest.raises(TraceError, match=f"{name} holds pickled Python objects, which are never loaded"):
        open_trace(archive(tmp_path, members))
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"no \.npy array"),
        (b"\x93NUMPY", r"no \.npy array"),
        (header("", 3), r"\.npy version 3"),
        (
            header("{'descr': '<u1', 'fortran_order': False, 'shape': (2, 1000000000000, 2)}"),
            "4000000000000 bytes but 0",
        ),
        (header("{'descr': '<u1', 'fortran_order': False, 'shape': (2, -3, 2)}"), "damaged"),
        (header("{'descr': '<u1', 'fortran_order': False, 'shape': 7}"), "damaged"),
        (header("{'descr': [('a', '<u1')], 'fortran_order': False, 'shape': (2, 3, 2)}"), "records instead of numbers"),
        (header("{'descr': 'nonsense', 'fortran_order': False, 'shape': (2, 3, 2)}"), "damaged"),
        (header("__import__('os').system('true')"), "damaged"),
        (header("(" * 5000), "damaged"),
        (header(" " * 20_000), "header of 20000 bytes"),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\xff", "header of 4294967295 bytes"),
        (npy(ids())[:-1], "119 are there; it is truncated"),
        (npy(ids()) + b"x", "121 are there"),
    ],
)
def test_headers_are_believed_only_as_far_as_the_bytes_reach(tmp_path, content, message):
    with pytest.raises(TraceError, match=message):
        open_trace(archive(tmp_path, {"expert_ids.npy": content}))


def test_a_decompression_bomb_is_refused_before_it_unfolds(tmp_path):
    size = 2**27
    text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': (2, {size // 4}, 2)}}"
    path = archive(tmp_path, {"expert_ids.npy": header(text) + bytes(size)})
    assert path.stat().st_size < 2**18
    with pytest.raises(TraceError, match=r"packs 128\.0 MiB in 1\d\d\.\d KiB, more than 200:1"):
        open_trace(path)


def test_a_damaged_member_is_refused(tmp_path):
    rng = np.random.default_rng(0)
    path = npz(tmp_path, expert_ids=np.argsort(rng.random((L, 4000, E)), axis=2)[:, :, :K].astype(np.uint8))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(bytes(content))
    with pytest.raises(TraceError, match="expert_ids cannot be unpacked"):
        open_trace(path)
