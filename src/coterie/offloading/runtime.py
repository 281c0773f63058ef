"""The experts of a model, run from a store: what a layer needs is loaded while what is there already computes.

Shapes: T tokens, K top-k, N experts of a visit, H hidden size.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from coterie.checkpoint.expert_store import ExpertStore
from coterie.checkpoint.store_layout import PARTS, StoreLayout
from coterie.errors import BudgetError, CheckpointError, ConfigError
from coterie.offloading.ahead import Ahead, next_of_sweep, sweeps
from coterie.offloading.demand import fill_demand
from coterie.offloading.flights import Flights
from coterie.offloading.link import Link, blocks_a_read
from coterie.offloading.load_order import LoadOrder, Rates
from coterie.offloading.memory import TYPES, Memory
from coterie.offloading.pieces import PiecewiseExpert
from coterie.offloading.stats import OffloadStats
from coterie.offloading.timeline import COMPUTE, Timeline
from coterie.offloading.visit import Visit, no_expert
from coterie.offloading.warming import Visits, warm
from coterie.offloading.width_choice import Slots, WidthChoice
from coterie.ops.gated_ffn import Group
from coterie.ops.neuron_records import Biases, Gate, run_record
from coterie.policies.cache import ExpertCache

Observe = Callable[[int, Tensor, Tensor, Tensor], None]
"""(layer, ids [T, K], weights [T, K], widths [T, K] that run, in neurons); the tensors are the callee's to keep."""


