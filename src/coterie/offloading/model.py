"""`coterie.offload`: a Transformers model whose experts run from a store, within a byte budget."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from coterie.checkpoint.expert_store import ExpertStore, open_store
from coterie.errors import CheckpointError, ConfigError
from coterie.models.backend import import_transformers
from coterie.models.identity import ORDER_KEY, identity_of, order_digest
from coterie.models.layers import MoELayer, find_moe_layers
from coterie.models.skeleton import load_skeleton
from coterie.offloading.budget import budget_blocks
from coterie.offloading.timeline import LAYER, Timeline
from coterie.policies.cache import ExpertCache
from coterie.policies.eviction import CacheShape
from coterie.policies.registry import DEFAULT, make_policy
from coterie.policies.schedule import get_schedule
from coterie.pruning.width_plan import WidthPlan
from coterie.pruning.widths import widest

if TYPE_CHECKING:
    from torch import Tensor

    from coterie.offloading.device import Device
    from coterie.offloading.runtime import Runtime
    from coterie.offloading.width_choice import WidthChoice

Widths: TypeAlias = "Callable[[int, Tensor, Tensor], Tensor]"
"""(layer, topk_ids [T, K], topk_weights [T, K]) -> [T, K] integers from 0 to I: what `apply_widths` takes too."""
Observe: TypeAlias = "Callable[[int, Tensor, Tensor, Tensor], None]"
"""(layer, topk_ids [T, K], topk_weights [T, K], the widths [T, K] that run)."""


def offload(
    store: str | Path, budget: str | int | float, widths: WidthPlan | Widths | None = None, *, policy: str = DEFAULT,
    schedule: str = "johnson", threads: int = 2, direct: bool = True, bandwidth: float | None = None,
    timeout: float = 60.0, ahead: bool = False, check: bool = False, timeline: Timeline | None = None,
    device: str | Device | None = None, use_cached: bool | WidthPlan | Widths = False,
    skip_misses: float | None = None, observe: Observe | None = None, pieces: bool = True,
) -> Any:  # fmt: skip
    """A model that runs as usual, its experts read from a store as they are needed and kept as a budget allows.

    The model has three methods more: `stats()`, an `OffloadStats`, `close()`, and `warm()` (see `Runtime.warm`).
    Whatever the budget, policy and schedule, its outputs are the same, bit for bit; with `use_cached` or `skip_misses`
    they depend on what is resident. Everything but the routed experts is in memory beside the budget.

    Source: CRISP §3.4, §4; prefixes of neuron blocks as what is cached go beyond the paper.

    Args:
        store: a folder that `coterie pack` wrote.
        budget: the most that experts may take in memory, reads under way included: bytes ("6GiB", or an integer), or a
            share of all experts ("20%", or a float). From eight bits, more than a few tokens compute with weights that
            are converted piece by piece, which takes memory of its own while they do: a part of a piece, on a device of
            an expert.
        widths: a width plan for these weights in the store's order of neurons, or any such function; None: full width.
        policy: what decides evictions, by name (`policies.registry`).
        schedule: in which order one layer's experts are loaded: johnson, widest-first or fifo.
        threads: that read.
        direct: read around the page cache where the file system allows.
        bandwidth: bytes per second of an emulated, slower disk.
        timeout: seconds to wait for a read, or for the next piece of an expert, before giving up.
        ahead: begin to read what the next layer probably needs while nothing else is to be read. A prompt that uses
            most of a layer's experts reads the next layer's in any case, except with `use_cached` or `skip_misses`.
        check: for tests: poison memory that holds nothing, and compute every expert twice, the second time from
            freshly read weights.
        timeline: filled with every load, computation and wait.
        device: "cuda" or "cuda:1" (experimental: it has not run on a GPU yet): everything but the experts is there, and
            the budget is of its memory, pinned staging on the host and room to copy one expert together included.
            None: the CPU, where experts are computed from where they were read to.
        use_cached: neurons that are resident are free, so they run too: all of a chosen expert's, or as many as a
            second, wider plan wants; only `widths` is read for. It reads no more and computes more.
        skip_misses: F: a chosen expert that would miss is skipped where its normalised weight is below F / K, which
            costs quality; 0 or None: never.
        observe: told of every visit's experts and the widths that they run.
        pieces: compute the first neurons of a large expert while the others are read (on the CPU); else an expert
            computes when all of it has arrived. Outputs of the two may differ in their last bits.

    Raises:
        BackendUnavailable: without torch or transformers, or such a device.
        BudgetError: when the budget holds no expert as wide as the plan runs any (whole, where `widths` is a function),
            or exceeds the free memory.
        CheckpointError: for a store that is unfinished, damaged, or not of its skeleton.
        ConfigError: for an unknown policy or schedule, or widths of another model or order.
    """
    opened = open_store(store)
    layout = opened.layout
    evictions = make_policy(policy, CacheShape(layout.num_layers, layout.num_experts, layout.blocks))
    get_schedule(schedule)  # an unknown one is refused before the work
    bound = widest(widths) if isinstance(widths, WidthPlan) else None
    import_transformers()
    from coterie.offloading.flights import require_timeout
    from coterie.offloading.places import Places
    from coterie.offloading.runtime import Runtime
    from coterie.ops.neuron_records import biases_of, gate_of

    require_timeout(timeout)
    places = Places(opened, device, bound, threads)
    blocks = budget_blocks(budget, layout, places.free_bytes(), bound, places.beside_bytes)
    model = places.put(load_skeleton(opened.skeleton))
    layers = _layers(model, opened)
    choice = _choice(model, opened, widths, use_cached, skip_misses)
    gates, scales = [gate_of(layer.experts) for layer in layers], _scales(opened, model.device)
    biases = [biases_of(layer.experts, scales[layer.index]) for layer in layers]
    cache = ExpertCache(evictions.shape, blocks, evictions)
    memory, link = places.memory_and_link(blocks, check, direct, bandwidth, timeline, timeout)
    runtime = Runtime(
        opened, cache, memory, link, gates, choice, schedule, timeout, ahead, check, timeline, bandwidth,
        biases, observe, pieces,
    )  # fmt: skip
    for layer in layers:
        _replace_forward(layer, runtime, timeline)
    model.stats, model.close, model.warm = runtime.stats, runtime.close, runtime.warm
    weakref.finalize(model, runtime.close)
    return model


def _scales(store: ExpertStore, device: Any) -> list[Tensor | None]:
    """Each layer's scales [E, 3, I]; None where the store has none."""
    if store.scale_LE3I is None:
        return [None] * store.layout.num_layers
    from torch import from_numpy

    return [from_numpy(scale_E3I).to(device) for scale_E3I in store.scale_LE3I]


