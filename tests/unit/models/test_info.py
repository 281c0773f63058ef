"""A model's sizes from its files and from its config alone are the same, and are those of its tensors."""

from __future__ import annotations

import json
import shutil

import pytest

from coterie.errors import CheckpointError
from coterie.families import FAMILIES
from coterie.models.info import model_info

needs_transformers = pytest.mark.needs("transformers")


def alone(folder, tmp_path, **changes):
    """The config.json of a model by itself."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (tmp_path / folder.name).mkdir()
    (tmp_path / folder.name / "config.json").write_text(json.dumps(config))
    return tmp_path / folder.name / "config.json"


@needs_transformers
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_config_and_files_agree(family, dtype, tiny_checkpoint, tmp_path):
    folder = tiny_checkpoint(family, dtype)
    measured, computed = model_info(folder).to_json(), model_info(alone(folder, tmp_path)).to_json()
    assert (measured.pop("bytes_from"), computed.pop("bytes_from")) == ("files", "config")
    assert measured == computed
    assert (measured["family"], measured["dtype"]) == (family, dtype)
    files = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert measured["total_bytes"] < files < measured["total_bytes"] + 32_000  # the header
    assert measured["experts_bytes"] == measured["moe_layers"] * 8 * measured["expert_bytes"]
    biases = measured["hidden_size"] + 2 * measured["expert_width"] if family == "gpt_oss" else 0
    neurons = 3 * measured["hidden_size"] * measured["expert_width"]
    assert measured["expert_bytes"] == (neurons + biases) * (4 if dtype == "float32" else 2)


@needs_transformers
def test_shared_experts_are_counted_and_belong_to_the_rest(tiny_checkpoint):
    shared = {family: model_info(tiny_checkpoint(family)).shared_experts for family in FAMILIES}
    assert {family for family, count in shared.items() if count == 1} == {
        "qwen2_moe", "deepseek_v2", "deepseek_v3", "glm4_moe", "ernie4_5_moe",
    }  # fmt: skip
    assert {family for family, count in shared.items() if count == 2} == {"deepseek"}
    assert set(shared.values()) == {0, 1, 2}


# published: https://huggingface.co/mistralai/Mixtral-8x7B-v0.1 (config.json, and metadata.total_size of its index)
MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False,
    "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 32000,
}  # fmt: skip


@needs_transformers
def test_a_published_config_gives_the_published_bytes(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL_8X7B))
    info = model_info(tmp_path / "config.json").to_json()
    assert info["total_bytes"] == 93_405_585_408
    assert info["expert_bytes"] == 3 * 4096 * 14336 * 2
    assert (info["experts"], info["top_k"], info["moe_layers"], info["dtype"]) == (8, 2, 32, "bfloat16")


@needs_transformers
def test_files_suffice_without_transformers(tiny_checkpoint, monkeypatch):
    import sys

    folder = tiny_checkpoint("deepseek_v3")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert model_info(folder).measured


@needs_transformers
def test_an_unknown_family_is_measured_too(tmp_path):
    import torch
    import transformers

    from coterie.models.backend import quiet

    sizes = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(
        "jamba", intermediate_size=48, num_hidden_layers=4, num_experts=4, num_experts_per_tok=2,
        expert_layer_period=2, expert_layer_offset=1, attn_layer_period=2, attn_layer_offset=1,
        use_mamba_kernels=False, **sizes,
    )  # fmt: skip
    with quiet():
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "whole")
    measured = model_info(tmp_path / "whole")
    computed = model_info(alone(tmp_path / "whole", tmp_path / "whole"))
    assert measured.measured
    assert not computed.measured
    assert measured.expert_bytes == computed.expert_bytes == 3 * 32 * 48 * 4
    assert measured.experts_bytes == computed.experts_bytes == 2 * 4 * measured.expert_bytes
    assert measured.rest_bytes == computed.rest_bytes


@needs_transformers
def test_a_quantized_config_by_itself_says_what_its_bytes_are(tiny_checkpoint, tmp_path):
    config = alone(tiny_checkpoint("gpt_oss"), tmp_path, quantization_config={"quant_method": "mxfp4"})
    assert "unquantized" in model_info(config).notes[0]


@needs_transformers
def test_files_of_another_model_are_refused(tiny_checkpoint, tmp_path):
    config = alone(tiny_checkpoint("mixtral"), tmp_path, num_hidden_layers=5)
    shutil.copy(tiny_checkpoint("mixtral") / "model.safetensors", config.parent)
    with pytest.raises(CheckpointError, match="experts of 3 of its 5 MoE layers, not of 3"):
        model_info(config)


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        model_info(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="no JSON object"):
        model_info(tmp_path)
