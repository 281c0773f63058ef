"""Names of experts' tensors: what is known, and that nothing unknown passes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from coterie.checkpoint.expert_tensors import NeuronAxis, neuron_axes
from coterie.checkpoint.reorder import along_axis, reorder_files
from coterie.checkpoint.safetensors_io import StoredTensor
from coterie.errors import CheckpointError

L, E, I, H = 2, 3, 4, 5  # noqa: E741 - the shape letters
LAYERS = (1, 3)  # of the model, the MoE ones
SHAPE = (L, E, I)


def stored(*shape: int, dtype: str = "F32") -> StoredTensor:
    return StoredTensor(Path("x"), dtype, shape, 0, 0)


def split(block: str = "mlp", names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> dict:
    tensors = {"model.embed_tokens.weight": stored(9, H), "model.layers.0.mlp.down_proj.weight": stored(H, I)}
    for layer in LAYERS:
        for expert in range(E):
            base = f"model.layers.{layer}.{block}.experts.{expert}"
            tensors |= {f"{base}.{name}.weight": stored(I, H) for name in names[:2]}
            tensors[f"{base}.{names[2]}.weight"] = stored(H, I)
        tensors[f"model.layers.{layer}.{block}.gate.weight"] = stored(E, H)
        tensors[f"model.layers.{layer}.self_attn.q_proj.weight"] = stored(H, H)
    return tensors


def test_split_experts_by_both_sets_of_names() -> None:
    for tensors, family in ((split(), "olmoe"), (split("block_sparse_moe", ("w1", "w3", "w2")), "mixtral")):
        axes = neuron_axes(tensors, family, LAYERS, SHAPE)
        assert len(axes) == L * E * 3
        assert {(axis.layer, axis.expert) for axis in axes.values()} == {(i, e) for i in range(L) for e in range(E)}
        for name, axis in axes.items():
            down = re.search(r"down_proj|w2", name) is not None
            assert (axis.axis, axis.along) == (int(down), "one")


def test_fused_experts() -> None:
    granite, gpt = {}, {}
    for layer in LAYERS:
        block = f"model.layers.{layer}.block_sparse_moe."
        granite |= {
            f"{block}input_linear.weight": stored(E, 2 * I, H), f"{block}output_linear.weight": stored(E, H, I),
            f"{block}router.layer.weight": stored(E, H),
        }  # fmt: skip
        block = f"model.layers.{layer}.mlp."
        gpt |= {
            f"{block}experts.gate_up_proj": stored(E, H, 2 * I), f"{block}experts.down_proj": stored(E, I, H),
            f"{block}experts.gate_up_proj_bias": stored(E, 2 * I), f"{block}experts.down_proj_bias": stored(E, H),
            f"{block}router.weight": stored(E, H), f"{block}router.bias": stored(E),
        }  # fmt: skip
    axes = neuron_axes(granite, "granitemoe", LAYERS, SHAPE)
    assert axes["model.layers.3.block_sparse_moe.input_linear.weight"] == NeuronAxis(1, None, "gate_up", 0, "halves")
    assert axes["model.layers.3.block_sparse_moe.output_linear.weight"] == NeuronAxis(1, None, "down", 1, "one")
    axes = neuron_axes(gpt, "gpt_oss", LAYERS, SHAPE)
    assert axes["model.layers.1.mlp.experts.gate_up_proj"] == NeuronAxis(0, None, "gate_up", 1, "pairs")
    assert axes["model.layers.1.mlp.experts.down_proj"] == NeuronAxis(0, None, "down", 0, "one")
    assert axes["model.layers.1.mlp.experts.gate_up_proj_bias"] == NeuronAxis(0, None, "gate_up bias", 0, "pairs")
    assert axes["model.layers.1.mlp.experts.down_proj_bias"].axis is None


def test_shared_experts_routers_and_layers_without_profile_are_left_alone() -> None:
    tensors = split()
    for name in (
        "mlp.shared_experts.down_proj.weight", "mlp.shared_expert.up_proj.weight", "mlp.shared_expert_gate.weight",
        "mlp.gate.e_score_correction_bias", "mlp.moe_statics.e_score_correction_bias", "input_layernorm.weight",
    ):  # fmt: skip
        tensors[f"model.layers.3.{name}"] = stored(H, I)
    tensors["model.layers.4.mlp.experts.0.down_proj.weight"] = stored(H, I)  # a layer that predicts further tokens
    assert len(neuron_axes(tensors, "deepseek_v3", LAYERS, SHAPE)) == L * E * 3


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("mlp.experts.0.gate_proj.scales", stored(I, 1), "not understood"),
        ("mlp.experts.0.gate_proj.weight_scale_inv", stored(I, 1), "not understood"),
        ("mlp.experts.gate_up_proj_blocks", stored(E, 2), "not understood"),
        ("mlp.latent.weight", stored(I, H), "not understood"),
        ("moe2.experts.0.gate_proj.qweight", stored(I, H), "not understood"),
        ("mlp.experts.1.down_proj.weight", stored(H, I, dtype="F8_E4M3"), "is stored as F8_E4M3: quantised"),
        ("mlp.experts.1.down_proj.weight", stored(I, H), r"shape \[4, 5\], which does not fit 3 experts of 4"),
        ("mlp.experts.3.down_proj.weight", stored(H, I), "does not fit 3 experts"),
        ("mlp.experts.gate_up_proj", stored(E, 2 * I, H), "holds twice the|lacks the down"),
    ],
)
def test_what_is_not_understood_is_named(name: str, tensor: StoredTensor, message: str) -> None:
    tensors = {**split(), f"model.layers.3.{name}": tensor}
    with pytest.raises(CheckpointError, match=message) as raised:
        neuron_axes(tensors, "olmoe", LAYERS, SHAPE)
    if "not understood" in message:
        assert name in str(raised.value)


def test_a_missing_tensor_is_told() -> None:
    tensors = split()
    del tensors["model.layers.3.mlp.experts.2.up_proj.weight"]
    with pytest.raises(CheckpointError, match="lacks the up weights of expert 2 in MoE layer 1"):
        neuron_axes(tensors, "olmoe", LAYERS, SHAPE)
    with pytest.raises(CheckpointError, match="lacks the"):
        neuron_axes({}, "olmoe", LAYERS, SHAPE)


def test_fused_experts_of_an_unknown_architecture_are_refused() -> None:
    tensors = {f"model.layers.{i}.mlp.experts.gate_up_proj": stored(E, 2 * I, H) for i in LAYERS}
    with pytest.raises(CheckpointError, match=r"experts\.gate_up_proj belongs to experts and is not understood"):
        neuron_axes(tensors, "new_moe", LAYERS, SHAPE)


def test_elements_along_an_axis() -> None:
    order = np.array([2, 0, 1])
    assert along_axis(order, "one").tolist() == [2, 0, 1]
    assert along_axis(order, "halves").tolist() == [2, 0, 1, 5, 3, 4]
    assert along_axis(order, "pairs").tolist() == [4, 5, 0, 1, 2, 3]


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_quantised_checkpoints_are_refused_by_name(key: str, tmp_path: Path) -> None:
    for place in (
        {key: {"quant_method": "mxfp4"}},
        {"text_config": {key: {"quant_method": "mxfp4"}, "num_experts": 3}},
    ):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_oss", **place}))
        with pytest.raises(CheckpointError, match=r"is quantised \(mxfp4\)"):
            reorder_files(tmp_path, tmp_path, np.zeros(SHAPE, np.int32), LAYERS, {})
