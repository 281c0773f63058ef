"""The model's shape from what the caller knows, what the source says, and what the ids show; never a silent guess."""

from __future__ import annotations

from dataclasses import replace

from coterie.errors import ConfigError, TraceError
from coterie.spec import MoESpec
from coterie.trace.importers.base import Layout


def reconcile(
    layout: Layout, largest_id: int, spec: MoESpec | None, num_experts: int | None
) -> tuple[MoESpec, dict[str, str]]:
    """The spec of an imported trace, and what of it was inferred.

    Args:
        layout: what the source holds and says.
        largest_id: the largest expert id in it.
        spec: the caller's word on the model, which overrides the source's; None: none.
        num_experts: the caller's word on E alone; None: none.

    Raises:
        TraceError: when the trace cannot be of that model.
        ConfigError: when the caller contradicts itself.
    """
    if spec is not None and num_experts is not None and spec.num_experts != num_experts:
        raise ConfigError(
            f"the model has {spec.num_experts} experts, not the {num_experts} asked for; give one of them"
        )
    known = spec or layout.spec
    if known is not None:
        if num_experts is not None:
            known = _checked(replace, known, num_experts=num_experts)
        _check_shape(layout, known)
        return _with_layer_ids(known, layout), dict(layout.inferred)
    inferred = dict(layout.inferred)
    experts = num_experts or layout.num_experts
    if not experts:
        experts = largest_id + 1
        inferred["num_experts"] = f"largest id + 1 = {experts}; the model may have more, which this trace never chose"
    return _checked(
        MoESpec, "unknown", layout.num_layers, experts, layout.top_k,
        layer_ids=layout.layer_ids, num_model_layers=layout.num_model_layers,
    ), inferred  # fmt: skip


def _check_shape(layout: Layout, spec: MoESpec) -> None:
    found, expected = (layout.num_layers, layout.top_k), (spec.num_layers, spec.top_k)
    if found != expected:
        raise TraceError(
            f"it holds {found[0]} MoE layers and top-{found[1]}, but {spec.model} has {expected[0]} and "
            f"top-{expected[1]}; import it with the model it was recorded from"
        )
    if layout.num_experts and layout.num_experts != spec.num_experts:
        raise TraceError(
            f"it says {layout.num_experts} experts, but {spec.model} has {spec.num_experts}; "
            "import it with the model it was recorded from"
        )


def _with_layer_ids(spec: MoESpec, layout: Layout) -> MoESpec:
    """The spec, completed by the source's layer numbers or held against them."""
    if not layout.layer_ids:
        return spec
    if not spec.layer_ids:
        return replace(spec, layer_ids=layout.layer_ids)
    counted = tuple(range(spec.num_layers))  # a source may count MoE layers alone
    if layout.layer_ids not in (spec.layer_ids, counted):
        raise TraceError(
            f"its layers are {list(layout.layer_ids)}, but the MoE layers of {spec.model} are {list(spec.layer_ids)}; "
            "import it with the model it was recorded from"
        )
    return spec


def _checked(make, *args, **kwargs) -> MoESpec:  # type: ignore[no-untyped-def]
    try:
        spec: MoESpec = make(*args, **kwargs)
    except ConfigError as error:
        raise TraceError(f"{error}; check the number of experts") from error
    return spec
