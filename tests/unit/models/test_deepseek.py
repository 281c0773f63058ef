"""DeepSeek-MoE-16B's port computes what its published code computes, from the published tensor names."""

from __future__ import annotations

import json

import numpy as np
import pytest

from coterie.errors import CheckpointError

pytestmark = pytest.mark.needs("transformers")

VOCABULARY, HIDDEN, WIDTH, NARROW, LAYERS, HEADS, KEY_HEADS, EXPERTS, TOP_K, SHARED = 50, 32, 48, 16, 3, 4, 2, 8, 3, 2
PUBLISHED = {
    "architectures": ["DeepseekForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekConfig",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekForCausalLM",
    },
    "aux_loss_alpha": 0.001, "bos_token_id": 1, "eos_token_id": 2, "first_k_dense_replace": 1, "hidden_act": "silu",
    "hidden_size": HIDDEN, "initializer_range": 0.02, "intermediate_size": WIDTH, "max_position_embeddings": 4096,
    "model_type": "deepseek", "moe_intermediate_size": NARROW, "moe_layer_freq": 1, "n_routed_experts": EXPERTS,
    "n_shared_experts": SHARED, "norm_topk_prob": False, "num_attention_heads": HEADS, "num_experts_per_tok": TOP_K,
    "num_hidden_layers": LAYERS, "num_key_value_heads": KEY_HEADS, "pretraining_tp": 1, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 10000, "scoring_func": "softmax", "seq_aux": True,
    "tie_word_embeddings": False, "torch_dtype": "float32", "use_cache": True, "vocab_size": VOCABULARY,
}  # fmt: skip


def published_tensors(seed=0):
    """Random weights under the names of the published checkpoint."""
    rng = np.random.default_rng(seed)

    def random(*shape):
        return rng.normal(0, 0.3, shape).astype(np.float32)

    def ffn(name, width):
        return {
            f"{name}.gate_proj.weight": random(width, HIDDEN),
            f"{name}.up_proj.weight": random(width, HIDDEN),
            f"{name}.down_proj.weight": random(HIDDEN, width),
        }

    tensors = {
        "model.embed_tokens.weight": random(VOCABULARY, HIDDEN),
        "model.norm.weight": 1 + random(HIDDEN),
        "lm_head.weight": random(VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        head = HIDDEN // HEADS
        for name, rows in (("q", HEADS * head), ("k", KEY_HEADS * head), ("v", KEY_HEADS * head), ("o", HIDDEN)):
            tensors[f"{at}.self_attn.{name}_proj.weight"] = random(rows, HIDDEN)
        tensors[f"{at}.input_layernorm.weight"] = 1 + random(HIDDEN)
        tensors[f"{at}.post_attention_layernorm.weight"] = 1 + random(HIDDEN)
        if layer == 0:
            tensors |= ffn(f"{at}.mlp", WIDTH)
            continue
        tensors[f"{at}.mlp.gate.weight"] = random(EXPERTS, HIDDEN)
        tensors |= ffn(f"{at}.mlp.shared_experts", NARROW * SHARED)
        for expert in range(EXPERTS):
            tensors |= ffn(f"{at}.mlp.experts.{expert}", NARROW)
    return tensors


@pytest.fixture
def published(tmp_path):
    """Writes a checkpoint as published, with changes to its config."""
    from safetensors.numpy import save_file

    def write(**changes):
        save_file(published_tensors(), tmp_path / "model.safetensors", {"format": "pt"})
        (tmp_path / "config.json").write_text(json.dumps(PUBLISHED | changes))
        return tmp_path

    return write


# ---- the published computation, plainly, in float64 ------------------------------------------------------------------


def plain_logits(tensors, tokens, *, renormalise=False):
    weights = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    hidden = weights["model.embed_tokens.weight"][tokens]
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        hidden = hidden + attention(weights, f"{at}.self_attn", norm(hidden, weights[f"{at}.input_layernorm.weight"]))
        entering = norm(hidden, weights[f"{at}.post_attention_layernorm.weight"])
        hidden = hidden + np.array([feed_forward(weights, f"{at}.mlp", row, renormalise) for row in entering])
    return norm(hidden, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def norm(x, weight):
    return weight * x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6)


def rotate(x):
    """Rotary positions: element i is paired with element i + half."""
    length, size = x.shape
    angle = np.arange(length)[:, None] * 10000.0 ** (-np.arange(0, size, 2) / size)
    first, second = x[:, : size // 2], x[:, size // 2 :]
    return np.hstack([first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)])


def attention(weights, at, x):
    size, outputs = HIDDEN // HEADS, []
    q, k, v = (x @ weights[f"{at}.{name}_proj.weight"].T for name in "qkv")
    for head in range(HEADS):
        shared = head // (HEADS // KEY_HEADS)
        queries = rotate(q[:, head * size : (head + 1) * size])
        keys = rotate(k[:, shared * size : (shared + 1) * size])
        scores = np.where(np.tri(len(x), dtype=bool), queries @ keys.T / np.sqrt(size), -np.inf)
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        outputs.append(shares / shares.sum(axis=1, keepdims=True) @ v[:, shared * size : (shared + 1) * size])
    return np.hstack(outputs) @ weights[f"{at}.o_proj.weight"].T


def gated(weights, at, x):
    gate = weights[f"{at}.gate_proj.weight"] @ x
    return weights[f"{at}.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * (weights[f"{at}.up_proj.weight"] @ x))


def feed_forward(weights, at, x, renormalise):
    if f"{at}.gate.weight" not in weights:
        return gated(weights, at, x)
    scores = np.exp(weights[f"{at}.gate.weight"] @ x)
    scores /= scores.sum()
    chosen = np.argsort(-scores)[:TOP_K]
    total = scores[chosen].sum() if renormalise else 1
    routed = sum(scores[e] / total * gated(weights, f"{at}.experts.{e}", x) for e in chosen)
    return routed + gated(weights, f"{at}.shared_experts", x)


# ---- tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("renormalise", [False, True])
def test_logits_are_those_of_the_plain_computation(published, renormalise):
    import torch

    from coterie.models.load import load_model

    model = load_model(published(norm_topk_prob=renormalise))
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, 24)
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens)[None]).logits[0].double().numpy()
    expected = plain_logits(published_tensors(), tokens, renormalise=renormalise)
    assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()


