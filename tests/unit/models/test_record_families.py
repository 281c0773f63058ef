"""What is recorded of every family: the rule's own choice, and the same with and without padding, cache and company."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import coterie
from coterie.families import FAMILIES
from coterie.models.layers import find_moe_layers
from coterie.models.load import load_model

pytestmark = [pytest.mark.needs("torch"), pytest.mark.needs("transformers")]
LENGTHS = (7, 3, 5, 1)
NEW_TOKENS = 5


@pytest.fixture(scope="module", params=list(FAMILIES))
def model(request, tiny_checkpoint) -> Any:
    return load_model(tiny_checkpoint(request.param))


def prompts(lengths=LENGTHS) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(3, 260, length).tolist() for length in lengths]


def padded(rows: list[list[int]], side: str) -> dict[str, Any]:
    import torch

    width = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for index, row in enumerate(rows):
        where = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[index, where], mask[index, where] = torch.tensor(row), 1
    return {"input_ids": ids, "attention_mask": mask}


def decisions_alone(model, row: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Ids and weights, [L, T, K] each, of one sequence run by itself, seen by hooks of this test's own."""
    import torch

    seen: list[tuple[np.ndarray, np.ndarray]] = []

    def see(module, args):
        seen.append((args[1].numpy().copy(), args[2].numpy().copy()))

    handles = [layer.experts.register_forward_pre_hook(see) for layer in find_moe_layers(model)]
    with torch.no_grad():
        model(input_ids=torch.tensor([row]), use_cache=False)
    for handle in handles:
        handle.remove()
    return np.stack([ids for ids, _ in seen]), np.stack([weights for _, weights in seen])


def dense(ids: np.ndarray, weights: np.ndarray, num_experts: int = 8) -> np.ndarray:
    """[..., K] ids and weights as [..., E] weights, -1 where not chosen: the order of the slots is no matter."""
    table = np.full((*ids.shape[:-1], num_experts), -1.0)
    np.put_along_axis(table, ids.astype(np.int64), weights.astype(np.float64), axis=-1)
    return table


