"""Which tensors of a checkpoint have an axis of expert neurons, by their names; unknown ones are refused."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from coterie.checkpoint.safetensors_io import StoredTensor
from coterie.errors import CheckpointError
from coterie.families import FAMILIES

Along = Literal["one", "halves", "pairs"]
FLOAT_BYTES: Mapping[str, int] = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}

_IN_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_SPLIT = re.compile(r"^(?P<block>.*\.)experts\.(?P<expert>\d+)\.(?P<part>gate_proj|up_proj|down_proj|w[123])\."
                    r"(?P<kind>weight|bias)$")  # fmt: skip
_FUSED = re.compile(r"^(?P<block>.*\.)experts\.(?P<part>gate_up_proj|down_proj)(?P<kind>_bias)?$")
_LINEAR = re.compile(r"^(?P<block>.*\.)(?P<part>input_linear|output_linear)\.weight$")  # granitemoe
_PARTS = {
    "gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down",
    "gate_up_proj": "gate_up", "input_linear": "gate_up", "output_linear": "down",
}  # fmt: skip
_OTHERS_IN_BLOCK = re.compile(
    r"(gate|router|moe_statics|shared_experts?|shared_expert_gate)\.|e_score_correction_bias$"
)


@dataclass(frozen=True)
class NeuronAxis:
    """Where the neurons of a stored tensor lie.

    Attributes:
        layer: MoE layer, from 0.
        expert: the expert, or None for a tensor of all experts, whose first axis they are.
        part: "gate", "up", "gate_up" or "down"; with " bias" for its bias.
        axis: the axis of neurons, of one expert's part of the tensor; None where it has none.
        along: what lies along it: "one" element a neuron; "halves", all of gate, then all of up; "pairs", gate and up
            of a neuron side by side.
    """

    layer: int
    expert: int | None
    part: str
    axis: int | None
    along: Along


def neuron_axes(
    tensors: Mapping[str, StoredTensor], model_type: str, layer_ids: Iterable[int], shape: tuple[int, int, int]
) -> dict[str, NeuronAxis]:
    """Every tensor of the routed experts, checked to be all there.

    Args:
        tensors: the checkpoint's, by name.
        model_type: its architecture; fused experts are known to lie as in `families.FAMILIES` only.
        layer_ids: the model layer of each MoE layer.
        shape: MoE layers, experts, neurons of an expert.

    Raises:
        CheckpointError: for a tensor of the experts that is not understood, quantised or absent.
    """
    number = {layer_id: index for index, layer_id in enumerate(layer_ids)}
    in_moe = {
        name: number[int(hit[1])] for name in tensors if (hit := _IN_LAYER.search(name)) and int(hit[1]) in number
    }
    axes, blocks = {}, set()
    for name, layer in in_moe.items():
        found = _parse(name, layer, model_type)
        if found is not None:
            block, axis = found
            blocks.add(block)
            _check(name, tensors[name], axis, shape)
            axes[name] = axis
    for name in in_moe.keys() - axes.keys():
        inside = next((name.removeprefix(block) for block in blocks if name.startswith(block)), None)
        known = inside is not None and _OTHERS_IN_BLOCK.match(inside)
        if not known and (inside is not None or "experts." in name.replace("shared_experts.", "")):
            raise CheckpointError(
                f"{name} belongs to experts and is not understood; only gated experts of {', '.join(FAMILIES)} and "
                "those named alike can be reordered"
            )
    _check_complete(axes.values(), shape)
    return axes


def _parse(name: str, layer: int, model_type: str) -> tuple[str, NeuronAxis] | None:
    """The block's prefix and the axis; None for a tensor that is none of these experts'."""
    hit = _SPLIT.match(name)
    if hit:
        part, is_bias = _PARTS[hit["part"]], hit["kind"] == "bias"
        axis = 0 if part != "down" else None if is_bias else 1
        return hit["block"], NeuronAxis(layer, int(hit["expert"]), part + " bias" * is_bias, axis, "one")
    hit = _FUSED.match(name) or (_LINEAR.match(name) if model_type == "granitemoe" else None)
    if not hit or model_type not in FAMILIES:
        return None
    part, is_bias, is_gpt_oss = _PARTS[hit["part"]], bool(hit.groupdict().get("kind")), model_type == "gpt_oss"
    along: Along = "one" if part == "down" else "pairs" if is_gpt_oss else "halves"
    if is_bias:
        return hit["block"], NeuronAxis(layer, None, part + " bias", None if part == "down" else 0, along)
    return hit["block"], NeuronAxis(layer, None, part, int((part == "down") != is_gpt_oss), along)


def _check(name: str, tensor: StoredTensor, axis: NeuronAxis, shape: tuple[int, int, int]) -> None:
    _, experts, width = shape
    if tensor.dtype not in FLOAT_BYTES:
        raise CheckpointError(
            f"{name} is stored as {tensor.dtype}: quantised experts cannot be reordered; use the model's unquantised "
            f"checkpoint ({', '.join(FLOAT_BYTES)})"
        )
    own = tensor.shape if axis.expert is not None else tensor.shape[1:]
    size = width if axis.along == "one" else 2 * width
    wrong_experts = axis.expert >= experts if axis.expert is not None else tensor.shape[:1] != (experts,)
    wrong_axis = axis.axis is not None and (len(own) <= axis.axis or own[axis.axis] != size)
    if wrong_experts or wrong_axis or len(own) != (1 if axis.part.endswith("bias") else 2):
        raise CheckpointError(
            f"{name} has shape {list(tensor.shape)}, which does not fit {experts} experts of {width} neurons; "
            "use the profile of this model"
        )


def _check_complete(axes: Iterable[NeuronAxis], shape: tuple[int, int, int]) -> None:
    layers, experts, _ = shape
    held = {(axis.layer, axis.expert, axis.part) for axis in axes}
    for layer in range(layers):
        fused = (layer, None, "gate_up") in held
        numbers = [None] if fused else list(range(experts))
        parts = ("gate_up", "down") if fused else ("gate", "up", "down")
        absent = [(expert, part) for expert in numbers for part in parts if (layer, expert, part) not in held]
        extra = [axis for axis in held if axis[0] == layer and (axis[1] is None) != fused]
        if absent or extra:
            expert, part = absent[0] if absent else extra[0][1:]
            whose = "the experts" if expert is None else f"expert {expert}"
            what = "lacks" if absent else "holds twice"
            raise CheckpointError(
                f"the checkpoint {what} the {part} weights of {whose} in MoE layer {layer} under the known names; "
                "it cannot be reordered"
            )
