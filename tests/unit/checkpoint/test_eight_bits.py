"""Experts in eight bits: what rounding does to them, and stores that hold them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import coterie
from coterie.checkpoint.eight_bits import in_eight_bits
from coterie.checkpoint.expert_store import open_store
from coterie.errors import CheckpointError, ConfigError


def test_rows_are_rounded_to_the_nearest_of_their_own_steps() -> None:
    rng = np.random.default_rng(0)
    value = (rng.standard_normal((5, 3, 16)) * 10.0 ** rng.integers(-3, 3, (5, 3, 1))).astype(np.float32)
    value[2, 1] = 0
    integers, scale = in_eight_bits(value.view(np.uint32), "F32")
    again = integers.astype(np.float64) * scale.T[:, :, None]
    assert np.all(np.abs(again - value) <= scale.T[:, :, None] * 0.5001)
    largest = np.abs(integers.astype(int)).max(2)
    assert largest[2, 1] == 0
    assert (np.delete(largest.reshape(-1), 2 * 3 + 1) == 127).all()


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F64"])
def test_every_type_of_weights_is_understood(dtype: str) -> None:
    value = np.arange(-12, 12, dtype=np.float32).reshape(2, 3, 4)  # all types hold these
    bits = {
        "BF16": (value.view(np.uint32) >> 16).astype(np.uint16),
        "F16": value.astype(np.float16).view(np.uint16), "F64": value.astype(np.float64).view(np.uint64),
    }  # fmt: skip
    expected = in_eight_bits(value.view(np.uint32), "F32")
    for found, wanted in zip(in_eight_bits(bits[dtype], dtype), expected, strict=True):
        assert np.array_equal(found, wanted)


def test_weights_that_are_no_numbers_are_refused() -> None:
    value = np.full((1, 3, 4), np.inf, np.float32)
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        in_eight_bits(value.view(np.uint32), "F32")


@pytest.mark.needs("transformers")
def test_a_store_in_eight_bits_has_half_the_bytes_of_bfloat16_and_says_so(tmp_path: Path) -> None:
    plain, small = (coterie.pack("tiny-mixtral", tmp_path / f"{bits}", bits=bits) for bits in (None, 8))
    assert small.layout.dtype == "I8"
    assert small.layout.total_bytes * 2 == plain.layout.total_bytes
    versions = [json.loads((each.out / "store.json").read_text())["schema_version"] for each in (plain, small)]
    assert versions == [1, 2]  # older versions read the one and refuse the other
    assert not (plain.out / "scales.bin").exists()
    store = open_store(small.out)
    assert store.scale_LE3I is not None
    assert store.scale_LE3I.shape == (6, 8, 3, 384)
    scales = bytearray((small.out / "scales.bin").read_bytes())
    scales[100] ^= 1
    (small.out / "scales.bin").write_bytes(scales)
    with pytest.raises(CheckpointError, match=r"scales\.bin is damaged"):
        open_store(small.out)
    wanted = f"{len(scales):,}"
    for data, message in (
        (scales[:-1], f"is truncated: it has {len(scales) - 1:,} bytes instead of {wanted}; pack the model again"),
        (scales + b"0", f"is too long: it has {len(scales) + 1:,} bytes instead of {wanted}; pack the model again"),
    ):
        (small.out / "scales.bin").write_bytes(data)
        with pytest.raises(CheckpointError, match=message):
            open_store(small.out)
    (small.out / "scales.bin").unlink()
    with pytest.raises(CheckpointError, match=rf"scales\.bin is missing; it has {wanted} bytes; pack the model again"):
        open_store(small.out)
    (small.out / "store.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"truncated or no JSON .*; pack the model again"):
        open_store(small.out)
    (small.out / "store.json").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"no UTF-8 text .*; pack the model again"):
        open_store(small.out)
    with pytest.raises(ConfigError, match="experts in 4 bits"):
        coterie.pack("tiny-mixtral", tmp_path / "four", bits=4)