class Runtime:
    """Runs layers' experts within a budget; one computation at a time, reads by the link's threads.

    A visit: plan widths; ask the cache; start the loads in the schedule's order; compute whatever is there, pieces of
    experts too, waiting only when nothing is; sum each token's slots in their order. So outputs do not depend on what
    was resident, on the schedule or on the budget, unless the choice of widths does (`WidthChoice`).

    Source: CRISP §3.4, §4; neuron blocks, prefixes and Johnson's order go beyond the paper.

    Args:
        store: where experts are.
        cache: what may stay; its shape is the store's.
        memory: where they are put.
        link: what brings them.
        gates: each layer's (gate and up [N, 2k]) -> [N, k].
        choice: how wide slots run.
        schedule: name of the order of a layer's loads.
        timeout: seconds to wait for a load, or for the next piece of an expert, at most.
        ahead: begin to read what the next layer probably needs while the link is idle.
        check: compare every expert's output with one from a fresh copy of its weights: slow, for tests.
        timeline: told of every computation and wait.
        emulated_bandwidth: of the link, bytes per second, to be told; None: it is real.
        biases: each layer's; None: no expert has any.
        observe: told of every visit's widths as they run.
        pieces: compute pieces of experts while others arrive, where the memory allows.
    """

    def __init__(
        self, store: ExpertStore, cache: ExpertCache, memory: Memory, link: Link, gates: Sequence[Gate],
        choice: WidthChoice | None = None, schedule: str = "johnson", timeout: float = 60.0, ahead: bool = False,
        check: bool = False, timeline: Timeline | None = None, emulated_bandwidth: float | None = None,
        biases: Sequence[Biases | None] | None = None, observe: Observe | None = None,
        pieces: bool = True,
    ) -> None:  # fmt: skip
        self._store, self._cache, self._memory, self._link = store, cache, memory, link
        self._layout: StoreLayout = store.layout
        self._gates, self._observe = gates, observe
        self._biases = biases if biases is not None else [None] * store.layout.num_layers
        self._limits = (self._layout.num_experts, self._layout.width)
        piece_blocks = blocks_a_read(self._layout) if pieces and memory.piecewise else self._layout.blocks
        self._piece_neurons = piece_blocks * self._layout.block_neurons
        self._choice = choice or WidthChoice(self._layout.width, self._layout.block_neurons)
        self._need_E, self._rows_E = (np.zeros(self._layout.num_experts, np.int32) for _ in range(2))
        self._asked_N3 = np.zeros((self._layout.num_experts, 3), np.int64)
        self._check, self._timeline = check, timeline
        # how much is read ahead of a prompt is a matter of time, and must not change what is computed
        self._may_sweep = not self._choice.uses_cached and self._choice.skip_misses is None
        self._ahead = Ahead(cache) if ahead and store.layout.num_layers > 1 else None
        self._lock = threading.Lock()
        self._rates = Rates()
        self._order = LoadOrder(schedule, self._layout.block_bytes, self._rates)
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
        self._flights = Flights(cache, memory, link, self._layout, self._rates, self._stats, timeout, timeline)

    def stats(self) -> OffloadStats:
        """What happened so far."""
        link, gathered = self._link, self._memory.gathered_bytes
        told = replace(self._stats, loaded_bytes=link.loaded_bytes, load_seconds=link.busy_seconds, direct=link.direct)
        return replace(told, gathered_bytes=gathered)

    def warm(self, visits: Visits) -> None:
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
            if self._flights.failed is not None:
                raise self._flights.failed
            if self._cache.used_blocks:
                raise ConfigError("the model has run already; warm one that was just made")
            warm(self._cache, self._flights, self._ahead, visits)

    def close(self) -> None:
        """End the link's threads and give the experts' memory back; the model cannot run afterwards."""
        with self._lock:
            self._flights.close()

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
            if self._flights.failed is not None:
                raise self._flights.failed
            stats, began = self._stats, time.perf_counter()
            slots = self._choice.plan(layer, ids_TK, weights_TK)
            planned, elsewhere = time.perf_counter(), stats.exposed_seconds + stats.compute_seconds
            try:
                output_TH = self._serve(layer, hidden_TH, slots)
            except BaseException:
                self._flights.abandon()
                raise
            stats.lookup_seconds += planned - began
            elsewhere = stats.exposed_seconds + stats.compute_seconds - elsewhere
            stats.coordination_seconds += time.perf_counter() - planned - elsewhere
        return output_TH

    def _serve(self, layer: int, hidden_TH: Tensor, slots: Slots) -> Tensor:
        """Load and compute what a visit needs, in whatever order works out; [T, H]."""
        visit, flights = self._demand(layer, slots), self._flights
        flights.keep_only(layer, visit.need)
        if self._ahead is not None:
            self._ahead.idle_until(time.perf_counter())
            self._ahead.observe(layer, visit.need_E)
        order = self._order.of(visit, self._cache.reserved_LE[layer])
        whole = self._look_up(visit, order)
        if whole:
            self._choice.widen(slots, self._cache.arrived_LE[layer], self._cache.pinned_LE[layer])
        visit.group(hidden_TH, slots.ids_TK, slots.widths_TK, self._limits)
        if self._observe is not None:
            self._observe(layer, slots.ids_TK.clone(), slots.weights_TK.clone(), slots.widths_TK.clone())
        outputs = {index: visit.work.outputs(index, no_expert) for index in visit.idle}
        pending = deque(PiecewiseExpert(visit, expert, self._piece_neurons) for expert in order)
        admitted = deque[PiecewiseExpert]()
        if whole:  # what needs nothing, and runs what is resident, comes first
            free = [each for each in visit.groups_of if each not in visit.need]
            admitted.extend(PiecewiseExpert(visit, expert, self._piece_neurons) for expert in free)
            admitted.extend(pending)
            pending.clear()
        while admitted or pending:
            while pending and self._admit(visit, pending[0].expert):
                admitted.append(pending.popleft())
            if not admitted:
                if self._let_go(layer, pending):
                    continue
                self._refuse(layer, pending[0].expert, visit.need[pending[0].expert])
            job = self._next(layer, admitted)
            if not pending and flights.idle:
                self._look_ahead(visit, whole)
            self._compute(visit, job)
            if not job.done:
                continue
            admitted.remove(job)
            flights.finish(layer, job.expert)
            outputs |= job.outputs
            if not whole:
                self._cache.release(layer, job.expert)
        self._cache.used(layer)
        return self._combined(visit, outputs, slots.weights_TK)

    def _let_go(self, layer: int, pending: Iterable[PiecewiseExpert]) -> bool:
        """Let what is resident of experts that wait for room be evicted; whether any of it could not be."""
        held = self._cache.pinned_LE[layer]
        waiting = [job.expert for job in pending if held[job.expert]]
        held[waiting] = 0
        return bool(waiting)

    def _next(self, layer: int, admitted: Sequence[PiecewiseExpert]) -> PiecewiseExpert:
        """The first expert whose next piece is there; waits for the first expert's when none is."""
        flights, blocks_of = self._flights, self._layout.blocks_of
        if not flights.any:
            return admitted[0]
        for job in admitted:
            if flights.is_here(layer, job.expert, blocks_of(job.end)):
                return job
        flights.wait_for(layer, admitted[0].expert, blocks_of(admitted[0].end))
        return admitted[0]

    def _refuse(self, layer: int, expert: int, blocks: int) -> NoReturn:
        """Not even one expert fits."""
        raise BudgetError(
            f"a budget of {self._stats.budget_bytes:,} bytes does not hold expert {expert} of layer {layer}, "
            f"{blocks * self._layout.block_bytes:,} bytes as wide as it runs; the smallest workable one holds that"
        )

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

    def _look_ahead(self, visit: Visit, whole: bool) -> None:
        """With nothing else to read, begin with an expert of the next layer, if there is room.

        A prompt that uses most of a layer's experts will most of the next one's, so all are read; else, where that is
        wanted, the likeliest.
        """
        after, block_bytes = (visit.layer + 1) % self._layout.num_layers, self._layout.block_bytes
        sweeping = after > 0 and self._may_sweep and sweeps(visit, self._layout.num_experts)
        if sweeping:
            wanted = next_of_sweep(visit, self._cache, after)
        elif self._ahead is not None and whole:
            self._ahead.idle_from(time.perf_counter())
            wanted = self._ahead.wanted(after, self._ahead.worth_reading(self._rates.loading, block_bytes))
        else:
            return
        if wanted is None:
            return
        keep = after if sweeping else self._layout.num_layers
        decision = self._cache.prefetch(after, np.array(wanted[:1]), np.array(wanted[1:]), keep)
        if decision is not None:
            self._flights.start(decision, wanted[:1])
            self._stats.ahead_bytes += decision.loaded_blocks * block_bytes

    def _look_up(self, visit: Visit, order: list[int]) -> bool:
        """Let the policy learn the visit, and start all its loads if they fit together; whether they did.

        If not, those of which something is there come first in the order.
        """
        self._stats.layer_visits += 1
        self._stats.misses += visit.missing
        self._stats.hits += len(visit.need) - visit.missing
        self._stats.chosen_bytes += visit.chosen * self._layout.record_bytes
        try:
            decision = self._cache.lookup_need(visit.layer, visit.need_E)
        except BudgetError:
            self._flights.keep_only(visit.layer, ())  # what was read ahead is pinned, and could leave no room
            self._cache.used(visit.layer)
            for expert, blocks in visit.need.items():  # what is there already must not make room for the others
                self._cache.pinned_LE[visit.layer, expert] = min(blocks, self._cache.reserved_LE[visit.layer, expert])
            order.sort(key=lambda expert: self._cache.reserved_LE[visit.layer, expert] == 0)
            return False
        self._flights.start(decision, order)
        return True

    def _admit(self, visit: Visit, expert: int) -> bool:
        """Start one expert's load if there is room now; for visits that do not fit whole, as long prompts'."""
        blocks = visit.need[expert]
        decision = self._cache.prefetch(visit.layer, np.array([expert]), np.array([blocks]))
        if decision is None:
            return False
        self._flights.start(decision, [expert])
        return True

    def _compute(self, visit: Visit, job: PiecewiseExpert) -> None:
        """The next piece of an expert."""
        began, first, end, expert = time.perf_counter(), job.first, job.end, job.expert
        record, gate = self._memory.record(visit.layer, expert), self._gates[visit.layer]
        biases = self._biases[visit.layer]

        def run(first: int, end: int, x_NH: Tensor, width_N: Tensor | None) -> Tensor:
            output = run_record(record, end, gate, x_NH, width_N, biases, expert, first)
            if self._check:
                fresh = self._fresh(visit.layer, expert, end).to(output.device)
                if not torch.equal(output, run_record(fresh, end, gate, x_NH, width_N, biases, expert, first)):
                    raise CheckpointError(
                        f"layer {visit.layer}, expert {expert} was computed with other weights than the store's; "
                        "report this"
                    )
            return output

        job.compute(run)
        ended, rows = time.perf_counter(), job.rows
        self._stats.compute_seconds += ended - began
        if self._timeline is not None:
            name = f"layer {visit.layer} expert {expert}"
            self._timeline.add(COMPUTE, name, began, ended, neurons=end - first, rows=rows)
        used = (self._layout.blocks_of(end) - self._layout.blocks_of(first)) * self._layout.block_bytes
        self._stats.computed_bytes += used
        self._rates.computed(used * rows, ended - began)

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
