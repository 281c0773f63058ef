"""Specs from config.json: the published models' layouts, and every way a config can be wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from coterie.errors import CheckpointError
from coterie.families import FAMILIES, load_spec, spec_from_config

# The keys that matter, as the published config.json of each model has them.
CONFIGS: dict[str, dict[str, Any]] = {
    "Mixtral-8x7B": {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_experts_per_tok": 2, "num_local_experts": 8,
    },
    "Qwen1.5-MoE-A2.7B": {
        "model_type": "qwen2_moe", "hidden_size": 2048, "num_hidden_layers": 24, "decoder_sparse_step": 1,
        "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_experts": 60,
        "num_experts_per_tok": 4, "max_window_layers": 21,
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    },
    "deepseek-moe-16b-base": {
        "model_type": "deepseek", "hidden_size": 2048, "num_hidden_layers": 28, "first_k_dense_replace": 1,
        "moe_layer_freq": 1, "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2,
        "num_experts_per_tok": 6,
    },
    "DeepSeek-V2-Lite": {
        "model_type": "deepseek_v2", "hidden_size": 2048, "num_hidden_layers": 27, "first_k_dense_replace": 1,
        "moe_layer_freq": 1, "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2,
        "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
    },
    "DeepSeek-V2": {
        "model_type": "deepseek_v2", "hidden_size": 5120, "num_hidden_layers": 60, "first_k_dense_replace": 1,
        "moe_layer_freq": 1, "moe_intermediate_size": 1536, "n_routed_experts": 160, "n_shared_experts": 2,
        "num_experts_per_tok": 6, "n_group": 8, "topk_group": 3, "topk_method": "group_limited_greedy",
    },
    "DeepSeek-V3": {
        "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "first_k_dense_replace": 3,
        "moe_layer_freq": 1, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 1,
    },
    "GLM-4.5-Air": {
        "model_type": "glm4_moe", "hidden_size": 4096, "num_hidden_layers": 46, "first_k_dense_replace": 1,
        "moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "n_group": 1, "topk_group": 1,
    },
    "OLMoE-1B-7B-0924": {
        "model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16,
        "num_experts": 64, "num_experts_per_tok": 8,
    },
    "ERNIE-4.5-21B-A3B": {
        "model_type": "ernie4_5_moe", "hidden_size": 2560, "num_hidden_layers": 28, "moe_num_experts": 64,
        "moe_k": 6, "moe_intermediate_size": 1536, "moe_num_shared_experts": 2, "moe_layer_start_index": 1,
        "moe_layer_end_index": 27, "moe_layer_interval": 1,
    },
    "Phi-3.5-MoE-instruct": {
        "model_type": "phimoe", "hidden_size": 4096, "intermediate_size": 6400, "num_hidden_layers": 32,
        "num_experts_per_tok": 2, "num_local_experts": 16,
    },
    "granite-3.0-1b-a400m": {
        "model_type": "granitemoe", "hidden_size": 1024, "intermediate_size": 512, "num_hidden_layers": 24,
        "num_experts_per_tok": 8, "num_local_experts": 32,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
        "num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
    },
}  # fmt: skip
# MoE layers, experts, top-k, groups, groups chosen, first MoE layer
SHAPES = {
    "Mixtral-8x7B": (32, 8, 2, 1, 1, 0),
    "Qwen1.5-MoE-A2.7B": (24, 60, 4, 1, 1, 0),
    "Qwen3-30B-A3B": (48, 128, 8, 1, 1, 0),
    "deepseek-moe-16b-base": (27, 64, 6, 1, 1, 1),
    "DeepSeek-V2-Lite": (26, 64, 6, 1, 1, 1),
    "DeepSeek-V2": (59, 160, 6, 8, 3, 1),
    "DeepSeek-V3": (58, 256, 8, 8, 4, 3),
    "GLM-4.5-Air": (45, 128, 8, 1, 1, 1),
    "OLMoE-1B-7B-0924": (16, 64, 8, 1, 1, 0),
    "ERNIE-4.5-21B-A3B": (27, 64, 6, 1, 1, 1),
    "Phi-3.5-MoE-instruct": (32, 16, 2, 1, 1, 0),
    "granite-3.0-1b-a400m": (24, 32, 8, 1, 1, 0),
    "gpt-oss-20b": (24, 32, 4, 1, 1, 0),
}


def _config(name: str, **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in {**CONFIGS[name], **changes}.items() if value != "absent"}


def _layers(name: str, **changes: Any) -> tuple[int, ...]:
    return spec_from_config(_config(name, **changes), name).layer_ids


@pytest.mark.parametrize("name", CONFIGS)
def test_published_models(name: str) -> None:
    spec = spec_from_config(CONFIGS[name], name)
    shape = (spec.num_layers, spec.num_experts, spec.top_k, spec.num_groups, spec.topk_groups, spec.layer_ids[0])
    assert shape == SHAPES[name]
    assert spec.num_model_layers == CONFIGS[name]["num_hidden_layers"]
    assert spec.layer_ids == tuple(range(spec.layer_ids[0], spec.num_model_layers))
    assert (spec.model, spec.hidden_size) == (name, CONFIGS[name]["hidden_size"])


@pytest.mark.parametrize("name", CONFIGS)
def test_every_descriptor_names_keys_that_the_published_config_has(name: str) -> None:
    config = CONFIGS[name]
    family = FAMILIES[config["model_type"]]
    assert {family.experts, family.top_k, family.intermediate} <= config.keys()
    assert family.shared is None or family.shared in config


def test_every_family_has_a_published_config_here() -> None:
    assert {config["model_type"] for config in CONFIGS.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", CONFIGS)
def test_an_unknown_model_type_with_common_keys_is_read_alike(name: str) -> None:
    known = spec_from_config(CONFIGS[name], name)
    assert spec_from_config(_config(name, model_type="brand_new"), name) == known
    assert spec_from_config(_config(name, model_type="absent"), name) == known


@pytest.mark.parametrize("wrapper", ["text_config", "language_config", "llm_config"])
def test_multimodal_wrappers_are_looked_into(wrapper: str) -> None:
    inner = _config("Qwen3-30B-A3B", model_type="qwen3_vl_moe_text")
    outer = {"model_type": "qwen3_vl_moe", wrapper: inner, "vision_config": {"hidden_size": 1152}}
    assert spec_from_config(outer, "vl").layer_ids == tuple(range(48))


def test_dense_layers() -> None:
    assert _layers("Qwen3-30B-A3B", num_hidden_layers=6, mlp_only_layers=[0, 3]) == (1, 2, 4, 5)
    assert _layers("Qwen3-30B-A3B", num_hidden_layers=6, decoder_sparse_step=2) == (1, 3, 5)
    assert _layers("DeepSeek-V2-Lite", num_hidden_layers=8, first_k_dense_replace=3, moe_layer_freq=2) == (4, 6)
    assert _layers("DeepSeek-V2-Lite", num_hidden_layers=4, moe_layer_freq=[1, 0, 1, 1]) == (2, 3)
    ernie = {"num_hidden_layers": 8, "moe_layer_start_index": 2, "moe_layer_interval": 2}
    assert _layers("ERNIE-4.5-21B-A3B", **ernie, moe_layer_end_index=6) == (3, 5)
    assert _layers("ERNIE-4.5-21B-A3B", **ernie, moe_layer_end_index=-1) == (3, 5, 7)


def test_a_list_of_layer_kinds_decides_and_must_agree() -> None:
    kinds = ["dense", "sparse", "sparse"]
    small = {"num_hidden_layers": 3, "mlp_layer_types": kinds}
    assert _layers("GLM-4.5-Air", **small) == (1, 2)
    assert _layers("GLM-4.5-Air", **small, first_k_dense_replace="absent") == (1, 2)
    assert _layers("Mixtral-8x7B", **small) == (1, 2)
    with pytest.raises(CheckpointError, match="mlp_layer_types and first_k_dense_replace disagree"):
        _layers("GLM-4.5-Air", **small | {"first_k_dense_replace": 2})
    for wrong in (kinds[:2], ["dense", "sparse", "magic"], "sparse", [["dense"], "sparse", "sparse"]):
        with pytest.raises(CheckpointError, match="list of 3 of 'dense', 'sparse'"):
            _layers("GLM-4.5-Air", **small | {"mlp_layer_types": wrong})


def test_absent_keys_take_the_documented_default_or_are_named() -> None:
    assert _layers("Qwen3-30B-A3B", decoder_sparse_step="absent", mlp_only_layers="absent") == tuple(range(48))
    assert _layers("DeepSeek-V2-Lite", first_k_dense_replace="absent", moe_layer_freq="absent")[0] == 0
    assert _layers("DeepSeek-V3", first_k_dense_replace="absent")[0] == 3
    assert _layers("GLM-4.5-Air", first_k_dense_replace="absent")[0] == 1
    v3 = spec_from_config(_config("DeepSeek-V3", n_group="absent", topk_group="absent"), "v3")
    assert (v3.num_groups, v3.topk_groups) == (8, 4)
    assert spec_from_config(_config("Mixtral-8x7B", hidden_size="absent"), "m").hidden_size == 0
    for name, key in [
        ("Qwen3-30B-A3B", "num_hidden_layers"), ("Qwen3-30B-A3B", "num_experts_per_tok"),
        ("deepseek-moe-16b-base", "first_k_dense_replace"), ("ERNIE-4.5-21B-A3B", "moe_layer_start_index"),
        ("DeepSeek-V2", "n_group"), ("DeepSeek-V2", "topk_group"), ("ERNIE-4.5-21B-A3B", "moe_k"),
    ]:  # fmt: skip
        with pytest.raises(CheckpointError, match=f"lacks {key}"):
            spec_from_config(_config(name, **{key: "absent"}), name)
        with pytest.raises(CheckpointError, match=f"lacks {key}"):
            spec_from_config(_config(name, **{key: None}), name)


def test_the_count_may_stand_under_its_newer_name() -> None:
    newer = _config("Qwen3-30B-A3B", num_experts="absent", num_local_experts=128)
    assert spec_from_config(newer, "q").num_experts == 128
    with pytest.raises(CheckpointError, match="contradicts itself: num_experts = 128, num_local_experts = 64"):
        spec_from_config(_config("Qwen3-30B-A3B", num_local_experts=64), "q")


def test_groups_count_only_when_routing_is_limited() -> None:
    lite = _config("DeepSeek-V2", topk_method="greedy")
    assert spec_from_config(lite, "x").num_groups == 1
    assert spec_from_config(_config("DeepSeek-V3", n_group=1, topk_group=1), "x").num_groups == 1
    assert spec_from_config(_config("DeepSeek-V2", model_type="new", topk_method="greedy"), "x").num_groups == 1


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096},
        {"model_type": "granitemoe", "num_local_experts": 0, "num_experts_per_tok": 0, "num_hidden_layers": 4},
        {"model_type": "deepseek_v2", "n_routed_experts": None, "num_hidden_layers": 4},
        {"model_type": "qwen2_vl", "text_config": {"model_type": "qwen2", "num_hidden_layers": 4}},
        {},
        _config("DeepSeek-V2-Lite", first_k_dense_replace=27),
        _config("Qwen3-30B-A3B", mlp_only_layers=list(range(48))),
    ],
)
def test_a_model_without_experts(config: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="dense-model has no MoE layers"):
        spec_from_config(config, "dense-model")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_experts", "128"), ("num_experts", 128.0), ("num_experts", float("nan")), ("num_experts", True),
        ("num_experts", [128]), ("num_experts", -1), ("num_experts_per_tok", 0), ("num_experts_per_tok", 1.5),
        ("num_hidden_layers", "48"), ("num_hidden_layers", {}), ("num_hidden_layers", 0), ("hidden_size", "big"),
        ("decoder_sparse_step", 0), ("mlp_only_layers", [48]), ("mlp_only_layers", [True]), ("mlp_only_layers", 3),
        ("mlp_only_layers", ["1"]), ("model_type", 7), ("model_type", ["qwen3_moe"]),
    ],
)  # fmt: skip
def test_wrong_values_name_the_key_and_the_value(key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=f"{key} = .* in Q's config; it must"):
        spec_from_config(_config("Qwen3-30B-A3B", **{key: value}), "Q")


def test_impossible_counts() -> None:
    for changes, message in [
        ({"num_experts_per_tok": 200}, "top_k = 200 is more than num_experts = 128"),
        ({"num_hidden_layers": 10**12}, "at most 10000"),
        ({"num_experts": 10**9}, "at most 10000 and 65536"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            spec_from_config(_config("Qwen3-30B-A3B", **changes), "Q")
    with pytest.raises(CheckpointError, match="not divisible by num_groups = 7"):
        spec_from_config(_config("DeepSeek-V3", n_group=7), "V3")


@pytest.mark.parametrize(
    ("model_type", "extra", "message"),
    [
        ("llama4_text", {"interleave_moe_layer_step": 2}, "interleave_moe_layer_step may say"),
        ("jamba", {"expert_layer_period": 2, "expert_layer_offset": 1}, "expert_layer_period may say"),
        ("lfm2_moe", {"num_dense_layers": 2}, "num_dense_layers may say"),
        ("nemotron_h", {"hybrid_override_pattern": "MEM*E"}, "hybrid_override_pattern may say"),
        ("granitemoehybrid", {"layer_types": ["mamba", "attention"]}, "layer_types may say .* one is granitemoe"),
        ("qwen9_moe", {"moe_layers_enum": "1,2"}, "nearest known one is qwen[23]_moe"),
    ],
)
def test_an_unknown_rule_for_dense_layers_is_refused(model_type: str, extra: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        spec_from_config(_config("Qwen3-30B-A3B", model_type=model_type, **extra), "new")


def test_unknown_architectures_of_today_are_read() -> None:
    kimi = _config("DeepSeek-V3", model_type="kimi_k2", n_routed_experts=384, n_group=1, topk_group=1)
    assert spec_from_config(kimi, "kimi").num_layers == 58
    attention = ["linear_attention"] * 36 + ["full_attention"] * 12
    qwen = _config("Qwen3-30B-A3B", model_type="qwen3_next", layer_types=attention, full_attention_interval=4)
    assert spec_from_config(qwen, "next").num_layers == 48
    minimax = _config("Mixtral-8x7B", model_type="minimax", layernorm_mlp_alpha=1.0, attn_type_list=[0] * 32)
    assert spec_from_config(minimax, "m").num_layers == 32


def test_load_from_a_file_or_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "Some-MoE"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIGS["gpt-oss-20b"], "limit": float("inf")}))
    assert load_spec(folder) == load_spec(str(folder / "config.json"))
    assert load_spec(folder).model == "Some-MoE"
    (tmp_path / "gpt.json").write_text(json.dumps(CONFIGS["gpt-oss-20b"]))
    assert load_spec(tmp_path / "gpt.json").model == "gpt"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "config.json does not exist"),
        ('{"model_type": "mixtral"', "truncated or no JSON"),
        ("", "truncated or no JSON"),
        ("[1, 2]", "no JSON object"),
        ("[" * 100_000, "truncated or no JSON"),
        ('{"kind": "coterie.placement"}', "no MoE layers"),
    ],
)
def test_what_is_no_config(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        load_spec(tmp_path)
