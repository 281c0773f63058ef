"""What a model's tokens chose, and how wide it was to run: the sequence that every system replays.

Shapes: T tokens, L MoE layers, K top-k.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from coterie.checkpoint.store_layout import StoreLayout
from coterie.errors import TraceError
from coterie.policies.eviction import CacheShape
from coterie.pruning.width_plan import WidthPlan
from coterie.pruning.widths import widths as planned
from coterie.simulate.offload import Uses, decode_tokens
from coterie.trace.routing_trace import RoutingTrace

if TYPE_CHECKING:
    from coterie.pruning.widths import Widths


@dataclass(frozen=True, eq=False)
class Decisions:
    """Decisions of consecutive tokens.

    Attributes:
        ids_TLK: [T, L, K] int64, chosen experts.
        weights_TLK: [T, L, K] float32, their routing weights as the router gave them.
        widths_TLK: [T, L, K] int64, neurons to run of each; None: all.
        width: neurons of an expert, I, of which widths are a part.
    """

    ids_TLK: NDArray[np.int64]
    weights_TLK: NDArray[np.float32]
    widths_TLK: NDArray[np.int64] | None = None
    width: int = 1

    def __len__(self) -> int:
        return len(self.ids_TLK)

    def part(self, tokens: slice) -> Decisions:
        """Of some tokens."""
        widths = None if self.widths_TLK is None else self.widths_TLK[tokens]
        return replace(self, ids_TLK=self.ids_TLK[tokens], weights_TLK=self.weights_TLK[tokens], widths_TLK=widths)

    def scaled(self, width: int) -> Decisions:
        """The same shares of experts of another width, rounded up to a neuron."""
        if self.widths_TLK is None or width == self.width:
            return replace(self, width=width)
        return replace(self, widths_TLK=-(-self.widths_TLK * width // self.width), width=width)

    def under(self, plan: WidthPlan | None) -> Decisions:
        """With the widths that a plan gives these choices."""
        if plan is None:
            return replace(self, widths_TLK=None)
        layers = range(self.ids_TLK.shape[1])
        each: list[Widths] = [planned(plan, layer, self.ids_TLK[:, layer], self.weights_TLK[:, layer])
                              for layer in layers]  # fmt: skip
        return replace(self, widths_TLK=np.stack(each, 1), width=plan.width)

    def uses(self, layout: StoreLayout) -> Uses:
        """What they ask of a cache of a store's blocks; widths are of its experts."""
        shape = CacheShape(layout.num_layers, layout.num_experts, layout.blocks)
        blocks_TLK = np.full(self.ids_TLK.shape, layout.blocks, np.int64)
        if self.widths_TLK is not None:
            blocks_TLK = -(-self.widths_TLK // layout.block_neurons)
        chosen_T = np.full(len(self), self.ids_TLK.shape[1] * self.ids_TLK.shape[2], np.int64)
        return Uses(shape, self.ids_TLK, blocks_TLK, chosen_T)


def decisions_of_trace(trace: RoutingTrace) -> Decisions:
    """The decoded tokens of a trace, or all where it does not say; equal weights where it has none.

    Raises:
        TraceError: when choices were pruned: then not every token has K experts.
    """
    tokens = decode_tokens(trace)
    layers = [trace.layer(layer, tokens) for layer in range(trace.num_layers)]
    if not all(layer.kept().all() for layer in layers):
        raise TraceError("the trace is pruned, so not every token has all its experts; replay the trace before pruning")
    ids_TLK = np.stack([np.asarray(layer.expert_ids_TK, np.int64) for layer in layers], 1)
    weights_TLK = np.full(ids_TLK.shape, 1 / trace.spec.top_k, np.float32)
    if trace.weights is not None:
        weights_TLK = np.stack([np.asarray(layer.weights_TK, np.float32) for layer in layers], 1)
    return Decisions(ids_TLK, weights_TLK)


class Recording:
    """Decisions of whole forward passes, one after another."""

    def __init__(self, num_layers: int) -> None:
        self._ids: list[list[NDArray[np.int64]]] = [[] for _ in range(num_layers)]
        self._weights: list[list[NDArray[np.float32]]] = [[] for _ in range(num_layers)]

    def keep(self, layer: int, hidden_TH: Any, ids_TK: Any, weights_TK: Any) -> None:
        """For `intercept`."""
        self._ids[layer].append(ids_TK.cpu().numpy().astype(np.int64))
        self._weights[layer].append(weights_TK.detach().float().cpu().numpy())

    def decisions(self) -> Decisions:
        """All so far, at full width."""
        ids_TLK = np.stack([np.concatenate(parts) for parts in self._ids], 1)
        return Decisions(ids_TLK, np.stack([np.concatenate(parts) for parts in self._weights], 1))


@contextmanager
def recording(model: Any) -> Iterator[Recording]:
    """Keep what a live model's routers choose while the block runs it, in the order in which tokens run."""
    from coterie.models.intercept import intercept
    from coterie.models.layers import spec_of

    found = Recording(spec_of(model).num_layers)
    with intercept(model, found.keep):
        yield found


def record_decisions(model: Any, ids_WN: Any, plan: WidthPlan | None = None, batch: int = 12) -> Decisions:
    """Run a model over windows of text and keep what its routers chose, window after window.

    Args:
        model: a Transformers model in eval mode, in the order of neurons in which it was profiled.
        ids_WN: [W, N] token ids.
        plan: widths to run with, which change what later layers choose; None: full width.
        batch: windows to run at once.
    """
    import torch

    from coterie.models.widths import apply_widths

    with ExitStack() as stack:
        if plan is not None:
            stack.enter_context(apply_widths(model, plan, count=False))
        found = stack.enter_context(recording(model))
        stack.enter_context(torch.inference_mode())
        for start in range(0, len(ids_WN), batch):
            model.get_decoder()(input_ids=ids_WN[start : start + batch].to(model.device), use_cache=False)
    return found.decisions().under(plan)
