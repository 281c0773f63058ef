"""What is intercepted is what each family's rule decides, and the model is left as it was."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.families import FAMILIES

pytestmark = pytest.mark.needs("transformers")

# ---- the rules, token by token, in float64 ---------------------------------------------------------------------------


def softmax(values):
    shifted = np.exp(values - np.max(values))
    return shifted / shifted.sum()


def largest(values, count):
    return sorted(range(len(values)), key=lambda i: -values[i])[:count]


def within_best_groups(values, config, score):
    """The values, minus infinity outside the `topk_group` groups of the highest score."""
    groups = values.reshape(config.n_group, -1)
    best = largest([score(group) for group in groups], config.topk_group)
    return np.where(np.isin(np.arange(config.n_group), best)[:, None], groups, -np.inf).ravel()


def softmax_top_k(logits, config, router, renormalise):
    weights = softmax(logits)
    ids = largest(weights, config.num_experts_per_tok)
    total = sum(weights[i] for i in ids) if renormalise else 1
    return {i: weights[i] / total for i in ids}


def top_k_softmax(logits, config, router):
    ids = largest(logits, config.num_experts_per_tok)
    return dict(zip(ids, softmax(logits[ids]), strict=True))


def group_limited_softmax(logits, config, router):
    weights = softmax(logits)
    ids = largest(within_best_groups(weights, config, max), config.num_experts_per_tok)
    return {i: weights[i] * config.routed_scaling_factor for i in ids}


def group_limited_sigmoid(logits, config, router):
    weights = 1 / (1 + np.exp(-logits))
    choice = weights + router.e_score_correction_bias.numpy()
    choice = within_best_groups(choice, config, lambda group: sum(sorted(group)[-2:]))
    ids = largest(choice, config.num_experts_per_tok)
    total = sum(weights[i] for i in ids) if config.norm_topk_prob else 1
    return {i: weights[i] / total * config.routed_scaling_factor for i in ids}


def biased_softmax(logits, config, router):
    weights = softmax(logits)
    ids = largest(weights + router.moe_statics.e_score_correction_bias.numpy().ravel(), config.moe_k)
    return {i: weights[i] / sum(weights[j] for j in ids) for i in ids}


def sparse_mixer(logits, config, router):
    """Twice: the best of what is left, weighed against those of what is left that come near it."""
    decided, left = {}, logits.copy()
    for _ in range(2):
        best = int(np.argmax(left))
        distance = (left[best] - logits) / np.maximum(np.abs(logits), left[best])
        near = np.where(distance > 2 * config.router_jitter_noise, -np.inf, left)
        decided[best] = softmax(near)[best]
        left[best] = -np.inf
    return decided


RULES = {
    "mixtral": lambda *args: softmax_top_k(*args, True),
    "qwen2_moe": lambda *args: softmax_top_k(*args, args[1].norm_topk_prob),
    "qwen3_moe": lambda *args: softmax_top_k(*args, args[1].norm_topk_prob),
    "olmoe": lambda *args: softmax_top_k(*args, args[1].norm_topk_prob),
    "deepseek": lambda *args: softmax_top_k(*args, args[1].norm_topk_prob),
    "deepseek_v2": group_limited_softmax,
    "deepseek_v3": group_limited_sigmoid,
    "glm4_moe": group_limited_sigmoid,
    "ernie4_5_moe": biased_softmax,
    "phimoe": sparse_mixer,
    "granitemoe": top_k_softmax,
    "gpt_oss": top_k_softmax,
}


def decided_by_rule(family, config, router, hidden):
    """{expert: weight} of one token, from its hidden state and the router's parameters."""
    logits = router.weight.double().numpy() @ hidden
    if getattr(router, "bias", None) is not None:
        logits = logits + router.bias.double().numpy()
    return RULES[family](logits, config, router)


# ---- tests -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded(tiny_checkpoint):
    """Loads each family's tiny model once."""
    from coterie.models.load import load_model

    models = {}

    def load(family):
        if family not in models:
            models[family] = load_model(tiny_checkpoint(family)).requires_grad_(False)
        return models[family]

    return load


