"""What comparing a baked model with the original sees: ties, wrong routers, other numberings."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.errors import CheckpointError, ConfigError
from coterie.families import load_spec
from coterie.models.bake import bake
from coterie.placement.placement import Placement
from coterie.topology import Topology

pytestmark = [pytest.mark.needs("torch"), pytest.mark.needs("transformers")]


def placement(source: Path) -> Placement:
    spec, rng = load_spec(source), np.random.default_rng(4)
    return Placement(
        np.stack([rng.permutation(spec.num_experts) for _ in range(spec.num_layers)]), Topology.parse("4"), spec
    )


def test_equal_scores_are_counted_as_ties(tiny_checkpoint: Any, tmp_path: Path) -> None:
    """Experts 4 to 7 have the router rows of 0 to 3, so that every top-3 takes one of a pair by chance."""
    from coterie.evaluate.baking import compare_baked
    from coterie.models.layers import find_moe_layers
    from coterie.models.load import load_model

    source = tmp_path / "source"
    shutil.copytree(tiny_checkpoint("qwen3_moe"), source)
    model = load_model(source).requires_grad_(False)
    for layer in find_moe_layers(model):
        layer.router.weight[4:] = layer.router.weight[:4]
    model.save_pretrained(source)
    made = placement(source)
    bake(source, made, tmp_path / "out")
    with pytest.raises(
        CheckpointError, match=r"logits differ by .* and 0 of 762 decisions \([1-9]\d* more by exact ties\)"
    ):
        compare_baked(source, tmp_path / "out", made.physical_to_logical_map)


def test_a_router_left_as_it_was_is_seen(tiny_checkpoint: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from coterie.evaluate.baking import compare_baked

    source, out = tiny_checkpoint("qwen3_moe"), tmp_path / "out"
    made = placement(source)
    bake(source, made, out)
    wrong, right = load_file(out / "model.safetensors"), load_file(source / "model.safetensors")
    name = "model.layers.2.mlp.gate.weight"
    wrong[name] = right[name]
    save_file(wrong, out / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"254 of 762 decisions .* by scores up to .* apart"):
        compare_baked(source, out, made.physical_to_logical_map)


def test_a_placement_of_published_numbers_is_refused_on_a_baked_model(tiny_checkpoint: Any, tmp_path: Path) -> None:
    import torch

    import coterie
    from coterie.evaluate.changes import pruning
    from coterie.models.load import load_model
    from coterie.pruning.fitting import RuleChoice

    source = tiny_checkpoint("qwen3_moe")
    made = placement(source)
    bake(source, made, tmp_path / "out")
    model = load_model(tmp_path / "out")
    refused = pytest.raises(ConfigError, match="the placement numbers experts as published, the model by the baked")
    with refused, coterie.prune_destinations(model, made, 0.2):
        pass
    choice = RuleChoice("cap", 0.2, None, None)
    with pytest.raises(ConfigError, match="the placement numbers experts as published"):
        pruning(model, choice, placement=made)
    original = load_model(source)
    with torch.inference_mode(), coterie.record(original) as recorder:
        original(input_ids=torch.arange(3, 40)[None])
    peak = RuleChoice("cap", None, 0.5, None)
    with pytest.raises(ConfigError, match="the trace to fit on numbers experts as published"):
        pruning(model, peak, topology=Topology.parse("4"), trace=recorder.trace())
    own = Placement(made.physical_to_logical_map * 0 + np.arange(8), made.topology, made.spec)
    marked = {"trace": {"coterie_expert_order": model.config.coterie_expert_order}}
    with coterie.prune_destinations(model, Placement(**{**vars(own), "method": marked}), 0.2) as pruner:
        assert pruner.topology.num_devices == 4
