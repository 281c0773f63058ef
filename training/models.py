"""The models that are trained: two MoEs and, to compare with, a dense model of the same active size for each."""

from __future__ import annotations

from typing import Any

SEQUENCE = 256
MOE_NAMES = ("tiny-mixtral", "tiny-qwen3-moe")
NAMES = (*MOE_NAMES, *(f"{name}-dense" for name in MOE_NAMES))
BOS, EOS, PAD = "<|begin|>", "<|end|>", "<|pad|>"

# FFN width of a dense model = experts per token x expert width of its MoE
MIXTRAL = {
    "hidden_size": 192,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
MIXTRAL_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 384}
QWEN3 = {
    "hidden_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
QWEN3_EXPERTS = {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 64, "norm_topk_prob": True}


def build(name: str, vocab_size: int, special_ids: dict[str, int]) -> Any:
    """A freshly initialised model (float32) of Transformers' own class.

    Args:
        name: one of `NAMES`.
        vocab_size: tokens of the tokenizer.
        special_ids: `bos_token_id`, `eos_token_id`, `pad_token_id`.
    """
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        MixtralConfig,
        MixtralForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    common = {
        "vocab_size": vocab_size,
        "tie_word_embeddings": True,
        "max_position_embeddings": 4 * SEQUENCE,
        "initializer_range": 0.04,
        **special_ids,
    }
    if name == "tiny-mixtral":
        return MixtralForCausalLM(MixtralConfig(**common, **MIXTRAL, **MIXTRAL_EXPERTS))
    if name == "tiny-mixtral-dense":
        width = MIXTRAL_EXPERTS["num_experts_per_tok"] * MIXTRAL_EXPERTS["intermediate_size"]
        return LlamaForCausalLM(LlamaConfig(**common, **MIXTRAL, intermediate_size=width))
    if name == "tiny-qwen3-moe":
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **QWEN3, **QWEN3_EXPERTS))
    if name == "tiny-qwen3-moe-dense":
        width = QWEN3_EXPERTS["num_experts_per_tok"] * QWEN3_EXPERTS["moe_intermediate_size"]
        return Qwen3ForCausalLM(Qwen3Config(**common, **QWEN3, intermediate_size=width))
    raise ValueError(f"unknown model {name!r}; known: {', '.join(NAMES)}")