def tokens(rows=2, columns=12, seed=0):
    import torch

    return torch.from_numpy(np.random.default_rng(seed).integers(3, 260, (rows, columns)))


@pytest.mark.parametrize("family", FAMILIES)
def test_decisions_are_those_of_the_family_s_rule(loaded, family):
    from coterie.models.intercept import intercept
    from coterie.models.layers import find_moe_layers

    model, seen, entered = loaded(family), [], []
    layers = find_moe_layers(model)
    handles = [each.block.register_forward_pre_hook(lambda _, args: entered.append(args[0])) for each in layers]
    with intercept(model, lambda *decision: seen.append(decision)):
        model(tokens())
    for handle in handles:
        handle.remove()

    assert [layer for layer, *_ in seen] == list(range(len(layers)))
    chosen = set()
    for layer, (_, hidden, ids, weights), block_input in zip(layers, seen, entered, strict=True):
        flat = block_input.reshape(-1, block_input.shape[-1])
        assert (hidden == flat).all()
        assert ids.shape == weights.shape == (24, layer.top_k)
        for row, token in enumerate(flat.double().numpy()):
            expected = decided_by_rule(family, model.config, layer.router, token)
            got = dict(zip(ids[row].tolist(), weights[row].tolist(), strict=True))
            assert got == pytest.approx(expected, abs=1e-5)
        chosen |= set(ids.flatten().tolist())
    assert chosen == set(range(8))  # a router that always chooses the same proves nothing


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_generation_is_seen_step_by_step_in_batches_with_padding(loaded, family):
    import torch

    from coterie.models.intercept import intercept

    model, rows = loaded(family), []
    mask = torch.ones(4, 6, dtype=torch.long)
    mask[0, :3] = mask[2, :1] = 0
    with intercept(model, lambda layer, hidden, *_: rows.append((layer, len(hidden)))) as layers:
        model.generate(
            tokens(4, 6), attention_mask=mask, max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0
        )
    one_pass = range(len(layers))
    assert rows == [(layer, count) for count in (4 * 6, 4, 4) for layer in one_pass]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_decision_put_back_changes_nothing(loaded, family):
    from coterie.models.intercept import intercept

    model = loaded(family)
    before = model(tokens()).logits
    with intercept(model, lambda layer, hidden, ids, weights: (ids, weights)):
        assert (model(tokens()).logits == before).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_what_decide_returns_is_what_is_computed(loaded, family):
    """Experts that are weighted with zero leave the shared experts, or nothing, in their layer."""
    from coterie.models.intercept import intercept
    from coterie.models.layers import find_moe_layers

    model, summed = loaded(family), []
    before = model(tokens()).logits
    handles = [
        layer.experts.register_forward_hook(lambda _, __, output: summed.append(output.abs().sum().item()))
        for layer in find_moe_layers(model)
    ]
    with intercept(model, lambda layer, hidden, ids, weights: (ids, weights * 0)):
        without = model(tokens()).logits
    for handle in handles:
        handle.remove()
    assert not any(summed)
    assert not without.allclose(before, atol=1e-3)
    assert (model(tokens()).logits == before).all()


def test_the_inner_of_two_sees_what_the_outer_decided(loaded):
    from coterie.models.intercept import intercept

    model, outer, inner = loaded("mixtral"), [], []

    def swap(layer, hidden, ids, weights):
        outer.append(ids)
        return ids.flip(1), weights.flip(1)

    with intercept(model, swap), intercept(model, lambda layer, hidden, ids, weights: inner.append(ids)):
        model(tokens())
    assert all((one.flip(1) == other).all() for one, other in zip(outer, inner, strict=True))


def test_nothing_is_left_behind_after_an_error(loaded):
    from coterie.models.intercept import intercept

    model = loaded("olmoe")
    before = model(tokens()).logits

    def fail(*decision):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"), intercept(model, fail):
        model(tokens())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert (model(tokens()).logits == before).all()


def test_a_decision_of_the_wrong_shape_is_caught(loaded):
    from coterie.models.intercept import intercept

    with pytest.raises(AssertionError), intercept(loaded("olmoe"), lambda layer, hidden, ids, w: (ids[:-1], w[:-1])):
        loaded("olmoe")(tokens())