def test_generation_with_the_cache_follows_the_plain_logits(published):
    import torch

    from coterie.models.load import load_model

    prompt = [5, 9, 11, 2, 30]
    made = load_model(published()).generate(
        torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=None
    )
    tokens = list(prompt)
    for _ in range(6):
        tokens.append(int(plain_logits(published_tensors(), np.array(tokens))[-1].argmax()))
    assert made[0].tolist() == tokens


def test_saving_writes_the_published_names_again(published, tmp_path_factory):
    from safetensors.numpy import load_file

    from coterie.models.backend import quiet
    from coterie.models.load import load_model

    model, folder = load_model(published()), tmp_path_factory.mktemp("saved")
    with quiet():
        model.save_pretrained(folder)
    saved, original = load_file(folder / "model.safetensors"), published_tensors()
    assert saved.keys() == original.keys()
    assert all((saved[name] == original[name]).all() for name in original)


def test_other_experts_implementations_can_be_set(published):
    import torch

    from coterie.models.load import load_model

    model, tokens = load_model(published()), torch.arange(20)[None]
    outputs = []
    for name in ("eager", "batched_mm", "grouped_mm"):
        model.set_experts_implementation(name)
        outputs.append(model(tokens).logits)
    assert outputs[0].allclose(outputs[1], atol=1e-4)
    assert outputs[0].allclose(outputs[2], atol=1e-4)


def test_dense_layers_lie_where_the_config_says(published):
    from coterie.models.layers import find_moe_layers
    from coterie.models.load import build_skeleton

    skeleton = build_skeleton(published(num_hidden_layers=6, moe_layer_freq=2))
    assert [layer.model_layer for layer in find_moe_layers(skeleton)] == [2, 4]


def test_another_scoring_function_is_refused(published):
    from coterie.models.load import load_model

    with pytest.raises(CheckpointError, match=r"scoring_func = 'sigmoid'.*only softmax and greedy run"):
        load_model(published(scoring_func="sigmoid"))


def test_registering_again_does_no_harm():
    import transformers

    from coterie.models.deepseek import DeepseekConfig, register

    register()
    register()
    assert type(transformers.AutoConfig.for_model("deepseek")) is DeepseekConfig


def test_the_published_sizes_give_the_published_number_of_parameters(published):
    from coterie.models.load import build_skeleton

    skeleton = build_skeleton(
        published(
            hidden_size=2048, intermediate_size=10944, moe_intermediate_size=1408, n_routed_experts=64,
            num_attention_heads=16, num_key_value_heads=16, num_experts_per_tok=6, num_hidden_layers=28,
            vocab_size=102400,
        )
    )  # fmt: skip
    assert skeleton.num_parameters() == 16_375_728_128
