"""What every family must keep when it runs from a store: the model's outputs, whatever the budget and the schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import coterie
from coterie.families import FAMILIES

pytestmark = pytest.mark.needs("transformers")


@pytest.fixture(autouse=True)
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts are read and computed block by block, as large ones are."""
    monkeypatch.setattr("coterie.offloading.link._READ_BYTES", 1)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest, tiny_checkpoint: Any, make_profile: Any) -> Any:
    """The checkpoint, the resident model, and a profile of it with importances by chance."""
    from coterie.models.identity import identity_of
    from coterie.models.layers import spec_of
    from coterie.models.load import load_model
    from coterie.ops.gated_ffn import ExpertWeights

    folder = tiny_checkpoint(request.param)
    model = load_model(folder).requires_grad_(False)
    spec, width = spec_of(model), ExpertWeights.of(_experts(model)).width
    profile = make_profile(spec.num_layers, spec.num_experts, spec.top_k, width, spec=spec, identity=identity_of(model))
    return folder, model, profile


def _experts(model: Any) -> Any:
    from coterie.models.layers import find_moe_layers

    return find_moe_layers(model)[0].experts


def _logits(model: Any, ids: Any) -> Any:
    import torch

    with torch.inference_mode():
        return model(input_ids=ids, use_cache=False).logits


def _prompts() -> Any:
    import torch

    return torch.randint(3, 260, (2, 16), generator=torch.Generator().manual_seed(7))


def test_a_store_computes_what_the_model_does(family: Any, tmp_path: Path) -> None:
    import torch

    folder, model, profile = family
    expected, found = _logits(model, _prompts()), []
    coterie.pack(folder, tmp_path / "plain")
    coterie.pack(folder, tmp_path / "ordered", profile=profile)
    for store, settings in (
        ("plain", (("100%", "lru", "fifo"), ("20%", "company", "johnson"))),
        ("ordered", (("100%", "lru", "johnson"), ("7%", "reuse", "widest-first"), ("40%", "lfu", "fifo"))),
    ):
        outputs = []
        for budget, policy, schedule in settings:
            offloaded = coterie.offload(tmp_path / store, budget, policy=policy, schedule=schedule, check=True)
            outputs.append(_logits(offloaded, _prompts()))
            assert offloaded.stats().peak_expert_bytes <= offloaded.stats().budget_bytes
            with torch.inference_mode():
                texts = [each.generate(_prompts(), max_new_tokens=4, do_sample=False) for each in (model, offloaded)]
            assert torch.equal(*texts)
            offloaded.close()
        assert all(torch.equal(outputs[0], each) for each in outputs), "the budget or the schedule changed a bit"
        found.append(outputs[0])
    for logits in found:
        assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_narrow_experts_run_as_in_the_resident_model(family: Any, tmp_path: Path) -> None:
    """A width in the middle of the order: biases must have moved with their neurons."""
    from coterie.pruning.width_planning import plan_widths

    folder, model, profile = family
    plan = plan_widths(profile, "uniform", bytes=0.5)
    coterie.pack(folder, tmp_path / "store", profile=profile)
    offloaded = coterie.offload(tmp_path / "store", "50%", plan, check=True)
    with coterie.apply_widths(model, plan):
        expected = _logits(model, _prompts())
    found, whole = _logits(offloaded, _prompts()), _logits(model, _prompts())
    offloaded.close()
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (found - whole).abs().max() > 1e-3 * whole.abs().max(), "widths changed nothing"


def test_all_but_the_experts_weights_is_resident_as_it_was(family: Any, tmp_path: Path) -> None:
    import torch

    folder, model, _ = family
    coterie.pack(folder, tmp_path / "store")
    offloaded = coterie.offload(tmp_path / "store", "20%")
    resident = dict((*model.named_parameters(), *model.named_buffers()))
    held = dict((*offloaded.named_parameters(), *offloaded.named_buffers()))
    for name, tensor in held.items():
        assert tensor.dtype == resident[name].dtype
        assert torch.equal(tensor, resident[name]), name
    absent = resident.keys() - held.keys()
    assert absent
    assert all(name.endswith(("experts.gate_up_proj", "experts.down_proj")) for name in absent)
    offloaded.close()


def test_a_store_in_eight_bits_computes_what_the_rounded_model_does(family: Any, tmp_path: Path) -> None:
    import torch

    from coterie.checkpoint.expert_store import open_store
    from coterie.models.rounding import rounded

    folder, model, profile = family
    coterie.pack(folder, tmp_path / "store", profile=profile, bits=8)
    with rounded(model):
        expected = _logits(model, _prompts())
    full, found = _logits(model, _prompts()), []
    for budget, policy in (("100%", "lru"), ("20%", "company")):
        offloaded = coterie.offload(tmp_path / "store", budget, policy=policy, check=True)
        found.append(_logits(offloaded, _prompts()))
        offloaded.close()
    assert open_store(tmp_path / "store").layout.dtype == "I8"
    assert torch.equal(*found), "the budget changed a bit"
    assert (found[0] - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert not torch.equal(expected, full)
    assert torch.equal(_logits(model, _prompts()), full), "the model was not put back"
