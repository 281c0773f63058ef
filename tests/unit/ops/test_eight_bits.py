"""Products with integer rows against the same product of the weights that they stand for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.needs("torch")


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 40])
@pytest.mark.parametrize("first", [0, 5])
@pytest.mark.parametrize("bits", ["float64", "float32", "bfloat16"])
def test_products_are_those_of_the_weights(rows: int, first: int, bits: str) -> None:
    import torch

    from coterie.ops.eight_bits import down_of, gate_up_of

    rng, dtype = np.random.default_rng(rows), getattr(torch, bits)
    record: Any = torch.from_numpy(rng.integers(-127, 128, (23, 3, 37)).astype(np.int8))[first:22]
    scale: Any = torch.from_numpy(rng.random((3, 23)).astype(np.float32) * 0.01)[:, first:22]
    x: Any = torch.from_numpy(rng.standard_normal((rows, 37))).to(dtype)
    weights = record.double() * scale.t()[:, :, None].double()
    both, hidden = gate_up_of(x, record, scale), x[:, :1] * torch.linspace(-1, 1, 22 - first).to(dtype)
    expected = torch.cat([x.double() @ weights[:, part].t() for part in (0, 1)], 1)
    exactness = {"float64": 1e-6, "float32": 1e-5, "bfloat16": 2e-2}[bits]
    for found, wanted in (
        (both, expected),
        (down_of(hidden, record, scale), hidden.double() @ weights[:, 2]),
    ):
        assert found.dtype == dtype
        assert (found.double() - wanted).abs().max() <= exactness * wanted.abs().max()


def test_what_is_no_number_stays_none() -> None:
    import torch

    from coterie.ops.eight_bits import down_of, gate_up_of

    record: Any = torch.ones(8, 3, 16, dtype=torch.int8)
    scale = torch.ones(3, 8)
    x = torch.full((1, 16), float("nan"))
    assert gate_up_of(x, record, scale).isnan().all()
    assert down_of(torch.full((1, 8), float("nan")), record, scale).isnan().all()
