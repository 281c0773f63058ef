"""Where the MoE layers of a Transformers model are, and the shape of its routing."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.errors import CheckpointError, ConfigError
from coterie.families import (
    EXPERT_KEYS,
    FAMILIES,
    TOP_K_KEYS,
    Family,
    model_name,
    routing_groups,
    spec_from_config,
    text_part,
)
from coterie.spec import MoESpec

if TYPE_CHECKING:
    from torch import nn

_ROUTER_NAMES = ("gate", "router")
_INDEX_WORDS, _WEIGHT_WORDS = ("index", "indices", "idx", "ids", "experts"), ("weight", "score", "prob")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True)
class MoELayer:
    """One MoE layer of a model.

    Attributes:
        index: which MoE layer it is, from 0.
        model_layer: which layer of the model it is, from 0, dense ones included.
        block: the module of router, experts and, where there are any, shared experts.
        router: its forward returns (logits, weights, ids).
        experts: its forward takes (hidden [T, H], ids [T, K], weights [T, K]); T is batch x sequence.
        num_experts: routed experts.
        top_k: experts chosen for each token.
    """

    index: int
    model_layer: int
    block: nn.Module
    router: nn.Module
    experts: nn.Module
    num_experts: int
    top_k: int


def find_moe_layers(model: Any) -> list[MoELayer]:
    """The MoE layers of a model, first to last.

    Known families are read by their names; others by what their experts module takes as input.

    Args:
        model: a Transformers model, on any device (meta included).

    Raises:
        CheckpointError: when the model has no MoE layers, or they cannot be recognised.
    """
    name = _name(model)
    family = FAMILIES.get(str(model.config.model_type))
    found = dict(_by_name(model, family)) if family else _by_input(model, name)
    if not found:
        raise _none_found(model, name)
    spec = _spec(model, family, found)
    if family is not None and spec.layer_ids != tuple(sorted(found)):
        raise CheckpointError(
            f"{name}'s config makes layers {list(spec.layer_ids)} MoE, {type(model).__name__} has "
            f"{sorted(found)}; use the config.json that belongs to the weights"
        )
    return [
        MoELayer(index, layer, *found[layer], spec.num_experts, spec.top_k) for index, layer in enumerate(sorted(found))
    ]


def spec_of(model: Any) -> MoESpec:
    """The shape of a model's routing.

    Raises:
        CheckpointError: when the model has no MoE layers, or they cannot be recognised.
    """
    layers = find_moe_layers(model)
    family = FAMILIES.get(str(model.config.model_type))
    return _spec(model, family, {layer.model_layer: (layer.block, layer.router, layer.experts) for layer in layers})


def expert_sizes(model: Any) -> tuple[int, int]:
    """Neurons of an expert and elements of a row.

    Raises:
        CheckpointError: when the experts are not gated, or not in one fused module.
    """
    experts: Any = find_moe_layers(model)[0].experts
    down, transposed = getattr(experts, "down_proj", None), getattr(experts, "is_transposed", False)
    if down is None or not getattr(experts, "has_gate", False):
        raise CheckpointError(f"{type(experts).__name__}: only gated experts in one fused module are understood")
    return (down.shape[1], down.shape[2]) if transposed else (down.shape[2], down.shape[1])


_Parts = tuple[Any, Any, Any]  # block, router, experts


def _by_name(model: Any, family: Family) -> Iterator[tuple[int, _Parts]]:
    for index, layer in enumerate(model.get_decoder().layers):
        block = getattr(layer, family.block, None)
        experts, router = getattr(block, "experts", None), getattr(block, family.router, None)
        if experts is not None and router is not None:
            yield index, (block, router, experts)


def _by_input(model: Any, name: str) -> dict[int, _Parts]:
    found: dict[int, _Parts] = {}
    for path, experts in model.named_modules():
        layer = _LAYER.search(path)
        if layer is None or not takes_decisions(experts):
            continue
        block = model.get_submodule(path.rpartition(".")[0])
        router = next((getattr(block, each) for each in _ROUTER_NAMES if hasattr(block, each)), None)
        reason = f"the router beside {path} is named neither {' nor '.join(_ROUTER_NAMES)}" if router is None else None
        if int(layer[1]) in found:
            reason = f"{path} is the second experts module in a layer {layer[1]}"
        if reason:
            raise CheckpointError(
                f"{name} has the unknown model_type {model.config.model_type!r}, and {reason}; "
                f"known families: {', '.join(FAMILIES)}"
            )
        found[int(layer[1])] = (block, router, experts)
    return found


def takes_decisions(module: Any) -> bool:
    """Whether a module's forward takes (hidden states, expert ids, weights), in this order."""
    parameters = list(inspect.signature(module.forward).parameters)
    if len(parameters) != 3 or not hasattr(module, "num_experts"):
        return False
    _, ids, weights = parameters
    return any(word in ids for word in _INDEX_WORDS) and any(word in weights for word in _WEIGHT_WORDS)


def _none_found(model: Any, name: str) -> CheckpointError:
    config, model_type = text_part(model.config.to_dict()), model.config.model_type
    if not any(config.get(key) for key in EXPERT_KEYS):
        return CheckpointError(
            f"{name} ({model_type}) has no MoE layers: none of {', '.join(EXPERT_KEYS)} is set in its config"
        )
    return CheckpointError(
        f"{name} has the unsupported model_type {model_type!r}: no experts module of {type(model).__name__} takes "
        f"(hidden states, expert ids, weights); known families: {', '.join(FAMILIES)}"
    )


def _name(model: Any) -> str:
    path = str(model.config.name_or_path)
    return model_name(Path(path)) if path else str(model.config.model_type)


def _spec(model: Any, family: Family | None, found: Mapping[int, _Parts]) -> MoESpec:
    """A known family's spec from its config; another's from its modules, since its config may call things anyhow."""
    name, config = _name(model), text_part(model.config.to_dict())
    if family is not None:
        return spec_from_config(config, name)
    _, router, experts = found[min(found)]
    top_k = getattr(router, "top_k", None) or next((config[key] for key in TOP_K_KEYS if config.get(key)), None)
    if not isinstance(top_k, int):
        raise CheckpointError(f"{name}'s config tells the number of chosen experts by none of {', '.join(TOP_K_KEYS)}")
    num_groups, topk_groups = routing_groups(config, None, name)
    layers, hidden = config.get("num_hidden_layers", 0), config.get("hidden_size", 0)
    try:
        return MoESpec(
            name, len(found), experts.num_experts, top_k, num_groups, topk_groups, tuple(sorted(found)), layers, hidden
        )
    except ConfigError as error:
        raise CheckpointError(f"{name}: {error}") from None
