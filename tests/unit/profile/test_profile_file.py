"""A profile's file: what is written is read, and what cannot be is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from coterie.errors import ConfigError, TraceError
from coterie.profile.model_profile import ModelProfile
from coterie.profile.profile_file import digest_of, load_profile, save_profile
from coterie.spec import MoESpec


@pytest.fixture
def profile() -> ModelProfile:
    rng = np.random.default_rng(0)
    layers, experts, top_k, width, tokens = 2, 6, 3, 5, 40
    ids = rng.random((layers, tokens, experts)).argsort(axis=2)[:, :, :top_k].astype(np.uint8)
    weights = -np.sort(-rng.dirichlet(np.ones(top_k), (layers, tokens)), axis=2)
    load, pairs = np.zeros((layers, experts), np.int64), np.zeros((layers, experts, experts), np.int64)
    for layer in range(layers):
        for anchor, *others in ids[layer]:
            load[layer, [anchor, *others]] += 1
            for other in others:
                pairs[layer, anchor, other] += 1
                pairs[layer, other, anchor] += 1
    fisher = np.where(pairs > 0, rng.random(pairs.shape), np.nan).astype(np.float32)
    return ModelProfile(
        MoESpec("toy", layers, experts, top_k), "0123", width, tokens, load, pairs,
        {"rms": rng.random((layers, experts, width)).astype(np.float32)}, {"fisher": fisher},
        ids, weights.astype(np.float32), {"seed": 3},
    )  # fmt: skip


def test_what_is_written_is_read(profile, tmp_path):
    save_profile(profile, tmp_path / "p.safetensors")
    read = load_profile(tmp_path / "p.safetensors")
    assert (read.spec, read.identity, read.width, read.num_tokens) == (profile.spec, "0123", 5, 40)
    assert read.provenance == {"seed": 3}
    assert digest_of(read) == digest_of(profile)
    np.testing.assert_array_equal(read.dominance["fisher"], profile.dominance["fisher"])
    assert [path.name for path in tmp_path.iterdir()] == ["p.safetensors"]


def changed(values: np.ndarray, at: tuple[int, ...], value: float) -> np.ndarray:
    values = values.copy()
    values[at] = value
    return values


BROKEN = {
    "negative count": (lambda p: {"load_LE": changed(p.load_LE, (0, 0), -1)}, "load are negative"),
    "float counts": (lambda p: {"load_LE": p.load_LE.astype(np.float64)}, "load is float64"),
    "one count more": (lambda p: {"load_LE": changed(p.load_LE, (0, 0), 99)}, "loads of a layer do not add up to 40"),
    "lopsided pairs": (lambda p: {"pairs_LEE": changed(p.pairs_LEE, (1, 0, 1), 99)}, "not symmetric"),
    "too many pairs": (lambda p: {"pairs_LEE": p.pairs_LEE * 2}, "do not add up to 80 uses"),
    "NaN": (lambda p: {"importance": {"rms": changed(p.importance["rms"], (0, 1, 2), np.nan)}}, "1 values of importan"),
    "double": (lambda p: {"importance": {"rms": p.importance["rms"].astype(float)}}, "importance.rms is float64"),
    "one neuron less": (lambda p: {"importance": {"rms": p.importance["rms"][:, :, 1:]}}, r"shape \[2, 6, 4\]"),
    "infinite": (lambda p: {"dominance": {"x": np.full((2, 6, 6), np.inf, np.float32)}}, "72 values of dominance.x"),
    "no such expert": (lambda p: {"sample_ids_LSK": changed(p.sample_ids_LSK, (0, 0, 0), 6)}, "not among 6"),
    "rising": (lambda p: {"sample_weights_LSK": p.sample_weights_LSK[:, :, ::-1]}, "do not fall"),
    "too light": (lambda p: {"sample_weights_LSK": p.sample_weights_LSK / 2}, "do not add up to 1"),
    "no tokens": (lambda p: {"num_tokens": 0}, "0 tokens"),
}


@pytest.mark.parametrize("case", list(BROKEN))
def test_what_cannot_be_is_not_written(profile, tmp_path, case):
    change, message = BROKEN[case]
    with pytest.raises(TraceError, match=message):
        save_profile(replace(profile, **change(profile)), tmp_path / "p.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_damaged_file_is_refused(profile, tmp_path):
    path = tmp_path / "p.safetensors"
    with pytest.raises(TraceError, match="does not exist"):
        load_profile(path)
    save_profile(profile, path)
    whole = path.read_bytes()
    for cut in (0, 5, 100, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(TraceError, match="truncated"):
            load_profile(path)


def rewritten(path, *, arrays=None, **described) -> None:
    """The same file with another description or other arrays, as another program might write it."""
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        metadata = json.loads(file.metadata()["coterie"])
    held = {name: values.copy() for name, values in load_file(path).items()}
    save_file({**held, **(arrays or {})}, path, {"coterie": json.dumps({**metadata, **described})})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "routing_trace"}, "holds a routing_trace, not a model profile"),
        ({"schema_version": 2}, "model profile schema 2, this version reads 1"),
        ({"schema_version": None}, "schema None"),
        ({"importance": ["absent"]}, "lacks parts of a profile .*importance.absent"),
        ({"spec": {}}, "lacks parts of a profile"),
        ({"num_tokens": "many"}, "lacks parts of a profile"),
        ({"width": 4}, "importance.rms is float32 of shape"),
        ({"arrays": {"load": np.full((2, 6), -1)}}, "12 values of load are negative"),
    ],
)
def test_a_strange_file_is_refused(profile, tmp_path, change, message):
    path = tmp_path / "p.safetensors"
    save_profile(profile, path)
    rewritten(path, **change)
    with pytest.raises(TraceError, match=message):
        load_profile(path)


def test_other_safetensors_files_are_no_profiles(tmp_path):
    save_file({"weight": np.zeros(3)}, tmp_path / "w.safetensors")
    with pytest.raises(TraceError, match="holds no model profile"):
        load_profile(tmp_path / "w.safetensors")


def test_a_folder_that_is_absent(profile, tmp_path):
    with pytest.raises(ConfigError, match="cannot write"):
        save_profile(profile, tmp_path / "absent" / "p.safetensors")
