"""Warming that fails leaves a model that holds nothing it did not read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.needs("transformers")


def test_after_visits_that_break_off_nothing_unread_is_held(offload: Any, prompts: Any) -> None:
    import torch

    def breaking() -> Iterator[Any]:
        for layer in (0, 1):
            yield layer, np.arange(8), np.full(8, 16)
        raise KeyboardInterrupt

    model = offload("100%", check=True)
    with pytest.raises(KeyboardInterrupt):
        model.warm(breaking())
    assert model.stats().loaded_bytes == 0
    with torch.inference_mode():
        model(input_ids=prompts)  # the check compares every output with freshly read weights
    assert model.stats().misses > 0
    assert model.stats().hits == 0


def test_a_read_that_fails_keeps_what_came_before(offload: Any, prompts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from coterie.errors import CheckpointError
    from coterie.offloading.link import Link

    real, fails = Link.fill, [False, False, True]

    def fill(link: Any, into: memoryview, offset: int) -> None:
        if fails and fails.pop(0):
            raise CheckpointError("the disk is gone")
        real(link, into, offset)

    monkeypatch.setattr(Link, "fill", fill)
    model = offload("100%", check=True, threads=1)
    with pytest.raises(CheckpointError, match="the disk is gone"):
        model.warm([(0, np.arange(8), np.full(8, 16))])
    with torch.inference_mode():
        model(input_ids=prompts)
    stats = model.stats()
    assert 0 < stats.hits <= 2
    assert stats.peak_expert_bytes <= stats.budget_bytes
