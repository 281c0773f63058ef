"""A trace of unknown length: what comes out is what went in, whole, or the file is not there."""

from __future__ import annotations

import errno

import numpy as np
import pytest

from coterie.errors import ConfigError, TraceError
from coterie.spec import MoESpec
from coterie.trace import growing
from coterie.trace.growing import GrowingTrace
from coterie.trace.routing_trace import RoutingTrace

SPEC = MoESpec("toy", 3, 8, 2)


def chunk(tokens: int, seed: int = 0, experts: int = 8):
    """Layers of ids and falling weights, and columns, for a number of tokens."""
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((3, tokens, experts)), axis=2)[:, :, :2].astype(np.int32)
    weights = -np.sort(-rng.random((3, tokens, 2)).astype(np.float32), axis=2)
    columns = {name: rng.integers(0, 100, tokens) for name in growing.COLUMNS}
    columns["phase"] %= 2
    return list(zip(ids, weights, strict=True)), columns


def test_chunks_come_out_as_one_trace(tmp_path):
    chunks = [chunk(5, 1), chunk(1, 2), chunk(0, 3), chunk(9, 4)]
    trace = GrowingTrace(SPEC)
    for layers, columns in chunks:
        trace.append(layers, columns)
    trace.save(tmp_path / "t.safetensors", {"source": "toy"})
    trace.close()
    saved = RoutingTrace.load(tmp_path / "t.safetensors")
    assert (saved.num_tokens, saved.provenance, saved.weight_ordered) == (15, {"source": "toy"}, True)
    assert saved.kept is None
    for layer in range(3):
        np.testing.assert_array_equal(saved.expert_ids[layer], np.concatenate([each[0][layer][0] for each in chunks]))
        np.testing.assert_array_equal(saved.weights[layer], np.concatenate([each[0][layer][1] for each in chunks]))
    for name in growing.COLUMNS:
        np.testing.assert_array_equal(getattr(saved, name), np.concatenate([each[1][name] for each in chunks]))


def test_more_may_follow_a_save(tmp_path):
    trace = GrowingTrace(SPEC, tmp_path)
    for seed in range(3):
        trace.append(*chunk(4, seed))
        trace.save(tmp_path / f"{seed}.safetensors", {})
    trace.close()
    first, last = (RoutingTrace.load(tmp_path / f"{seed}.safetensors") for seed in (0, 2))
    np.testing.assert_array_equal(last.expert_ids[:, :4], first.expert_ids)
    np.testing.assert_array_equal(last.expert_ids[:, 8:], np.stack([ids for ids, _ in chunk(4, 2)[0]]))
    assert len(list(tmp_path.iterdir())) == 3  # the scratch file has no name


def test_more_than_256_experts(tmp_path):
    trace = GrowingTrace(MoESpec("toy", 3, 400, 2))
    layers, columns = chunk(50, experts=400)
    trace.append(layers, columns)
    trace.save(tmp_path / "t.safetensors", {})
    trace.close()
    saved = RoutingTrace.load(tmp_path / "t.safetensors")
    assert saved.expert_ids.dtype == np.uint16
    np.testing.assert_array_equal(saved.expert_ids[2], layers[2][0])


def test_weights_in_no_order(tmp_path):
    layers, columns = chunk(4)
    trace = GrowingTrace(SPEC)
    trace.append(layers, columns)
    assert trace.weight_ordered
    trace.append([(ids, weights[:, ::-1]) for ids, weights in layers], columns)
    assert not trace.weight_ordered
    trace.close()


def test_zero_weights_are_dropped_experts(tmp_path):
    layers, columns = chunk(4)
    layers[1][1][2, 1] = 0
    layers[1][0][2, 1] = layers[1][0][2, 0]  # a dropped slot may repeat an expert
    trace = GrowingTrace(SPEC, zero_is_dropped=True)
    trace.append(layers, columns)
    trace.save(tmp_path / "t.safetensors", {})
    trace.close()
    kept = RoutingTrace.load(tmp_path / "t.safetensors").kept
    assert kept is not None
    assert np.argwhere(~kept).tolist() == [[1, 2, 1]]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda ids, weights: ids.__setitem__((2, 0), 8), "expert id 8 in layer 1, token 6"),
        (lambda ids, weights: ids.__setitem__((2, 0), ids[2, 1]), "layer 1, token 6 names an expert twice"),
        (lambda ids, weights: weights.__setitem__((2, 0), np.nan), "routing weight nan in layer 1, token 6"),
    ],
)
def test_a_chunk_with_an_impossible_decision_is_not_there(tmp_path, spoil, message):
    trace = GrowingTrace(SPEC)
    trace.append(*chunk(4, 1))
    layers, columns = chunk(4, 2)
    spoil(*layers[1])
    with pytest.raises(TraceError, match=message):
        trace.append(layers, columns)
    trace.append(*chunk(2, 3))
    trace.save(tmp_path / "t.safetensors", {})
    trace.close()
    saved = RoutingTrace.load(tmp_path / "t.safetensors")
    assert saved.num_tokens == 6
    np.testing.assert_array_equal(saved.weights[2, 4:], chunk(2, 3)[0][2][1])


def test_a_full_disk_is_one_line(tmp_path):
    def layers():
        yield chunk(4)[0][0]
        raise OSError(errno.ENOSPC, "No space left on device")

    trace = GrowingTrace(SPEC, tmp_path)
    with pytest.raises(ConfigError, match="No space left on device; it needs a writable folder"):
        trace.append(layers(), chunk(4)[1])
    assert trace.num_tokens == 0
    trace.close()


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="cannot keep the recording in"):
        GrowingTrace(SPEC, tmp_path / "absent")


def test_no_tokens(tmp_path):
    trace = GrowingTrace(SPEC)
    with pytest.raises(TraceError, match="empty"):
        trace.save(tmp_path / "t.safetensors", {})
    trace.close()
    assert not list(tmp_path.iterdir())
