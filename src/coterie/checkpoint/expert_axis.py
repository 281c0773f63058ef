"""Which tensors of a checkpoint know experts by number, whatever they hold; what is not understood is refused.

Experts are told by their names alone, so quantised ones are found like others: whatever stands under `experts.7.`
belongs to expert 7. Tensors of all experts, and those of the router, have them along their first axis.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from coterie.checkpoint.safetensors_io import StoredTensor
from coterie.errors import CheckpointError

_IN_LAYER = re.compile(r"^(?P<stem>(?:.*?\.)?layers)\.(?P<layer>\d+)\.(?P<inside>.+)$")
_NUMBERED = re.compile(r"^(?P<block>(?:.*?\.)?)experts\.(?P<expert>\d+)\.(?P<part>.+)$")
_FUSED = re.compile(r"^(?P<block>(?:.*?\.)?)experts\.(?P<part>(?!\d).+)$")
_LINEAR = re.compile(r"^(?P<block>(?:.*?\.)?block_sparse_moe\.)(?P<part>(?:in|out)put_linear\.weight)$")  # granitemoe
_FUSED_PART = re.compile(
    r"(?:gate_up_proj|gate_proj|up_proj|down_proj|w1|w2|w3)"
    r"(?:_bias|_blocks|_scales|(?:_weight)?_scale(?:_inv)?|\.weight|\.bias|\.weight_scale(?:_inv)?)?"
    r"|(?:in|out)put_linear\.weight"
)
_ROUTER = re.compile(r"(?:(?:gate|router|router\.layer)\.(?:weight|bias)|(?:gate\.|moe_statics\.)?"
                     r"e_score_correction_bias)")  # fmt: skip
_ROUTER_WEIGHT = re.compile(r"(?:gate|router|router\.layer)\.weight")
_SHARED = re.compile(r"(?:shared_experts?|shared_expert_gate|shared_mlp)\.")
_LIKE_EXPERTS = re.compile(r"(?<!shared_)expert|router|moe|e_score")


@dataclass(frozen=True)
class ExpertTensor:
    """A tensor that knows experts by number.

    Attributes:
        layer: MoE layer, from 0.
        expert: the expert it belongs to, by its name; None for a tensor of all, which has them along its first axis
            (leading axes of length 1 aside).
    """

    layer: int
    expert: int | None


def expert_tensors(
    tensors: Mapping[str, StoredTensor], layer_ids: Iterable[int], num_experts: int
) -> dict[str, ExpertTensor]:
    """Every tensor that must change when experts are renumbered; layers for multi-token prediction are left out.

    Args:
        tensors: the checkpoint's, by name.
        layer_ids: the model layer of each MoE layer.
        num_experts: routed experts of a layer.

    Raises:
        CheckpointError: for a tensor beside the experts that is not understood, or when experts or routers are absent.
    """
    number = {layer_id: index for index, layer_id in enumerate(layer_ids)}
    inside_layers = _by_layer(tensors, number)
    found: dict[str, ExpertTensor] = {}
    for layer_id, layer in number.items():
        names = inside_layers.get(layer_id, {})
        hits = {inside: hit for inside in names if (hit := _of_experts(inside))}
        block = _block({hit["block"] for hit in hits.values()}, layer_id)
        for inside, name in names.items():
            if inside.startswith(block):
                hit, part = hits.get(inside), inside.removeprefix(block)
                own = _classify(name, part, _number(hit), tensors[name].shape, num_experts)
                if own is not None:
                    found[name] = ExpertTensor(layer, None if own < 0 else own)
            elif _LIKE_EXPERTS.search(inside) and not _SHARED.match(inside):
                raise _not_understood(name)
        others = [inside.removeprefix(block) for inside in names if _number(hits.get(inside)) is None]
        _check_complete(hits.values(), others, layer_id, num_experts)
    return found


def renamed(name: str, expert: int) -> str:
    """A numbered expert's tensor as another expert's."""
    layer = _IN_LAYER.match(name)
    hit = _NUMBERED.match(layer["inside"]) if layer else None
    assert layer is not None and hit is not None, "only a numbered expert's tensor is renamed"  # noqa: PT018
    start = layer.start("inside")
    return f"{name[: start + hit.start('expert')]}{expert}{name[start + hit.end('expert') :]}"


def _by_layer(tensors: Mapping[str, StoredTensor], number: Mapping[int, int]) -> dict[int, dict[str, str]]:
    """Names of the tensors of every MoE layer, by what comes after the layer's number."""
    stems: dict[str, dict[int, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    holding = set()  # stems under which there are experts
    for name in tensors:
        hit = _IN_LAYER.match(name)
        if hit is None or int(hit["layer"]) not in number:
            continue
        stem, layer, inside = hit.groups()
        stems[stem][int(layer)][inside] = name
        if stem not in holding and not _is_extra(stem) and _of_experts(inside):
            holding.add(stem)
    if len(holding) != 1:
        what = f"experts under {' and '.join(sorted(holding))}" if holding else "no experts under known names"
        raise CheckpointError(f"the checkpoint has {what}; it cannot be renumbered")
    return stems[holding.pop()]


def _is_extra(stem: str) -> bool:
    """Whether layers under this name are not the model's own but predict further tokens ahead."""
    return any(part.startswith("mtp") for part in stem.split("."))


def _of_experts(inside: str) -> re.Match[str] | None:
    return _NUMBERED.match(inside) or _FUSED.match(inside) or _LINEAR.match(inside)


def _number(hit: re.Match[str] | None) -> int | None:
    """The expert that a name is of; None when it is of none or of all."""
    return int(hit["expert"]) if hit is not None and hit.re is _NUMBERED else None


def _block(blocks: set[str], layer_id: int) -> str:
    """What the names of a layer's MoE block begin with, "mlp."."""
    if len(blocks) != 1 or "" in blocks:
        what = f"several blocks of experts ({', '.join(sorted(blocks))})" if len(blocks) > 1 else "no block of experts"
        raise CheckpointError(
            f"layer {layer_id} of the checkpoint has {what} under known names; it cannot be renumbered"
        )
    return next(iter(blocks))


def _classify(name: str, part: str, expert: int | None, shape: tuple[int, ...], num_experts: int) -> int | None:
    """What a tensor of the MoE block is of: an expert; -1: all of them; None: none."""
    if expert is not None:
        if expert >= num_experts:
            raise CheckpointError(
                f"{name} is of an expert that the config does not have (it says {num_experts}); use the config.json "
                "that belongs to the weights"
            )
        return expert
    if _SHARED.match(part):
        return None
    if not _ROUTER.fullmatch(part) and not _FUSED_PART.fullmatch(part.removeprefix("experts.")):
        if part.startswith(("experts.", "gate.", "router.")) and math.prod(shape) == 1:
            return None  # one scale for all
        raise _not_understood(name)
    if next((size for size in shape if size != 1), 1) != num_experts:
        raise CheckpointError(
            f"{name} has the shape {list(shape)}, whose first axis is not the {num_experts} experts; it cannot "
            "be renumbered (is the router quantised?)"
        )
    return -1


def _check_complete(hits: Iterable[re.Match[str]], others: Sequence[str], layer_id: int, num_experts: int) -> None:
    """Whether every expert has the same parts, and the router its weight; `others` are not numbered."""
    held: dict[int, set[str]] = {expert: set() for expert in range(num_experts)}
    for hit in hits:
        expert = _number(hit)
        if expert is not None:
            held[expert].add(hit["part"])
    every = set().union(*held.values())
    wrong = next(((expert, part) for expert in held for part in sorted(every - held[expert])), None)
    problem = None
    if not any(_ROUTER_WEIGHT.fullmatch(part) for part in others):
        problem = "its router's weight"
    elif wrong is not None:
        problem = f"{wrong[1]} of expert {wrong[0]}"
    fused = any(_FUSED_PART.fullmatch(part.removeprefix("experts.")) for part in others)
    if problem is not None or (fused and every):
        what = f"lacks {problem}" if problem else "holds experts twice, numbered and fused,"
        raise CheckpointError(f"layer {layer_id} of the checkpoint {what} under known names; it cannot be renumbered")


def _not_understood(name: str) -> CheckpointError:
    return CheckpointError(
        f"{name} stands beside experts and is not understood: whether it numbers them is not known, so the checkpoint "
        "cannot be renumbered; use an engine's file (coterie export)"
    )
