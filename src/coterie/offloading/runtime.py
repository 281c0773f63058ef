"""The experts of a model, run from a store: what a layer needs is loaded while what is there already computes.

Shapes: T tokens, K top-k, N experts of a visit, H hidden size.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.checkpoint.expert_store import ExpertStore
from coterie.checkpoint.store_layout import PARTS, StoreLayout
from coterie.errors import BudgetError, CheckpointError, ConfigError, CoterieError
from coterie.offloading.ahead import Ahead
from coterie.offloading.demand import fill_demand
from coterie.offloading.link import Link, Load
from coterie.offloading.memory import TYPES, Memory
from coterie.offloading.stats import OffloadStats
from coterie.offloading.timeline import COMPUTE, WAIT, Timeline
from coterie.offloading.visit import Visit, no_expert
from coterie.offloading.width_choice import Slots, WidthChoice
from coterie.ops.gated_ffn import Group
from coterie.ops.neuron_records import Biases, Gate, run_record
from coterie.policies.cache import Decision, ExpertCache
from coterie.policies.schedule import get_schedule

Observe = Callable[[int, Tensor, Tensor, Tensor], None]
"""(layer, ids [T, K], weights [T, K], widths [T, K] that run, in neurons); the tensors are the callee's to keep."""
_REMEMBERED = 0.8  # of a rate, from one measurement to the next


