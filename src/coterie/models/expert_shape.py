"""The sizes of a model's experts, from its config alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from coterie.errors import CheckpointError
from coterie.families import FAMILIES, model_name, read_config, spec_from_config, text_part
from coterie.models.load import resolve
from coterie.spec import MoESpec


@dataclass(frozen=True)
class ExpertSizes:
    """What the time of an expert depends on.

    Attributes:
        spec: the model's routing.
        width: neurons of a routed expert.
        dtype: element type of its weights, by name.
    """

    spec: MoESpec
    width: int
    dtype: str


def expert_sizes(model: str | Path) -> ExpertSizes:
    """The sizes of a model's routed experts: a config.json, a folder, a shipped model's name or a hub id.

    Raises:
        CheckpointError: when there is no such model, it has no MoE layers, or its config lacks the experts' width.
    """
    file = Path(model)
    if not file.is_file():
        file = resolve(model, weights=False) / "config.json"
    config = text_part(read_config(file))
    spec = spec_from_config(config, model_name(file))
    family = FAMILIES.get(str(config.get("model_type")))
    key = family.intermediate if family else "moe_intermediate_size"
    width = config.get(key)
    if not isinstance(width, int) or isinstance(width, bool) or width < 1:
        raise CheckpointError(
            f"{spec.model}'s config says {key} = {width!r}; it must be the experts' width, at least 1"
        )
    if spec.hidden_size < 1:
        raise CheckpointError(f"{spec.model}'s config lacks hidden_size; use the model's own config.json")
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    return ExpertSizes(spec, width, str(dtype).removeprefix("torch."))
