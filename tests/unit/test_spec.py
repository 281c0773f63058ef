"""The shape of a model: what it refuses and how it is written down."""

from __future__ import annotations

from typing import Any

import pytest

from coterie.errors import ConfigError
from coterie.spec import MoESpec


def test_it_comes_back_from_json() -> None:
    spec = MoESpec("m", 3, 8, 2, 4, 2, (1, 2, 5), 6, 64)
    assert MoESpec.from_json(spec.to_json()) == spec
    assert MoESpec.from_json({**spec.to_json(), "new_in_a_later_version": 1}) == spec
    assert MoESpec.from_json({"model": "m", "num_layers": 1, "num_experts": 8, "top_k": 2}) == MoESpec("m", 1, 8, 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"top_k": 9}, "top_k = 9 is more than num_experts = 8"),
        ({"top_k": 0}, "top_k = 0 in the model's spec; it must be at least 1"),
        ({"num_layers": -1}, "at least 1"),
        ({"num_groups": 3}, "num_experts = 8 is not divisible by num_groups = 3"),
        ({"layer_ids": [1]}, "1 layer_ids for num_layers = 2"),
        ({"layer_ids": [1, True]}, "list of integers"),
        ({"layer_ids": 5}, "list of integers"),
        ({"num_experts": 8.0}, "must be an integer"),
        ({"num_experts": True}, "must be an integer"),
        ({"num_experts": None}, "must be an integer"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        MoESpec.from_json({"model": "m", "num_layers": 2, "num_experts": 8, "top_k": 2, **change})


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match="lacks num_experts, top_k"):
        MoESpec.from_json({"model": "m", "num_layers": 2})