class Runtime:
    """Runs layers' experts within a budget; one computation at a time, reads by the link's threads.

    A visit: plan widths; ask the cache; start the loads in the schedule's order; compute whatever is there, waiting
    only when nothing is; sum each token's slots in their order. So outputs do not depend on what was resident, on the
    schedule or on the budget, unless the choice of widths does (`WidthChoice`).

    Source: CRISP §3.4, §4; neuron blocks, prefixes and Johnson's order go beyond the paper.

    Args:
        store: where experts are.
        cache: what may stay; its shape is the store's.
        memory: where they are put.
        link: what brings them.
        gates: each layer's (gate and up [N, 2k]) -> [N, k].
        choice: how wide slots run.
        schedule: name of the order of a layer's loads.
        timeout: seconds that a load may take, at most.
        ahead: begin to read what the next layer probably needs while the link is idle.
        check: compare every expert's output with one from a fresh copy of its weights: slow, for tests.
        timeline: told of every computation and wait.
        emulated_bandwidth: of the link, bytes per second, to be told; None: it is real.
        biases: each layer's; None: no expert has any.
        observe: told of every visit's widths as they run.
    """

    def __init__(
        self, store: ExpertStore, cache: ExpertCache, memory: Memory, link: Link, gates: Sequence[Gate],
        choice: WidthChoice | None = None, schedule: str = "johnson", timeout: float = 60.0, ahead: bool = False,
        check: bool = False, timeline: Timeline | None = None, emulated_bandwidth: float | None = None,
        biases: Sequence[Biases | None] | None = None, observe: Observe | None = None,
    ) -> None:  # fmt: skip
        if not timeout > 0:
            raise ConfigError(f"timeout = {timeout}; it must be positive")
        self._store, self._cache, self._memory, self._link = store, cache, memory, link
        self._layout: StoreLayout = store.layout
        self._gates, self._order, self._observe = gates, get_schedule(schedule), observe
        self._biases = biases if biases is not None else [None] * store.layout.num_layers
        self._limits = (self._layout.num_experts, self._layout.width)
        self._choice = choice or WidthChoice(self._layout.width, self._layout.block_neurons)
        self._need_E, self._rows_E = (np.zeros(self._layout.num_experts, np.int32) for _ in range(2))
        self._asked_N3 = np.zeros((self._layout.num_experts, 3), np.int64)
        self._timeout, self._check, self._timeline = timeout, check, timeline
        self._flying: dict[tuple[int, int], list[Load]] = {}
        self._ahead = Ahead(cache) if ahead and store.layout.num_layers > 1 else None
        self._failed: CoterieError | None = None
        self._lock = threading.Lock()
        self._rates = [1e9, 1e10]  # bytes per second of loads and of computing one row: a guess until measured
        budget = cache.budget_blocks * self._layout.block_bytes + memory.beside_bytes
        self._stats = OffloadStats(
            cache.policy.name,
            schedule,
            budget,
            direct=link.direct,
            emulated_bandwidth=emulated_bandwidth,
            use_cached=self._choice.uses_cached,
            skip_misses=self._choice.skip_misses,
        )

    def stats(self) -> OffloadStats:
        """What happened so far."""
        link, gathered = self._link, self._memory.gathered_bytes
        told = replace(self._stats, loaded_bytes=link.loaded_bytes, load_seconds=link.busy_seconds, direct=link.direct)
        return replace(told, gathered_bytes=gathered)

    def warm(self, visits: Iterable[tuple[int, NDArray[Any], NDArray[Any]]]) -> None:
        """Be as if these visits had been: the policy learns them all, and what it would hold by then is read.

        A benchmark so begins in the state that minutes of reading would lead to.

        Args:
            visits: in order, (layer, experts [N], how many of its first blocks each runs [N]).

        Raises:
            BudgetError: when a visit does not fit.
            CheckpointError: when a read fails or does not end in time, or a block is corrupted.
            ConfigError: when something has run already.
        """
        with self._lock:
            if self._failed is not None:
                raise self._failed
            if self._cache.used_blocks or self._flying:
                raise ConfigError("the model has run already; warm one that was just made")
            for layer, experts_N, blocks_N in visits:
                self._pass(layer, experts_N, blocks_N)
            held_LE = self._cache.arrived_LE.copy()
            self._cache.arrived_LE[:] = 0
            try:
                for layer, expert in np.argwhere(held_LE).tolist():
                    self._fetch(layer, expert, int(held_LE[layer, expert]))
            except BaseException:
                self._abandon()
                self._cache.cancel_all()
                raise
            peak = self._cache.used_blocks * self._layout.block_bytes + self._memory.beside_bytes
            self._stats.peak_expert_bytes = max(self._stats.peak_expert_bytes, peak)

    def _pass(self, layer: int, experts_N: NDArray[Any], blocks_N: NDArray[Any]) -> None:
        """What a visit leaves behind, without reading; one that does not fit whole goes expert by expert."""
        if self._ahead is not None:
            need_E = np.zeros(self._layout.num_experts, np.int32)
            np.maximum.at(need_E, experts_N, blocks_N)
            self._ahead.observe(layer, need_E)
        try:
            self._cache.serve(layer, experts_N, blocks_N)
        except BudgetError:
            self._cache.used(layer)
            for expert, blocks in zip(experts_N, blocks_N, strict=True):
                decision = self._cache.prefetch(layer, np.array([expert]), np.array([blocks]))
                if decision is None:
                    raise
                self._cache.loaded(layer, decision.loads_N3)
                self._cache.release(layer, int(expert))

    def _fetch(self, layer: int, expert: int, blocks: int) -> None:
        """Read the first blocks of an expert, whose memory is reserved, and wait for them."""
        into = self._memory.buffer(layer, expert, 0, blocks)
        self._flying[layer, expert] = [self._link.read(layer, expert, 0, blocks, into)]
        self._await(layer, expert)

    def close(self) -> None:
        """End the link's threads and give the experts' memory back; the model cannot run afterwards."""
        with self._lock:
            for load in (load for loads in self._flying.values() for load in loads):
                load.cancel()
            self._link.close()
            if self._failed is None:  # else a read that never ended may still write
                self._memory.clear()
                self._failed = ConfigError("the offloaded model was closed; make it again")

    def run(self, layer: int, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """A layer's experts on a batch of tokens.

        Returns:
            [T, H], dtype of `hidden_TH`.

        Raises:
            BudgetError: when one expert alone does not fit.
            CheckpointError: when a read fails or does not end in time, or a block is corrupted.
            ConfigError: when gradients are wanted, or a width cannot be.
        """
        if torch.is_grad_enabled() and hidden_TH.requires_grad:
            raise ConfigError("offloaded experts do not train; run the model under torch.inference_mode()")
        with self._lock:
            if self._failed is not None:
                raise self._failed
            stats, began = self._stats, time.perf_counter()
            slots = self._choice.plan(layer, ids_TK, weights_TK)
            planned, elsewhere = time.perf_counter(), stats.exposed_seconds + stats.compute_seconds
            try:
                output_TH = self._serve(layer, hidden_TH, slots)
            except BaseException:
                self._abandon()
                raise
            stats.lookup_seconds += planned - began
            elsewhere = stats.exposed_seconds + stats.compute_seconds - elsewhere
            stats.coordination_seconds += time.perf_counter() - planned - elsewhere
        return output_TH

    def _serve(self, layer: int, hidden_TH: Tensor, slots: Slots) -> Tensor:
        """Load and compute what a visit needs, in whatever order works out; [T, H]."""
        visit = self._demand(layer, slots)
        self._settle(visit)
        order = self._ordered(visit)
        whole = self._look_up(visit, order)
        if whole:
            self._choice.widen(slots, self._cache.arrived_LE[layer], self._cache.pinned_LE[layer])
        visit.group(hidden_TH, slots.ids_TK, slots.widths_TK, self._limits)
        if self._observe is not None:
            self._observe(layer, slots.ids_TK.clone(), slots.weights_TK.clone(), slots.widths_TK.clone())
        outputs = {index: visit.work.outputs(index, no_expert) for index in visit.idle}
        pending, admitted = deque(order), deque[int]()
        if whole:  # what needs nothing, and runs what is resident, comes first
            pending, admitted = admitted, deque((*(each for each in visit.groups_of if each not in visit.need), *order))
        while admitted or pending:
            while pending and self._admit(visit, pending[0]):
                admitted.append(pending.popleft())
            if not admitted:
                needed = visit.need[pending[0]] * self._layout.block_bytes
                raise BudgetError(
                    f"a budget of {self._stats.budget_bytes:,} bytes does not hold expert {pending[0]} of layer "
                    f"{layer}, {needed:,} bytes as wide as it runs; the smallest workable one holds that"
                )
            expert = next((each for each in admitted if self._is_here(layer, each)), admitted[0])
            admitted.remove(expert)
            self._await(layer, expert)
            if whole:
                self._look_ahead(layer)
            outputs |= self._compute(visit, expert)
            if not whole:
                self._cache.release(layer, expert)
        self._cache.used(layer)
        return self._combined(visit, outputs, slots.weights_TK)

    def _demand(self, layer: int, slots: Slots) -> Visit:
        """What the slots ask of the cache; those that would miss may be skipped for it."""
        self._stats.skipped += self._choice.skip(slots, self._cache.reserved_LE[layer])
        ids_S, widths_S = slots.ids_S, slots.widths_S
        block, width = self._layout.block_neurons, self._layout.width
        count, chosen, wrong = fill_demand(
            ids_S, widths_S, block, width, self._need_E, self._rows_E, self._asked_N3
        )  # fmt: skip
        if wrong >= 0:
            Group(int(ids_S[wrong]), int(widths_S[wrong]), 1).require_within(self._limits)
        return Visit(layer, self._need_E, self._asked_N3[:count].tolist(), chosen)

    def _combined(self, visit: Visit, outputs: dict[int, Tensor], weights_TK: Tensor) -> Tensor:
        """The sums of all slots."""
        began = time.perf_counter()
        output_TH = visit.work.combine([outputs[index] for index in range(len(outputs))], weights_TK)
        self._stats.compute_seconds += time.perf_counter() - began
        return output_TH

    def _settle(self, visit: Visit) -> None:
        """Take back what was read ahead in vain; the policy of what is ahead learns the visit."""
        for layer, expert in list(self._flying):
            if layer != visit.layer or expert not in visit.need:
                self._take_back(layer, expert)
        if self._ahead is not None:
            self._ahead.idle_until(time.perf_counter())
            self._ahead.observe(visit.layer, visit.need_E)

    def _look_ahead(self, layer: int) -> None:
        """With nothing else to read, begin with the likeliest expert of the next layer, if there is room."""
        if self._ahead is None or any(not load.ended for loads in self._flying.values() for load in loads):
            return
        after = (layer + 1) % self._layout.num_layers
        self._ahead.idle_from(time.perf_counter())
        wanted = self._ahead.wanted(after, self._ahead.worth_reading(self._rates[0], self._layout.block_bytes))
        if wanted is None:
            return
        decision = self._cache.prefetch(after, np.array(wanted[:1]), np.array(wanted[1:]))
        if decision is not None:
            self._start(decision, wanted[:1])
            self._stats.ahead_bytes += decision.loaded_blocks * self._layout.block_bytes

    def _look_up(self, visit: Visit, order: Sequence[int]) -> bool:
        """Let the policy learn the visit, and start all its loads if they fit together; whether they did."""
        self._stats.layer_visits += 1
        self._stats.misses += visit.missing
        self._stats.hits += len(visit.need) - visit.missing
        self._stats.chosen_bytes += visit.chosen * self._layout.record_bytes
        try:
            decision = self._cache.lookup_need(visit.layer, visit.need_E)
        except BudgetError:
            for key in list(self._flying):  # what was read ahead is pinned, and could leave no room for the first
                self._take_back(*key)
            self._cache.used(visit.layer)
            return False
        self._start(decision, order)
        return True

    def _admit(self, visit: Visit, expert: int) -> bool:
        """Start one expert's load if there is room now; for visits that do not fit whole, as long prompts'."""
        blocks = visit.need[expert]
        decision = self._cache.prefetch(visit.layer, np.array([expert]), np.array([blocks]))
        if decision is None:
            return False
        self._start(decision, [expert])
        return True

    def _start(self, decision: Decision, order: Sequence[int]) -> None:
        """Carry out a decision: give memory back first, then begin to read."""
        if decision.loaded_blocks == 0:
            return
        for layer, expert, blocks in decision.evicted_N3.tolist():
            self._memory.evict(layer, expert, blocks)
        peak = self._cache.used_blocks * self._layout.block_bytes + self._memory.beside_bytes
        self._stats.peak_expert_bytes = max(self._stats.peak_expert_bytes, peak)
        rank = {expert: number for number, expert in enumerate(order)}
        for expert, first, end in sorted(decision.loads_N3.tolist(), key=lambda load: rank[load[0]]):
            into = self._memory.buffer(decision.layer, expert, first, end)
            load = self._link.read(decision.layer, expert, first, end, into)
            self._flying.setdefault((decision.layer, expert), []).append(load)

    def _is_here(self, layer: int, expert: int) -> bool:
        return all(load.ended for load in self._flying.get((layer, expert), ()))

    def _await(self, layer: int, expert: int) -> None:
        """Until an expert has arrived, and the cache knows."""
        loads = self._flying.get((layer, expert))
        if not loads:
            return
        began = time.perf_counter()
        for load in loads:
            self._end(load)
        ended = time.perf_counter()
        self._stats.exposed_seconds += ended - began
        if self._timeline is not None:
            self._timeline.add(WAIT, f"layer {layer} expert {expert}", began, ended)
        self._cache.loaded(layer, np.array([(expert, load.first, load.end) for load in loads]))
        del self._flying[layer, expert]
        self._measure(0, self._link.loaded_bytes, self._link.busy_seconds)

    def _end(self, load: Load) -> None:
        """Wait for a load; one that does not end makes the model unusable, since it may still write."""
        try:
            load.wait(self._timeout if self._failed is None else 0)
        except CheckpointError as error:
            if not load.ended:
                self._failed = self._failed or error
            raise

    def _take_back(self, layer: int, expert: int) -> None:
        """End an expert's loads, keep what arrived before the first that did not, and free the rest."""
        loads = self._flying.pop((layer, expert))
        for load in loads:
            if not load.ended:
                load.cancel()
        try:
            for load in loads:
                self._end(load)
                if load.cancelled:
                    break
                self._cache.loaded(layer, np.array([(expert, load.first, load.end)]))
        except CheckpointError:
            if self._failed is not None:
                raise  # otherwise the block is read, and told, again when something needs it
        self._cache.cancel(layer, np.array([expert]))
        self._memory.evict(layer, expert, int(self._cache.arrived_LE[layer, expert]))

    def _compute(self, visit: Visit, expert: int) -> dict[int, Tensor]:
        """The outputs of an expert's groups."""
        began = time.perf_counter()
        record, gate = self._memory.record(visit.layer, expert), self._gates[visit.layer]
        biases = self._biases[visit.layer]

        def run(_: int, width: int, x_NH: Tensor, width_N: Tensor | None) -> Tensor:
            output = run_record(record, width, gate, x_NH, width_N, biases, expert)
            if self._check:
                fresh = self._fresh(visit.layer, expert, width).to(output.device)
                if not torch.equal(output, run_record(fresh, width, gate, x_NH, width_N, biases, expert)):
                    raise CheckpointError(
                        f"layer {visit.layer}, expert {expert} was computed with other weights than the store's; "
                        "report this"
                    )
            return output

        outputs = {index: visit.work.outputs(index, run) for index in visit.groups_of[expert]}
        ended = time.perf_counter()
        self._stats.compute_seconds += ended - began
        if self._timeline is not None:
            name = f"layer {visit.layer} expert {expert}"
            self._timeline.add(COMPUTE, name, began, ended, neurons=visit.width_of(expert), rows=visit.rows_of(expert))
        used = self._layout.blocks_of(visit.width_of(expert)) * self._layout.block_bytes
        self._stats.computed_bytes += used
        self._measure(1, used * visit.rows_of(expert), ended - began)
        return outputs

    def _fresh(self, layer: int, expert: int, width: int) -> Tensor:
        """An expert's first neurons, read just now; the others are zero."""
        fresh = bytearray(self._layout.record_bytes)
        with self._store.experts_file.open("rb") as file:
            file.seek(self._layout.offset(layer, expert))
            nbytes = self._layout.span(0, self._layout.blocks_of(width))[1]
            fresh[:nbytes] = file.read(nbytes)
        shape = (self._layout.width, PARTS, self._layout.hidden_size)
        count = self._layout.width * PARTS * self._layout.hidden_size
        return torch.frombuffer(fresh, dtype=TYPES[self._layout.dtype], count=count).view(shape)

    def _ordered(self, visit: Visit) -> list[int]:
        """A visit's experts in the order to load and compute them."""
        reserved_E = self._cache.reserved_LE[visit.layer]
        short = [max(0, blocks - int(reserved_E[expert])) for expert, blocks in visit.need.items()]
        visit.missing = sum(blocks > 0 for blocks in short)
        experts = list(visit.need)
        if visit.missing == 0:
            return experts
        blocks_N = np.array(list(visit.need.values()))
        load_N = np.array(short) * (self._layout.block_bytes / self._rates[0])
        compute_N = blocks_N * np.array(visit.rows) * (self._layout.block_bytes / self._rates[1])
        return [experts[index] for index in self._order(load_N, compute_N, blocks_N).tolist()]

    def _measure(self, which: int, nbytes: float, seconds: float) -> None:
        """A rate, for the schedule alone."""
        if seconds > 0:
            now = nbytes / seconds
            self._rates[which] = _REMEMBERED * self._rates[which] + (1 - _REMEMBERED) * now

    def _abandon(self) -> None:
        """After an error: let no read go on into memory that something else may get, and free what did not arrive."""
        for layer, expert in list(self._flying):
            with suppress(CheckpointError):
                self._take_back(layer, expert)
        self._flying.clear()
        self._cache.pinned_LE[:] = 0
