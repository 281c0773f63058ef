"""The sizes of a model's experts from its config."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coterie.errors import CheckpointError
from coterie.models.expert_shape import expert_sizes

CONFIG = {
    "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 2, "hidden_size": 64,
    "moe_intermediate_size": 24, "torch_dtype": "torch.bfloat16",
}  # fmt: skip


def write(folder: Path, **changes: object) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps({key: value for key, value in {**CONFIG, **changes}.items() if value is not None}))
    return file


def test_from_a_file_and_from_its_folder(tmp_path: Path) -> None:
    file = write(tmp_path)
    for source in (file, tmp_path, str(file)):
        found = expert_sizes(source)
        assert (found.width, found.dtype, found.spec.num_experts, found.spec.hidden_size) == (24, "bfloat16", 8, 64)
    assert expert_sizes(write(tmp_path, torch_dtype=None)).dtype == "float32"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"moe_intermediate_size": None}, "moe_intermediate_size = None; it must be the experts' width"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size = 0"),
        ({"hidden_size": None}, "lacks hidden_size"),
    ],
)
def test_configs_that_do_not_say(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        expert_sizes(write(tmp_path, **changes))
