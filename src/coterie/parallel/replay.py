"""Recorded routing, cut into steps that several ranks replay together.

Every rank has its own run of consecutive tokens, as data-parallel attention would give it, and takes the same number of
them in every step. L layers of the trace that are replayed, G ranks, T tokens of each rank, K top-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError
from coterie.placement.copies import FEWEST_DEVICES
from coterie.placement.step_time import LayerTime, StepCounts, StepModel, count_step, count_visits, devices_of
from coterie.pruning.destinations import LayerTokens, PruningRule
from coterie.topology import Topology
from coterie.trace.routing_trace import ALL_TOKENS, RoutingTrace, TokenSelector


@dataclass(frozen=True)
class Replay:
    """What every rank routes where, step by step.

    Attributes:
        layers: [L] which MoE layers of the trace.
        ids_LGTK: [L, G, T, K] chosen experts.
        weights_LGTK: [L, G, T, K] float32 routing weights; 1/K each where the trace has none.
        kept_LGTK: [L, G, T, K] bool, false where pruned.
        batch: tokens of a rank in one step; T is a multiple of it.
    """

    layers: tuple[int, ...]
    ids_LGTK: NDArray[np.int64]
    weights_LGTK: NDArray[np.float32]
    kept_LGTK: NDArray[np.bool_]
    batch: int

    @classmethod
    def of(
        cls,
        trace: RoutingTrace,
        num_devices: int,
        batch: int,
        tokens: TokenSelector = ALL_TOKENS,
        layers: Sequence[int] | None = None,
    ) -> Self:
        """Cut the selected tokens into one run for each device, of as many whole steps as there are tokens for.

        Args:
            trace: the routing.
            num_devices: G.
            batch: tokens of a rank in a step.
            tokens: which tokens.
            layers: which MoE layers; None: all.

        Raises:
            ConfigError: when the tokens do not fill one step.
        """
        chosen = np.arange(trace.num_tokens, dtype=np.int64)[tokens]
        steps = chosen.size // (num_devices * batch)
        if batch < 1 or steps < 1:
            raise ConfigError(
                f"{chosen.size} tokens do not fill a step of {batch} on each of {num_devices} ranks; "
                f"use --batch {max(1, chosen.size // num_devices)} at most, or a longer trace"
            )
        each = chosen.size // num_devices
        rows_GT = np.stack([chosen[rank * each : rank * each + steps * batch] for rank in range(num_devices)])
        which = tuple(range(trace.num_layers) if layers is None else layers)
        routing = [trace.layer(layer, rows_GT.ravel()) for layer in which]
        shape = (len(which), *rows_GT.shape, trace.spec.top_k)
        weights: NDArray[Any] = np.full(shape, 1 / trace.spec.top_k)
        if trace.weights is not None:
            weights = np.stack([np.asarray(each.weights_TK) for each in routing])
        kept = np.stack([each.kept() for each in routing])
        return cls(
            which, np.stack([each.expert_ids_TK for each in routing]).astype(np.int64).reshape(shape),
            weights.astype(np.float32).reshape(shape), kept.reshape(shape), batch,
        )  # fmt: skip

    @property
    def num_devices(self) -> int:
        """G."""
        return int(self.ids_LGTK.shape[1])

    @property
    def num_steps(self) -> int:
        """Steps that the tokens fill."""
        return int(self.ids_LGTK.shape[2]) // self.batch

    def pruned(self, rule: PruningRule, device_LE: NDArray[np.int64], topology: Topology) -> Self:
        """The same routing with a rule applied, as it is when experts live on these devices, [layers of the trace, E].

        Every rank is the home of its own tokens.
        """
        kept = np.empty_like(self.kept_LGTK)
        for row, layer in enumerate(self.layers):
            tokens = LayerTokens.of(
                self._flat(self.ids_LGTK[row]), self._flat(self.weights_LGTK[row]), self._flat(self.kept_LGTK[row]),
                device_LE[layer], self._homes(self.ids_LGTK.shape[2]), topology.cost_matrix(),
            )  # fmt: skip
            kept[row] = rule.prune_layer(layer, tokens).reshape(kept[row].shape)
        return replace(self, kept_LGTK=kept)

    def counts(
        self, step: int, device_LE: NDArray[Any], topology: Topology | None = None, rule: str = FEWEST_DEVICES
    ) -> list[StepCounts]:
        """What a step asks of the devices, layer by layer; `device_LE` [layers of the trace, E], or [.., E, G].

        `topology` is what the dispatch `rule` looks at, see `count_step`.
        """
        part = slice(step * self.batch, (step + 1) * self.batch)
        return [
            count_step(
                self._flat(self.ids_LGTK[row, :, part]), self._flat(self.kept_LGTK[row, :, part]), device_LE[layer],
                self._homes(self.batch), self.num_devices, topology, rule,
            )
            for row, layer in enumerate(self.layers)
        ]  # fmt: skip

    def predict(
        self, model: StepModel, device_LE: NDArray[Any], steps: Sequence[int] | None = None, rule: str = FEWEST_DEVICES
    ) -> list[LayerTime]:
        """Predicted times of steps (None: all), each the sum over the replayed layers."""
        return [
            model.step(self.counts(step, device_LE, model.topology, rule))
            for step in (range(self.num_steps) if steps is None else steps)
        ]

    def traffic(self, device_LE: NDArray[Any], topology: Topology, rule: str = FEWEST_DEVICES) -> dict[str, float]:
        """Means over the replayed layers of what is sent, per token: "remote_dpt", "peak_traffic" (of visits from other
        homes), "npt", nodes that a token visits, and "remote_npt", those of them that are not its own.
        """
        found: list[tuple[float, ...]] = []
        node_G, homes = topology.node_of_device(), self._homes(self.batch)
        num_tokens = self.num_devices * self.ids_LGTK.shape[2]
        for row, layer in enumerate(self.layers):
            remote_GG = np.zeros((self.num_devices, self.num_devices), dtype=np.int64)
            nodes = np.zeros((topology.num_nodes, topology.num_nodes), dtype=np.int64)
            for step in range(self.num_steps):
                part = slice(step * self.batch, (step + 1) * self.batch)
                ids, kept = self._flat(self.ids_LGTK[row, :, part]), self._flat(self.kept_LGTK[row, :, part])
                device_TK = devices_of(ids, kept, device_LE[layer], homes, topology, rule)
                remote_GG += count_visits(device_TK, kept, homes, self.num_devices).copies_GG
                nodes += count_visits(node_G[device_TK], kept, node_G[homes], topology.num_nodes).copies_GG
            np.fill_diagonal(remote_GG, 0)
            found.append((remote_GG.sum(), remote_GG.sum(axis=0).max(), nodes.sum(), nodes.sum() - np.trace(nodes)))
        means = np.mean(found, axis=0) / num_tokens
        return dict(zip(("remote_dpt", "peak_traffic", "npt", "remote_npt"), means.tolist(), strict=True))

    def kept_weight(self) -> float:
        """Mean share of a token's routing weight that is kept."""
        total = self.weights_LGTK.sum(axis=3, dtype=np.float64)
        kept = np.where(self.kept_LGTK, self.weights_LGTK, 0).sum(axis=3, dtype=np.float64)
        return float(np.divide(kept, total, out=np.ones_like(total), where=total > 0).mean())

    def _homes(self, tokens: int) -> NDArray[np.int64]:
        return np.repeat(np.arange(self.num_devices, dtype=np.int64), tokens)

    @staticmethod
    def _flat(values_GTK: NDArray[Any]) -> NDArray[Any]:
        return values_GTK.reshape(-1, values_GTK.shape[-1])


def spaced_layers(num_layers: int, count: int) -> tuple[int, ...]:
    """So many layers, evenly spaced, neither end."""
    spots = (np.arange(min(count, num_layers)) + 0.5) * num_layers / min(count, num_layers)
    return tuple(int(spot) for spot in spots)
