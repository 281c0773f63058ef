"""What a model that runs from a store has done so far."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass
class OffloadStats:
    """Counts and times since the model was made.

    Attributes:
        policy: what decides evictions.
        schedule: what orders one layer's loads.
        budget_bytes: the most that experts may take, bytes.
        peak_expert_bytes: the most that they took, loads under way included.
        layer_visits: forward passes of an MoE layer.
        hits: experts asked for that were resident as wide as needed.
        misses: the others.
        chosen_bytes: what full offload would have read: every expert that a visit chose, whole.
        loaded_bytes: what was read.
        ahead_bytes: of these, what was begun before the layer that needs it was reached; its experts count as hits.
        gathered_bytes: what was copied together within a device, because experts lay scattered there; 0 on the host.
        load_seconds: while any read was under way.
        exposed_seconds: while computation waited for a read.
        compute_seconds: computing experts and adding up their outputs.
        lookup_seconds: choosing planned widths.
        coordination_seconds: all else but waiting: the cache, its policy, schedule, beginning reads, grouping slots.
        skipped: slots that missed and were not run, with `skip_misses`.
        computed_bytes: of the weights that ran, an expert once a visit; beside `chosen_bytes`, how much was computed.
        use_cached: whether what is resident ran beyond the planned widths; outputs then depend on what is resident.
        skip_misses: F of what was skipped on a miss; None: nothing. With F, too, outputs depend on it.
        direct: whether reads went around the page cache.
        emulated_bandwidth: bytes per second of a throttled link; None: the real one.
    """

    policy: str
    schedule: str
    budget_bytes: int
    peak_expert_bytes: int = 0
    layer_visits: int = 0
    hits: int = 0
    misses: int = 0
    chosen_bytes: int = 0
    loaded_bytes: int = 0
    ahead_bytes: int = 0
    gathered_bytes: int = 0
    load_seconds: float = 0.0
    exposed_seconds: float = 0.0
    compute_seconds: float = 0.0
    lookup_seconds: float = 0.0
    coordination_seconds: float = 0.0
    skipped: int = 0
    computed_bytes: int = 0
    use_cached: bool = False
    skip_misses: float | None = None
    direct: bool = True
    emulated_bandwidth: float | None = None

    @property
    def miss_ratio(self) -> float:
        """Share of the experts asked for that missed."""
        return self.misses / max(1, self.hits + self.misses)

    @property
    def bytes_share(self) -> float:
        """Bytes read as a share of full offload."""
        return self.loaded_bytes / max(1, self.chosen_bytes)

    @property
    def overlap(self) -> float:
        """Share of the load time that computation hid; 1 without loads."""
        return 1.0 if self.load_seconds <= 0 else max(0.0, 1 - self.exposed_seconds / self.load_seconds)

    @property
    def attainable_overlap(self) -> float:
        """What computing experts can hide: its time over the load time, at most 1.

        What is read ahead, and what is still being read between two layers, hides behind the rest of the model too.
        """
        return 1.0 if self.load_seconds <= 0 else min(1.0, self.compute_seconds / self.load_seconds)

    def since(self, before: OffloadStats) -> OffloadStats:
        """What happened after `before`; the peak stays that of the whole time."""
        names = (
            "layer_visits", "hits", "misses", "chosen_bytes", "loaded_bytes", "ahead_bytes", "gathered_bytes",
            "load_seconds", "exposed_seconds", "compute_seconds", "lookup_seconds", "coordination_seconds", "skipped",
            "computed_bytes",
        )  # fmt: skip
        return replace(self, **{name: getattr(self, name) - getattr(before, name) for name in names})

    def to_json(self) -> dict[str, object]:
        """A plain dictionary, ready for JSON."""
        derived = ("miss_ratio", "bytes_share", "overlap", "attainable_overlap")
        return {**vars(self), **{name: getattr(self, name) for name in derived}}