def assert_is(trace, sequence: int, model, row: list[int]) -> None:
    mine = np.flatnonzero(trace.sequence_ids == sequence)
    np.testing.assert_array_equal(trace.positions[mine], np.arange(len(row)))
    ids, weights = decisions_alone(model, row)
    recorded = dense(trace.expert_ids[:, mine], trace.weights[:, mine])
    np.testing.assert_allclose(recorded, dense(ids, weights), atol=2e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batch_is_each_sequence_alone(model, side):
    import torch

    rows = prompts()
    with torch.no_grad(), coterie.record(model) as recorder:
        model(**padded(rows, side))
        model(input_ids=torch.tensor([rows[0]]))
    trace = recorder.trace()
    assert trace.num_tokens == sum(LENGTHS) + LENGTHS[0]
    assert trace.spec.num_layers == len(find_moe_layers(model))
    for sequence, row in enumerate([*rows, rows[0]]):
        assert_is(trace, sequence, model, row)
    assert not np.any(trace.phase)
    np.testing.assert_array_equal(trace.step, [0] * sum(LENGTHS) + [1] * LENGTHS[0])
    assert trace.provenance["dropped"] == {"padding": 4 * max(LENGTHS) - sum(LENGTHS), "finished": 0}


@pytest.mark.parametrize("batch", [1, 4])
def test_generation_is_the_prefill_of_what_it_wrote(model, batch):
    import torch

    rows = prompts(LENGTHS[:batch])
    with torch.no_grad(), coterie.record(model) as recorder:
        out = model.generate(
            **padded(rows, "left"), max_new_tokens=NEW_TOKENS, do_sample=False, suppress_tokens=[0, 1, 2]
        )
    trace = recorder.trace()
    assert trace.num_tokens == sum(map(len, rows)) + batch * (NEW_TOKENS - 1)  # the last token is not run
    for sequence, row in enumerate(rows):
        assert_is(trace, sequence, model, row + out[sequence, -NEW_TOKENS:-1].tolist())
        mine = trace.sequence_ids == sequence
        assert trace.phase[mine].tolist() == [0] * len(row) + [1] * (NEW_TOKENS - 1)
        assert trace.step[mine].tolist() == [0] * len(row) + list(range(1, NEW_TOKENS))


def test_decisions_are_the_familys_rule(model):
    import torch

    inputs: list[np.ndarray] = []
    layers = find_moe_layers(model)
    handles = [
        layer.experts.register_forward_pre_hook(lambda module, args: inputs.append(args[0].double().numpy()))
        for layer in layers
    ]
    with torch.no_grad(), coterie.record(model) as recorder:
        model(input_ids=torch.tensor(prompts((60,))))
    for handle in handles:
        handle.remove()
    trace = recorder.trace()
    for layer in layers:
        expected = chosen_by_rule(model.config, layer, inputs[layer.index])
        recorded = dense(trace.expert_ids[layer.index], trace.weights[layer.index])
        np.testing.assert_allclose(recorded, expected, atol=2e-5)


# ---- the families' rules, restated one token at a time from the published descriptions ------------------------------


def chosen_by_rule(config, layer, hidden_TH: np.ndarray) -> np.ndarray:
    """[T, E] float64 routing weights, -1 where not chosen."""
    parameters = {
        name: tensor.detach().double().numpy()
        for name, tensor in (*layer.router.named_parameters(), *layer.router.named_buffers())
    }
    rule = RULES[config.model_type]
    table = np.full((len(hidden_TH), layer.num_experts), -1.0)
    for token, hidden in enumerate(hidden_TH):
        logits = parameters["weight"] @ hidden + parameters.get("bias", 0)
        bias = next((value for name, value in parameters.items() if "correction_bias" in name), np.zeros(1)).ravel()
        for expert, weight in rule(logits, bias, config, layer.top_k).items():
            table[token, expert] = weight
    return table


def softmax(values: np.ndarray) -> np.ndarray:
    powers = np.exp(values - values.max())
    return powers / powers.sum()


def best(scores: np.ndarray, count: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda index: -scores[index])[:count]


def normalised(weights: dict[int, float], scale: float = 1.0) -> dict[int, float]:
    total = sum(weights.values())
    return {expert: scale * weight / total for expert, weight in weights.items()}


def softmax_then_top(logits, bias, config, top_k):
    scores = softmax(logits)
    weights = {expert: scores[expert] for expert in best(scores, top_k)}
    return normalised(weights) if getattr(config, "norm_topk_prob", True) else weights


def top_then_softmax(logits, bias, config, top_k):
    experts = best(logits, top_k)
    return dict(zip(experts, softmax(logits[experts]), strict=True))


def within_groups(scores, config, score_of_group):
    """The experts of the best groups, by the sum or the maximum of each group's scores."""
    groups = np.arange(len(scores)).reshape(config.n_group, -1)
    chosen = best(np.array([score_of_group(scores[group]) for group in groups]), config.topk_group)
    return [expert for group in chosen for expert in groups[group]]


def greedy(logits, bias, config, top_k):
    scores = softmax(logits)
    return {expert: scores[expert] for expert in best(scores, top_k)}


def grouped_softmax(logits, bias, config, top_k):
    scores = softmax(logits)
    allowed = within_groups(scores, config, max)
    experts = [expert for expert in best(scores, len(scores)) if expert in allowed][:top_k]
    return {expert: config.routed_scaling_factor * scores[expert] for expert in experts}


def grouped_sigmoid(logits, bias, config, top_k):
    scores = 1 / (1 + np.exp(-logits))
    choice = scores + bias
    allowed = within_groups(choice, config, lambda group: sum(sorted(group)[-2:]))
    experts = [expert for expert in best(choice, len(choice)) if expert in allowed][:top_k]
    return normalised({expert: scores[expert] for expert in experts}, config.routed_scaling_factor)


def biased_softmax(logits, bias, config, top_k):
    scores = softmax(logits)
    return normalised({expert: scores[expert] for expert in best(scores + bias, top_k)})


def sparsemixer(logits, bias, config, top_k):
    """Each expert's weight is its softmax among those near enough to it that are not chosen yet."""
    weights: dict[int, float] = {}
    for _ in range(top_k):
        open_ = [expert for expert in range(len(logits)) if expert not in weights]
        first = max(open_, key=lambda expert: logits[expert])
        gap = 2 * config.router_jitter_noise
        near = [e for e in open_ if (logits[first] - logits[e]) / max(abs(logits[e]), logits[first]) <= gap]
        weights[first] = float(np.exp(logits[first]) / np.exp(logits[near]).sum())
    return weights


RULES = {
    "mixtral": softmax_then_top, "qwen2_moe": softmax_then_top, "qwen3_moe": softmax_then_top,
    "olmoe": softmax_then_top, "deepseek": greedy, "deepseek_v2": grouped_softmax, "deepseek_v3": grouped_sigmoid,
    "glm4_moe": grouped_sigmoid, "ernie4_5_moe": biased_softmax, "phimoe": sparsemixer,
    "granitemoe": top_then_softmax, "gpt_oss": top_then_softmax,
}  # fmt: skip