def _layers(model: Any, store: ExpertStore) -> list[MoELayer]:
    """The skeleton's MoE layers; a store whose experts are not theirs is refused."""
    layers, layout, identity = find_moe_layers(model), store.layout, identity_of(model)
    found = (len(layers), layers[0].num_experts)
    if identity != store.header.identity or found != (layout.num_layers, layout.num_experts):
        raise CheckpointError(
            f"{store.folder} holds the experts of the model {store.header.spec.model} with identity "
            f"{store.header.identity}, its skeleton has {identity}: they are of different models; pack the model again"
        )
    return layers


def _choice(
    model: Any, store: ExpertStore, widths: WidthPlan | Widths | None, use_cached: bool | WidthPlan | Widths,
    skip_misses: float | None,
) -> WidthChoice:  # fmt: skip
    """How wide slots run."""
    from coterie.offloading.width_choice import WidthChoice

    if use_cached and widths is None:
        raise ConfigError("use_cached widens planned widths, and whole experts have no wider ones; give widths")
    planned, most = _widths(model, store, widths), _most(model, store, use_cached)
    return WidthChoice(store.layout.width, store.layout.block_neurons, planned, most, skip_misses)


def _widths(model: Any, store: ExpertStore, widths: WidthPlan | Widths | None) -> Widths | None:
    if not isinstance(widths, WidthPlan):
        return widths
    from coterie.ops.value_widths import host_widths
    from coterie.ops.widths import WidthTables

    layout, order = store.layout, getattr(model.config, ORDER_KEY, None)
    if widths.identity != store.header.identity:
        raise ConfigError(
            f"the width plan is of the model {widths.spec.model} with identity {widths.identity}, the store of "
            f"{store.header.identity}; profile this model and plan its widths from that"
        )
    if order != order_digest(widths.order_LEI) or widths.width != layout.width:
        raise ConfigError(
            f"the store has {layout.width} neurons an expert in the order {order or 'of the original'}, the width plan "
            f"is for {widths.width} in the order {order_digest(widths.order_LEI)}; pack with the plan's own profile"
        )
    return host_widths(WidthTables.of(widths, model.device))


def _most(model: Any, store: ExpertStore, use_cached: bool | WidthPlan | Widths) -> Widths | None:
    """Up to what width resident neurons run."""
    if not isinstance(use_cached, bool):
        return _widths(model, store, use_cached)
    width = store.layout.width
    return (lambda layer, ids_TK, weights_TK: ids_TK * 0 + width) if use_cached else None


def _replace_forward(layer: MoELayer, runtime: Runtime, timeline: Timeline | None) -> None:
    """The experts run from the store; hooks run as ever, since they are called around it."""
    experts: Any = layer.experts
    index = layer.index

    @functools.wraps(experts.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden_TH, ids_TK, weights_TK = (*args, *kwargs.values())
        began = time.perf_counter()
        output = runtime.run(index, hidden_TH, ids_TK, weights_TK)
        if timeline is not None:
            timeline.add(LAYER, f"layer {index}", began, time.perf_counter(), rows=len(hidden_TH))
        return output

    experts.forward = forward
