"""A live model whose experts run only as wide as a plan says."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from coterie.errors import ConfigError
from coterie.models.backend import import_transformers, kernel_module
from coterie.models.identity import ORDER_KEY, identity_of, order_digest
from coterie.models.layers import MoELayer, find_moe_layers
from coterie.models.reorder import reordered
from coterie.models.width_counts import WidthCounter, WidthStats
from coterie.pruning.width_plan import WidthPlan

if TYPE_CHECKING:
    from torch import Tensor

Widths: TypeAlias = "Callable[[int, Tensor, Tensor], Tensor]"
"""(layer, topk_ids [T, K], topk_weights [T, K]) -> [T, K] integers from 0 to I, the neurons that each slot runs. Layers
count from 0, weights are the router's own; T is batch x sequence, flattened, padding included."""

KERNELS = {"torch": "coterie.ops.gated_ffn", "triton": "coterie.ops.gated_ffn_triton"}
_MARK = "_coterie_widths"


@contextmanager
def apply_widths(
    model: Any, plan: WidthPlan | Widths, *, count: bool | WidthCounter = True, kernel: str = "torch"
) -> Iterator[WidthExecution]:
    """Run only the first neurons of every expert, as many as the plan says, while the block runs the model.

    Where the model is not in the plan's order of neurons yet, they are reordered when the block begins, and put back
    bit for bit when it ends; wrap several blocks in `reordered(model, plan.order_LEI)` to do that once. Shared experts
    run whole. At the end, or on an error, the model is as it was. `record` and `prune_destinations` may be nested with
    it either way: widths are chosen by the ids and weights that reach the experts.

    Source: CRISP §3.3, §4.2.2.

    Args:
        model: a Transformers model.
        plan: a width plan for these weights; or any function from decisions to widths, for the neurons in the order
            in which they are.
        count: keep the figures that `WidthExecution.stats` gives; a counter sums them up over several blocks.
        kernel: "torch", the grouped form of `ops.gated_ffn`; or "triton" (experimental), which does not wait for the
            device and knows the activations of the families in `families.FAMILIES` alone.

    Yields:
        The execution.

    Raises:
        BackendUnavailable: when the kernel needs Triton and it is not installed.
        CheckpointError: when the model's MoE layers are not recognised, or their experts are not gated and fused.
        ConfigError: for a plan of another model or another order, an unknown kernel, Triton on a CPU, or a block
            inside another.
    """
    import_transformers()
    run, layers = kernel_module(kernel, KERNELS, model).gated_ffn, find_moe_layers(model)
    if any(hasattr(layer.experts, _MARK) for layer in layers):
        raise ConfigError("widths are applied to this model already; leave the other block first")
    with ExitStack() as stack:
        if isinstance(plan, WidthPlan):
            require_plan(model, plan)
            if getattr(model.config, ORDER_KEY, None) != order_digest(plan.order_LEI):
                stack.enter_context(reordered(model, plan.order_LEI))
        execution = WidthExecution(layers, plan, count, run)
        for layer in layers:
            stack.enter_context(experts_forward(layer, execution.run))
        yield execution


def require_plan(model: Any, plan: WidthPlan) -> None:
    """Refuse a plan that is of other weights, or of an order that the model's neurons are not in.

    A plan's order is relative to the model that was profiled: the original, unless its settings name another order
    under `ORDER_KEY`. The model may be in that order, or in the plan's own already.

    Raises:
        ConfigError: saying which.
    """
    identity = identity_of(model)
    if identity != plan.identity:
        raise ConfigError(
            f"the width plan is of the model {plan.spec.model} with identity {plan.identity}, this one has {identity}; "
            "profile this model and plan its widths from that"
        )
    current, base = getattr(model.config, ORDER_KEY, None), plan.settings.get(ORDER_KEY)
    fits = current == base or (base is None and current == order_digest(plan.order_LEI))
    if not fits:
        raise ConfigError(
            f"the model's neurons are in the order {current or 'of the original'}, the width plan is for "
            f"{base or 'the original'}; use it with the model that was profiled, or reorder that with the same profile"
        )


class WidthExecution:
    """What `apply_widths` yields: how the experts run inside the block."""

    def __init__(
        self, layers: Sequence[MoELayer], plan: WidthPlan | Widths, count: bool | WidthCounter, run: Callable[..., Any]
    ) -> None:
        layout = importlib.import_module("coterie.ops.gated_ffn").ExpertWeights
        self._run, self._weights_L = run, [layout.of(layer.experts) for layer in layers]
        devices = [weights.down.device for weights in self._weights_L]
        if isinstance(plan, WidthPlan):
            tables = importlib.import_module("coterie.ops.widths").WidthTables
            by_device = {device: tables.of(plan, device) for device in dict.fromkeys(devices)}
            self._widths_L: list[Widths] = [by_device[device].widths for device in devices]
        else:
            self._widths_L = [plan] * len(layers)
        self._counter: WidthCounter | None
        if isinstance(count, bool):
            self._counter = WidthCounter() if count else None
        else:
            self._counter = count
        if self._counter is not None:
            first = self._weights_L[0]
            self._counter.attach(devices, first.width, first.neuron_bytes)

    def run(self, layer: int, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """A layer's experts on a batch of tokens, [T, H]."""
        widths_TK = self._widths_L[layer](layer, ids_TK, weights_TK)
        if self._counter is not None:
            self._counter.add(layer, widths_TK)
        output: Tensor = self._run(self._weights_L[layer], hidden_TH, ids_TK, weights_TK, widths_TK)
        return output

    def stats(self) -> WidthStats:
        """How wide the experts ran so far.

        Raises:
            ConfigError: when nothing was counted.
        """
        if self._counter is None:
            raise ConfigError("nothing was counted: apply_widths was given count=False; leave it out")
        return self._counter.stats()


@contextmanager
def experts_forward(layer: MoELayer, run: Callable[[int, Tensor, Tensor, Tensor], Tensor]) -> Iterator[None]:
    """Another forward for one experts module inside the block; hooks run as ever, since they are called around it.

    Replacing it leaves alone the model's choice of `experts_implementation`, which is global in name and may be set
    for several models.

    Args:
        layer: whose experts.
        run: (layer, hidden [T, H], topk_ids [T, K], topk_weights [T, K]) -> [T, H].

    Raises:
        ConfigError: where the module's forward is replaced already.
    """
    experts = layer.experts
    if hasattr(experts, _MARK):
        raise ConfigError("widths are applied to this model already; leave the other block first")
    before = vars(experts).get("forward")

    @functools.wraps(experts.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden_TH, ids_TK, weights_TK = (*args, *kwargs.values())
        return run(layer.index, hidden_TH, ids_TK, weights_TK)

    try:
        setattr(experts, _MARK, True)
        experts.forward = forward
        yield
    finally:
        vars(experts).pop("forward", None)
        vars(experts).pop(_MARK, None)
        if before is not None:
            experts.forward = before
