"""Destination pruning on what routers choose: the rules of `ops`, tables and counts on the device, graph safe.

Nothing waits for the device and every shape depends on shapes alone. How many of a step's rows are tokens is a tensor,
which is set before the step: a captured graph's padding, warm-up and profiling do not count.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from coterie.errors import ConfigError
from coterie.ops.prune_choice import devices_of, pruning_rule
from coterie.ops.prune_destinations import Links
from coterie.ops.prune_layer import prune
from coterie.ops.prune_stats import PruneStats, num_sums, stats_of
from coterie.ops.prune_sums import sums_of
from coterie.pruning.destinations import Priced
from coterie.vllm_plugin.config import PluginConfig
from coterie.vllm_plugin.engine import Engine


class RouterPruning:
    """Prunes the decisions of every MoE layer of one rank.

    Attributes:
        rule: the rule, with its strength.
        topology: devices and link costs.
        renormalise: whether kept weights are rescaled.
        home: the device of all tokens, or None.
    """

    def __init__(self, config: PluginConfig, engine: Engine, device: torch.device | str = "cpu") -> None:
        assert config.prune is not None
        asked, self.home = config.prune, engine.home
        device_LE, self.topology = devices_of(
            engine.spec, config.placement, engine.topology(config), engine.expert_order
        )
        num_devices = self.topology.num_devices
        self.rule = pruning_rule(asked.rule, asked.p, asked.thetas, asked.floor, (engine.spec.num_layers, num_devices))
        renormalise = engine.renormalises if asked.renormalise is None else asked.renormalise
        if renormalise is None:
            raise ConfigError(
                "this model's router does not say whether it renormalises its top-k weights; say renormalise: true or "
                f"false under prune in {config.source}"
            )
        self.renormalise, self._drops, self._engine = renormalise, engine.drops, engine
        self._device_LE = torch.tensor(device_LE, device=device)
        self._links = Links.of(self.topology.cost_matrix(), device)
        theta_LG = self.rule.theta_LG if isinstance(self.rule, Priced) else None
        self._theta_LG = None if theta_LG is None else torch.tensor(theta_LG, dtype=torch.float32, device=device)
        self._home_1 = None if self.home is None else torch.tensor([self.home], device=device)
        self._tokens_1 = torch.zeros(1, dtype=torch.int64, device=device)  # of the step that runs
        layers = engine.spec.num_layers
        self._seen_L = torch.zeros(layers, dtype=torch.int64, device=device)
        self._sums_LS = torch.zeros(layers, num_sums(num_devices), dtype=torch.float64, device=device)

    def begin_step(self, num_tokens: int) -> None:
        """The next forward call holds so many tokens of this rank's; its other rows do not count."""
        self._tokens_1.fill_(num_tokens)

    def end_step(self) -> None:
        """Until the next `begin_step` nothing counts."""
        self._tokens_1.fill_(0)

    def decide(self, layer: int, weight_TK: Tensor, ids_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A layer's decisions after pruning.

        Args:
            layer: which MoE layer.
            weight_TK: [T, K] float, the router's weights.
            ids_TK: [T, K] signed integers, its experts.

        Returns:
            Weights, zero for dropped slots; ids, -1 for dropped slots where the all-to-all skips those, else as they
            were; and which slots are kept, [T, K] bool.
        """
        home_T = None if self._home_1 is None else self._home_1.expand(len(ids_TK))
        theta_G = None if self._theta_LG is None else self._theta_LG[layer]
        pruned = prune(
            self.rule, ids_TK, weight_TK, self._device_LE[layer], home_T, self._links, theta_G,
            renormalise=self.renormalise,
        )  # fmt: skip
        counted_T = self._counted(len(ids_TK))
        self._seen_L[layer] += counted_T.sum()
        self._sums_LS[layer] += sums_of(
            pruned.device_TK, weight_TK, pruned.kept_TK, home_T, self.topology.num_devices, counted_T
        )
        out_TK = ids_TK.masked_fill(~pruned.kept_TK, -1) if self._drops else ids_TK
        return pruned.weight_TK.contiguous(), out_TK, pruned.kept_TK

    def stats(self) -> PruneStats:
        """What was pruned so far; waits for the device.

        Raises:
            ConfigError: when the layers were not run on the same tokens.
        """
        seen = self._seen_L.cpu().numpy()
        if (seen != seen[0]).any():
            raise ConfigError(f"MoE layers saw {seen.min()} to {seen.max()} tokens; means need every layer to see all")
        return stats_of(np.asarray(self._sums_LS.cpu().numpy()), int(seen[0]))

    def _counted(self, rows: int) -> Tensor:
        """Which rows are tokens, [T] bool."""
        if self._engine.gathers_first:  # other ranks' rows lie between this one's
            return (self._tokens_1 > 0).expand(rows)
        first = self._engine.shard * rows
        return torch.arange(first, first + rows, device=self._tokens_1.device) < self._tokens_1
