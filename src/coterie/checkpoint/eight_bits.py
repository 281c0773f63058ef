"""Experts in eight bits: every row of a neuron as integers from -127 to 127 and one scale, half of bfloat16's bytes.

A row here is what a neuron has of one part: its gate row, its up row or its down column. Scales are float32 and stay in
memory, as biases do: 4 bytes for H.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import CheckpointError, ConfigError

LARGEST = 127


def require_bits(bits: int | None) -> None:
    """Refuse any number of bits but eight; None: weights as they are.

    Raises:
        ConfigError: naming it.
    """
    if bits not in (None, 8):
        raise ConfigError(f"experts in {bits} bits are not supported; give 8, or nothing to keep them as they are")


def in_eight_bits(record_I3H: NDArray[Any], dtype: str) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """An expert rounded to eight bits; a row's largest element is 127 scales.

    Source: symmetric rounding to nearest with one scale a row, as weight-only quantisation commonly has it.

    Args:
        record_I3H: [I, 3, H] unsigned integers of the elements' size, as `ExpertRecords.record` gives them.
        dtype: what they are: "F32", "BF16", "F16" or "F64".

    Returns:
        integers [I, 3, H], and scales [3, I]: an element is its integer times its row's scale.

    Raises:
        CheckpointError: for weights that are NaN or infinite.
    """
    value_I3H = _floats(record_I3H, dtype)
    largest_I3 = np.abs(value_I3H).max(2)
    if not np.isfinite(largest_I3).all():
        raise CheckpointError("has weights that are NaN or infinite, which have no place in eight bits; download again")
    scale_I3 = (largest_I3 / np.float32(LARGEST)).astype(np.float32)
    steps_I3H = value_I3H / np.where(scale_I3 > 0, scale_I3, np.float32(1))[:, :, None]
    return np.rint(steps_I3H).clip(-LARGEST, LARGEST).astype(np.int8), np.ascontiguousarray(scale_I3.T)


def _floats(record_I3H: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    if dtype == "BF16":  # the upper half of a float32
        return (record_I3H.astype(np.uint32) << 16).view(np.float32)
    return record_I3H.view({"F16": np.float16, "F32": np.float32, "F64": np.float64}[dtype]).astype(np.float32)
