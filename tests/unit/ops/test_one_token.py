"""One token's work is what `SlotGroups` makes of it, bit for bit."""

from __future__ import annotations

import pytest

from coterie.errors import ConfigError

pytestmark = pytest.mark.needs("torch")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_one_token_is_as_one_of_many(dtype: str) -> None:
    import torch

    from coterie.ops.gated_ffn import ExpertWeights, SlotGroups
    from coterie.ops.one_token import OneToken, work_of

    generator = torch.Generator().manual_seed(3)
    make = lambda *shape: torch.randn(*shape, generator=generator).to(getattr(torch, dtype))  # noqa: E731
    gate = lambda both: torch.relu(both.chunk(2, -1)[0]) * both.chunk(2, -1)[1]  # noqa: E731
    run = ExpertWeights(make(8, 512, 64), make(8, 64, 256), None, None, False, False, gate).run
    hidden, ids = make(1, 64), torch.tensor([[6, 1, 3]])
    weights, widths = torch.tensor([[0.5, 0.2, 0.3]]).to(hidden.dtype), torch.tensor([[256, 0, 48]])
    sums = [
        work.combine([work.outputs(index, run) for index in range(3)], weights)
        for work in (work_of(hidden, ids, widths, (8, 256)), SlotGroups.of(hidden, ids, widths, (8, 256)))
    ]
    assert isinstance(work_of(hidden, ids, widths, (8, 256)), OneToken)
    assert sums[0].dtype == hidden.dtype
    assert sums[0].abs().max() > 0
    assert torch.equal(*sums)


def test_many_tokens_are_grouped_and_wrong_widths_refused() -> None:
    import torch

    from coterie.ops.gated_ffn import SlotGroups
    from coterie.ops.one_token import work_of

    two = work_of(torch.zeros(2, 4), torch.tensor([[0, 1], [1, 2]]), torch.full((2, 2), 8), (3, 8))
    assert isinstance(two, SlotGroups)
    for ids, widths in ([[0, 3]], [[8, 8]]), ([[0, 1]], [[9, 8]]), ([[0, 1]], [[8, -1]]):
        with pytest.raises(ConfigError, match="cannot run: there are 3 experts of 8 neurons"):
            work_of(torch.zeros(1, 4), torch.tensor(ids), torch.tensor(widths), (3, 8))
