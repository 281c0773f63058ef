"""Families that are not known are recognised by what their experts take."""

from __future__ import annotations

import pytest

from coterie.errors import CheckpointError

pytestmark = pytest.mark.needs("transformers")

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}


def build(family, **config):
    import torch
    import transformers

    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(family, **SIZES, **config)
        )


def test_an_unknown_family_with_dense_layers_in_between():
    from coterie.models.layers import find_moe_layers, spec_of

    model = build(
        "jamba", intermediate_size=48, num_hidden_layers=6, num_experts=4, num_experts_per_tok=2,
        expert_layer_period=2, expert_layer_offset=1, attn_layer_period=3, attn_layer_offset=1, use_mamba_kernels=False,
    )  # fmt: skip
    assert [layer.model_layer for layer in find_moe_layers(model)] == [1, 3, 5]
    spec = spec_of(model)
    assert (spec.num_layers, spec.num_experts, spec.top_k, spec.num_model_layers) == (3, 4, 2, 6)
    assert spec.layer_ids == (1, 3, 5)


def test_an_unknown_family_with_groups():
    from coterie.models.layers import find_moe_layers, spec_of

    model = build(
        "solar_open", intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2, n_routed_experts=8,
        num_experts_per_tok=3, n_group=4, topk_group=2, first_k_dense_replace=1, head_dim=8,
    )  # fmt: skip
    spec = spec_of(model)
    assert (spec.num_groups, spec.topk_groups, spec.top_k) == (4, 2, 3)
    assert len(find_moe_layers(model)) == spec.num_layers


def test_a_config_that_does_not_describe_the_model_is_refused():
    from coterie.models.layers import find_moe_layers

    model = build("qwen3_moe", intermediate_size=48, num_hidden_layers=3, num_experts=4, num_experts_per_tok=2)
    model.config.mlp_only_layers = [1]
    with pytest.raises(CheckpointError, match=r"makes layers \[0, 2\] MoE, .* has \[0, 1, 2\]"):
        find_moe_layers(model)


def test_a_dense_model_has_none():
    from coterie.models.layers import find_moe_layers

    with pytest.raises(CheckpointError, match="no MoE layers"):
        find_moe_layers(build("llama", intermediate_size=48, num_hidden_layers=2))
