"""A spec whose layers cannot be is refused where it is made."""

import pytest

from coterie.errors import ConfigError
from coterie.spec import MoESpec


def test_layers_that_fit() -> None:
    spec = MoESpec("m", 3, 8, 2, layer_ids=(1, 2, 5), num_model_layers=6)
    assert MoESpec.from_json(spec.to_json()) == spec
    assert MoESpec("m", 3, 8, 2, layer_ids=(0, 7, 15)).num_model_layers == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_ids": (1, 1, 2)}, "rising"),
        ({"layer_ids": (2, 1, 3)}, "rising"),
        ({"layer_ids": (-1, 1, 3)}, "rising"),
        ({"layer_ids": (0, 1, 6), "num_model_layers": 6}, "reaches 6 in a model of 6 layers"),
        ({"num_model_layers": 2}, "less than num_layers"),
        ({"num_groups": 2, "topk_groups": 3}, "topk_groups = 3 is more than num_groups = 2"),
    ],
)
def test_layers_that_cannot_be(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MoESpec("m", 3, 8, 2, **fields)  # type: ignore[arg-type]
