"""Every family's model, baked: the same decisions, the same outputs, and the original back bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import coterie
from coterie.checkpoint.compare_renumbered import compare_renumbered
from coterie.families import FAMILIES, load_spec
from coterie.models.load import SHIPPED_MODELS, resolve
from coterie.placement.placement import Placement
from coterie.topology import Topology

pytestmark = [pytest.mark.needs("torch"), pytest.mark.needs("transformers")]


def random_placement(spec: Any, devices: int = 4, seed: int = 5) -> Placement:
    """Slots by chance; where routing is limited to groups, these change places whole and are mixed within."""
    rng, size = np.random.default_rng(seed), spec.num_experts // spec.num_groups
    rows = [
        np.concatenate([group * size + rng.permutation(size) for group in rng.permutation(spec.num_groups)])
        for _ in range(spec.num_layers)
    ]
    return Placement(np.stack(rows), Topology.parse(str(devices)), spec)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def check(source: Path, out: Path, map_LE: Any, spec: Any) -> Any:
    from coterie.evaluate.baking import compare_baked

    return compare_renumbered(source, out, map_LE, spec.layer_ids), compare_baked(source, out, map_LE)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_baked_model_decides_and_computes_the_same(family: str, tiny_checkpoint: Any, tmp_path: Path) -> None:
    source = tiny_checkpoint(family)
    placement = random_placement(load_spec(source))
    baked = coterie.bake(source, placement, tmp_path / "baked", check=check)
    same, agreement = baked.check
    assert baked.moved > 0
    assert agreement.relative <= 1e-5
    assert (agreement.decisions.tied, agreement.decisions.different) == (0, 0)
    assert agreement.decisions.compared == 254 * load_spec(source).num_layers
    assert same.renamed + same.moved > 0
    assert same.moved >= load_spec(source).num_layers  # routers at least
    coterie.unbake(tmp_path / "baked", tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(source)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_differs_by_ties_alone(family: str, tiny_checkpoint: Any, tmp_path: Path) -> None:
    source = tiny_checkpoint(family, "bfloat16")
    baked = coterie.bake(source, random_placement(load_spec(source)), tmp_path / "baked", check=check)
    agreement = baked.check[1]
    assert agreement.dtype == "bfloat16"
    assert agreement.own.different == 0
    assert agreement.own.tied <= 0.05 * agreement.own.compared
    assert agreement.kl <= 0.01


@pytest.mark.parametrize("model", SHIPPED_MODELS)
def test_shipped_models_bake(model: str, tmp_path: Path) -> None:
    placement = random_placement(load_spec(resolve(model)))
    baked = coterie.bake(model, placement, tmp_path / "baked", check=check)
    agreement = baked.check[1]
    assert agreement.relative <= 1e-5
    assert agreement.decisions.different == agreement.own.different == 0
    assert agreement.kl < 0.01
    coterie.unbake(tmp_path / "baked", tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(resolve(model))


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "granitemoe", "gpt_oss"])
def test_decisions_on_a_baked_model_are_the_originals_renumbered(
    family: str, tiny_checkpoint: Any, tmp_path: Path
) -> None:
    """Seen by recording both, and turned back by what `trace import --unbake` uses."""
    import torch

    from coterie.models.baked import unbaked_trace
    from coterie.models.load import load_model

    source = tiny_checkpoint(family)
    placement = random_placement(load_spec(source))
    coterie.bake(source, placement, tmp_path / "baked")
    ids, traces = torch.tensor([list(range(3, 60))]), []
    for folder in (source, tmp_path / "baked"):
        model = load_model(folder)
        with torch.inference_mode(), coterie.record(model) as recorder:
            model(input_ids=ids)
        traces.append(recorder.trace())
    back = unbaked_trace(traces[1], tmp_path / "baked")
    slots = placement.physical_to_logical_map
    np.testing.assert_array_equal(
        np.sort([row[layer] for row, layer in zip(slots, traces[1].expert_ids, strict=True)], axis=2),
        np.sort(traces[0].expert_ids, axis=2),
    )
    np.testing.assert_array_equal(np.sort(back.expert_ids, axis=2), np.sort(traces[0].expert_ids, axis=2))
    assert (np.sort(traces[1].expert_ids, axis=2) != np.sort(traces[0].expert_ids, axis=2)).any()


def test_a_made_placement_keeps_groups_whole(tiny_checkpoint: Any, make_trace: Any, tmp_path: Path) -> None:
    """What `coterie place` makes for group-limited routing can be baked."""
    from coterie.placement.driver import place, prepare

    source = tiny_checkpoint("deepseek_v3")
    spec = load_spec(source)
    trace = make_trace(spec.num_layers, 400, spec.num_experts, spec.top_k, groups=spec.num_groups)
    placement = place(prepare(trace, Topology.parse("2")), "cap")
    assert coterie.bake(source, placement, tmp_path / "baked").moved > 0
