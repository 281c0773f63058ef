"""Learning what neurons are worth: gradients, budgets, what it improves, interruptions, and what it refuses."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import coterie
from coterie.errors import CheckpointError, ConfigError
from coterie.profile.profile_file import digest_of, load_profile, save_profile
from coterie.pruning.importance_order import neuron_order
from coterie.pruning.width_planning import plan_widths

pytestmark = [pytest.mark.needs("torch"), pytest.mark.needs("transformers")]

RUN: dict[str, Any] = {"tokens": 640, "window": 32, "steps": 40, "bytes": 0.5, "seed": 1}


@pytest.fixture(scope="module")
def qwen(load: Any) -> Any:
    """A model of top-3 with its tokenizer."""
    return load("qwen3_moe")


@pytest.fixture(scope="module")
def profile(qwen: Any, text: Any, profiled: Any) -> Any:
    return profiled(*qwen, text(700), tokens=640, window=32)


@pytest.fixture(scope="module")
def learnt(qwen: Any, text: Any, profile: Any) -> Any:
    return coterie.learn_values(*qwen, text(700), profile, **RUN)


class Stop(Exception):
    """Stands for the machine going away."""


def test_it_improves_on_text_put_aside_and_on_other_text(qwen, text, profile, learnt):
    told = learnt.provenance["learnt"]
    assert told["kl_after"] == min(kl for _, kl in told["tried"])
    assert told["kl_after"] < 0.9 * told["kl_before"]
    assert (told["tokens_learnt"], told["tokens_aside"], told["steps"]) == (512, 128, 40)
    kl = {variant: _kl(qwen, learnt, text(300, seed=5), variant) for variant in ("learnt", "first_order_rms_down")}
    assert kl["learnt"] < kl["first_order_rms_down"]
    assert digest_of(replace(learnt, importance=profile.importance)) == digest_of(profile)


def _kl(qwen: Any, profile: Any, text: str, variant: str) -> float:
    """Mean KL of a plan with half of the bytes, run as any plan is."""
    import torch

    model, tokenizer = qwen
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        expected = model(ids).logits.log_softmax(-1)
        with coterie.apply_widths(model, plan_widths(profile, bytes=0.5, variant=variant)):
            found = model(ids).logits.log_softmax(-1)
    return float((expected.exp() * (expected - found)).sum(-1).mean())


def test_plans_take_what_was_learnt_and_meet_their_budget(learnt, tmp_path):
    order = neuron_order(learnt)
    assert (order.variant, order.layers) == ("learnt", "learnt")
    for share in (0.3, 0.5, 0.8):
        plan = plan_widths(learnt, bytes=share)
        assert share - 0.02 < plan.settings["expected_bytes"] <= share
        assert (np.diff(plan.tables["value_LES"], axis=2) <= 0).all()
        assert plan.settings["profile"]["learnt"]["seed"] == RUN["seed"]
    save_profile(learnt, tmp_path / "p.safetensors")
    again = load_profile(tmp_path / "p.safetensors")
    assert digest_of(again) == digest_of(learnt)
    assert again.provenance == learnt.provenance
    with pytest.raises(ConfigError, match="leave layers out"):
        plan_widths(learnt, bytes=0.5, layers="loss")


def test_the_same_seed_gives_the_same_and_the_model_stays(qwen, text, profile, learnt):
    model, tokenizer = qwen
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    wanting = [parameter.requires_grad for parameter in model.parameters()]
    again = coterie.learn_values(model, tokenizer, text(700), learnt, **RUN)  # begins where the profile did
    assert digest_of(again) == digest_of(learnt)
    assert all((tensor == before[name]).all() for name, tensor in model.state_dict().items())
    assert [parameter.requires_grad for parameter in model.parameters()] == wanting
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any("forward" in vars(module) for module in model.modules())
    short = [coterie.learn_values(model, tokenizer, text(700), profile, **{**RUN, "steps": 2, "seed": seed})
             for seed in (1, 2)]  # fmt: skip
    assert digest_of(short[0]) != digest_of(short[1])


def test_an_interrupted_run_goes_on_to_the_same_result(qwen, text, profile, learnt, tmp_path):
    state, seen = tmp_path / "p.partial", []

    def stopping(what: str, done: int, total: int) -> None:
        if done == 22:
            raise Stop

    with pytest.raises(Stop):
        coterie.learn_values(*qwen, text(700), profile, **RUN, resume_from=state, progress=stopping)
    again = coterie.learn_values(
        *qwen, text(700), profile, **RUN, resume_from=state, progress=lambda _, done, total: seen.append(done)
    )
    assert seen[0] == 21
    assert digest_of(again) == digest_of(learnt)
    assert again.provenance == learnt.provenance
    for other in ({"seed": 2}, {"bytes": 0.6}, {"steps": 41}, {"window": 40}):
        with pytest.raises(ConfigError, match=rf"of another run .* delete {state}"):
            coterie.learn_values(*qwen, text(700), profile, **{**RUN, **other}, resume_from=state)
    state.write_bytes(state.read_bytes()[:-50])
    with pytest.raises(ConfigError, match="cannot go on from"):
        coterie.learn_values(*qwen, text(700), profile, **RUN, resume_from=state)


def test_an_update_leaves_out_what_was_learnt_and_says_so(qwen, text, learnt):
    with pytest.warns(UserWarning, match="learn it again"):
        updated = coterie.profile_model(*qwen, text(200, seed=3), tokens=160, window=32, update=learnt)
    assert "learnt" not in updated.importance


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_gradients_are_those_of_the_soft_mask(family, hard, load):
    """Central differences of the whole model's loss by the last layer's neurons, after which nothing is routed."""
    import torch

    from coterie.calibration.collector import frozen
    from coterie.calibration.masked_experts import Masks, masking
    from coterie.models.layers import find_moe_layers

    model = load(family)[0].double()
    width = model.model.layers[-1].mlp.experts.down_proj.shape[1 if family == "gpt_oss" else 2]
    shape = (len(find_moe_layers(model)), 8, width)
    rng = np.random.default_rng(0)
    masks = Masks(torch.tensor(rng.normal(0, 1, shape)), -1.0, 0.4, hard)
    ids = torch.tensor(rng.integers(3, 260, (1, 24)))

    def loss() -> Any:
        with masking(model, masks):
            return model(input_ids=ids, use_cache=False).logits.log_softmax(-1)[..., 7].mean()

    masks.log_value_LEI.requires_grad_(True)
    with frozen(model):
        loss().backward()
    gradient = masks.log_value_LEI.grad
    assert gradient.isfinite().all()
    assert (gradient != 0).any()
    if hard:
        return
    size = gradient.abs().numpy()
    size[:-1] = 0
    for at in map(tuple, np.argwhere(size > size.max() / 3)[:6]):
        found = []
        for sign in (1, -1):
            with torch.no_grad():
                masks.log_value_LEI[at] += sign * 1e-2
                found.append(float(loss()))
                masks.log_value_LEI[at] -= sign * 1e-2
        assert (found[0] - found[1]) / 2e-2 == pytest.approx(float(gradient[at]), rel=0.02)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_hard_masks_run_what_a_plan_of_the_same_threshold_runs(family, load, text, profiled):
    import torch

    from coterie.calibration.masked_experts import Masks, masking

    model, tokenizer = load(family)
    profile = profiled(model, tokenizer, text(400), tokens=320, window=32)
    values = {"learnt": np.random.default_rng(0).lognormal(0, 1, (*profile.load_LE.shape, profile.width))}
    profile = replace(profile, importance={"learnt": values["learnt"].astype(np.float32)})
    plan = plan_widths(profile, threshold=0.3, step=1)
    masks = Masks(torch.tensor(profile.importance["learnt"]).log(), float(np.log(0.3)), 0.25)
    ids = torch.tensor([tokenizer(text(60, seed=2), add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        with masking(model, masks):
            masked = model(ids).logits
        with coterie.apply_widths(model, plan):
            narrow = model(ids).logits
        assert (narrow - model(ids).logits).abs().max() > 1e-2
    torch.testing.assert_close(masked, narrow, rtol=1e-3, atol=1e-3)


def test_what_cannot_be_is_refused(qwen, text, profile, load):
    model, tokenizer = qwen
    for wrong, words in (
        ({"tokens": 20}, "too few to learn"),
        ({"bytes": 1.0}, "byte share of 1"),
        ({"steps": 0}, "0 steps"),
        ({"tokens": 64, "window": 32}, "2 windows of 32 tokens; learning needs 5"),
        ({"tokens": 6400}, "text 'text' has"),
    ):
        with pytest.raises(ConfigError, match=words):
            coterie.learn_values(model, tokenizer, text(700), profile, **{**RUN, **wrong})
    with pytest.raises(ConfigError, match="profile this model"):
        coterie.learn_values(model, tokenizer, text(700), replace(profile, identity="another"), **RUN)
    moved = replace(profile, provenance={**profile.provenance, "neuron_order": "0123"})
    with pytest.raises(ConfigError, match="use the model that was profiled"):
        coterie.learn_values(model, tokenizer, text(700), moved, **RUN)
    with pytest.raises(ConfigError, match="training"):
        coterie.learn_values(copy.deepcopy(model).train(), tokenizer, text(700), profile, **RUN)
    spoiled = copy.deepcopy(model)
    spoiled.model.layers[1].mlp.experts.down_proj.data[0] = float("nan")
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        coterie.learn_values(spoiled, tokenizer, text(700), profile, **RUN)
