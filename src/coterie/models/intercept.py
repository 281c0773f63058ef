"""See, and if wanted replace, the routing decisions of a live model, at the one point that all families share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from coterie.errors import CheckpointError
from coterie.models.layers import MoELayer, find_moe_layers

if TYPE_CHECKING:
    from torch import Tensor

Decide: TypeAlias = "Callable[[int, Tensor, Tensor, Tensor], tuple[Tensor, Tensor] | None]"
"""(layer, hidden [T, H], topk_ids [T, K], topk_weights [T, K]) -> None to leave the decision as it is, or the
(ids, weights) to compute instead. T is batch x sequence, flattened, padding included."""


@contextmanager
def intercept(model: Any, decide: Decide) -> Iterator[list[MoELayer]]:
    """Call `decide` with every decision of every MoE layer, in prefill and in generation, while the block runs.

    The decisions are the arguments of each layer's experts module, taken by a forward pre-hook: what the router's own
    rule chose (groups, biases, scaling included), not what its logits suggest. At the end, or on an error, the hooks
    are removed and the model is as it was. Blocks may be nested: the inner one sees what the outer one decided.
    Gradient checkpointing runs layers, and so `decide`, twice. Not for a model that other threads run at the same time.

    Args:
        model: a Transformers model.
        decide: see `Decide`; its first argument counts MoE layers from 0.

    Yields:
        The model's MoE layers.

    Raises:
        CheckpointError: when the model has no MoE layers, or they cannot be recognised.
    """
    layers = find_moe_layers(model)
    handles = []
    try:
        for layer in layers:
            hook = _hook(layer, decide)
            handles.append(layer.experts.register_forward_pre_hook(hook, with_kwargs=True))
        yield layers
    finally:
        for handle in handles:
            handle.remove()


def _hook(layer: MoELayer, decide: Decide) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]] | None]:
    def hook(
        module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        values = (*args, *kwargs.values())
        if len(values) != 3 or values[1].is_floating_point():
            raise CheckpointError(
                f"{type(module).__name__} was not called with (hidden states, expert ids, weights); its decisions "
                "cannot be intercepted"
            )
        hidden, ids, weights = values
        replaced = decide(layer.index, hidden, ids, weights)
        if replaced is None:
            return None
        new_ids, new_weights = replaced
        assert new_ids.shape == new_weights.shape, "a weight for each id"
        assert len(new_ids) == len(hidden), "a row for each token"
        return (hidden, new_ids, new_weights), {}

    return hook
