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


def made_of(blocks):
    """A model of an unknown family whose layer i is blocks[i]."""
    from types import SimpleNamespace

    from torch import nn

    config = {"model_type": "novel", "num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": len(blocks)}
    model = nn.Module()
    model.layers = nn.ModuleList(blocks)
    model.config = SimpleNamespace(model_type="novel", name_or_path="", to_dict=lambda: config)
    return model


def block_of(router="gate", experts=("experts",), order=("hidden", "top_k_index", "top_k_weights")):
    from torch import nn

    namespace = {}
    exec(f"def forward(self, {', '.join(order)}): return {order[0]}", namespace)  # a signature of our choice
    block = nn.Module()
    block.add_module(router, nn.Linear(2, 4))
    for name in experts:
        module = type("Experts", (nn.Module,), {"forward": namespace["forward"], "num_experts": 4})()
        block.add_module(name, module)
    return block


def test_a_novel_family_needs_experts_that_take_ids_and_weights_beside_a_router():
    from coterie.models.layers import find_moe_layers

    novel = made_of([block_of(order=("hidden",)), block_of("router"), block_of()])
    found = find_moe_layers(novel)
    assert [(layer.index, layer.model_layer, layer.top_k) for layer in found] == [(0, 1, 2), (1, 2, 2)]
    assert found[0].router is novel.layers[1].router


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"router": "chooser"}, "the router beside layers.0.experts is named neither gate nor router"),
        ({"experts": ("experts", "more")}, "layers.0.more is the second experts module in a layer 0"),
        ({"order": ("hidden", "top_k_weights", "top_k_index")}, "unsupported model_type 'novel'"),
        ({"order": ("hidden", "cache", "mask")}, "unsupported model_type 'novel'"),
    ],
)
def test_a_novel_family_that_is_not_understood_is_refused_by_name(block, message):
    from coterie.models.layers import find_moe_layers

    with pytest.raises(CheckpointError, match=message) as caught:
        find_moe_layers(made_of([block_of(**block)]))
    assert "'novel'" in str(caught.value)
