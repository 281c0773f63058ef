"""What Coterie needs to know of a Mixture-of-Experts model: counts, not weights."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from coterie.errors import ConfigError


@dataclass(frozen=True)
class MoESpec:
    """The shape of a model's routing.

    Attributes:
        model: a name for people; not used to decide anything.
        num_layers: MoE layers (dense layers are not counted).
        num_experts: logical, routed experts in each MoE layer; shared experts are not counted.
        top_k: routed experts chosen for each token.
        num_groups: expert groups of group-limited routing (`n_group`); 1 when routing is not limited.
        topk_groups: groups a token may choose from (`topk_group`); 1 when routing is not limited.
        layer_ids: for each MoE layer its index among all layers of the model; empty when unknown.
        num_model_layers: all layers of the model, dense ones included; 0 when unknown.
        hidden_size: elements of one token's hidden state; 0 when unknown.
    """

    model: str
    num_layers: int
    num_experts: int
    top_k: int
    num_groups: int = 1
    topk_groups: int = 1
    layer_ids: tuple[int, ...] = ()
    num_model_layers: int = 0
    hidden_size: int = 0

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_experts", "top_k", "num_groups", "topk_groups"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)} in the model's spec; it must be at least 1")
        if self.top_k > self.num_experts:
            raise ConfigError(f"top_k = {self.top_k} is more than num_experts = {self.num_experts}")
        if self.num_experts % self.num_groups:
            raise ConfigError(f"num_experts = {self.num_experts} is not divisible by num_groups = {self.num_groups}")
        if self.layer_ids and len(self.layer_ids) != self.num_layers:
            raise ConfigError(f"{len(self.layer_ids)} layer_ids for num_layers = {self.num_layers}; give one for each")
        if self.topk_groups > self.num_groups:
            raise ConfigError(f"topk_groups = {self.topk_groups} is more than num_groups = {self.num_groups}")
        if self.num_model_layers and self.num_model_layers < self.num_layers:
            raise ConfigError(
                f"num_model_layers = {self.num_model_layers} is less than num_layers = {self.num_layers}; "
                "it counts MoE and dense layers, and is 0 when unknown"
            )
        self._check_layer_ids()

    def _check_layer_ids(self) -> None:
        ids, limit = self.layer_ids, self.num_model_layers
        if any(later <= earlier for earlier, later in itertools.pairwise(ids)) or (ids and ids[0] < 0):
            raise ConfigError("layer_ids in the model's spec must be rising indices from 0")
        if ids and limit and ids[-1] >= limit:
            raise ConfigError(
                f"layer_ids reaches {ids[-1]} in a model of {limit} layers; they run from 0 to {limit - 1}"
            )

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary, ready for JSON."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`; unknown keys are ignored, so that newer files stay readable.

        Raises:
            ConfigError: when a key is missing or has the wrong type.
        """
        values: dict[str, Any] = {}
        for field in fields(cls):
            if field.name not in data:
                continue
            value = data[field.name]
            if field.name == "layer_ids":
                if not isinstance(value, (list, tuple)) or not all(_is_int(item) for item in value):
                    raise ConfigError(f"layer_ids = {value!r} in the model's spec; it must be a list of integers")
                value = tuple(value)
            elif field.name == "model":
                value = str(value)
            elif not _is_int(value):
                raise ConfigError(f"{field.name} = {value!r} in the model's spec; it must be an integer")
            values[field.name] = value
        missing = {"model", "num_layers", "num_experts", "top_k"} - values.keys()
        if missing:
            raise ConfigError(f"the model's spec lacks {', '.join(sorted(missing))}")
        return cls(**values)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
