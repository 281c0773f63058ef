"""Destination pruning on a live model: tokens skip devices as they would where its experts are spread over some."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coterie.errors import ConfigError
from coterie.models.backend import import_transformers, kernel_module
from coterie.models.intercept import intercept
from coterie.models.layers import MoELayer, spec_of
from coterie.models.prune_counts import PruneCounter
from coterie.ops.prune_choice import devices_of, pruning_rule
from coterie.ops.prune_stats import PruneStats
from coterie.placement.numbering import EXPERT_ORDER_KEY
from coterie.placement.placement import Placement
from coterie.pruning.destinations import Priced, PruningRule
from coterie.spec import MoESpec
from coterie.topology import Topology

if TYPE_CHECKING:
    from torch import Tensor

Homes = Literal["rows"] | Sequence[int] | int | None
KERNELS = {"torch": "coterie.ops.prune_layer", "triton": "coterie.ops.prune_destinations_triton"}

# families whose chosen weights always, or never, sum to one; the others say so by `norm_topk_prob`
_RENORMALISES = {
    "mixtral": True, "ernie4_5_moe": True, "granitemoe": True, "gpt_oss": True, "deepseek_v2": False, "phimoe": False,
}  # fmt: skip


@contextmanager
def prune_destinations(
    model: Any,
    placement: Placement | None = None,
    p: float | None = None,
    rule: str | PruningRule = "cap",
    *,
    thetas: ArrayLike | None = None,
    floor: float = 0.0,
    topology: Topology | str | None = None,
    homes: Homes = "rows",
    renormalise: bool | None = None,
    count: bool | PruneCounter = True,
    kernel: str = "torch",
) -> Iterator[DestinationPruner]:
    """Drop destinations in every MoE layer while the block runs the model, in prefill and in generation.

    The experts of a dropped device get weight zero: outputs are those of a cluster that does not send the token
    there. No time is saved in one process, where the experts still run. p = 0 changes nothing, bit for bit. At the
    end, or on an error, the hooks are removed and the model is as it was. Padding is pruned, and counted, like any
    token.

    Source: CAP §VI; `priced` goes beyond it (see `coterie.pruning.destinations`).

    Args:
        model: a Transformers model.
        placement: where its experts live; None: in order on the devices of `topology`.
        p: for "cap" and "naive", the share of a token's weight that may be dropped, in [0, 1).
        rule: "cap", "naive", "priced", or a rule that was fitted on a trace (`pruning.fitting.fit_rule`).
        thetas: for "priced", [L, G], the least share of a token's weight that is worth one unit of cost.
        floor: for "priced", the least share of its weight that a token keeps.
        topology: without a placement, the devices.
        homes: where tokens' attention runs: "rows" for device `row mod G` of the batch, as traces have it by
            sequence; a device for each row, or one for all; None for no home, where every device costs 1.
        renormalise: rescale a token's kept weights to the sum of all K; None: as the model does with its top-k
            weights (see `renormalises`).
        count: keep the figures that `DestinationPruner.stats` gives; a counter sums them up over several blocks.
        kernel: "torch", or "triton" (experimental), which decides alike in one launch a layer, without gradients, for
            at most 16 experts a token and not in float64.

    Yields:
        The pruner.

    Raises:
        BackendUnavailable: when the kernel needs Triton and it is not installed.
        CheckpointError: when the model has no MoE layers that are recognised.
        ConfigError: for an unknown rule, one without its strength, homes that are no devices, a placement that
            numbers the experts otherwise than the model (`coterie bake`), an unknown kernel, or a model that it does
            not take: Triton's on a CPU, beyond top-16, or in float64.
        InfeasiblePlacement: when the placement is of another model or the experts do not fit the topology.
    """
    import_transformers()
    ops, spec = kernel_module(kernel, KERNELS, model), spec_of(model)
    device_LE, links = devices_of(spec, placement, topology, getattr(model.config, EXPERT_ORDER_KEY, None))
    pruner = DestinationPruner(
        spec, device_LE, links, pruning_rule(rule, p, thetas, floor, (spec.num_layers, links.num_devices)),
        _homes(homes, links.num_devices), renormalises(model) if renormalise is None else renormalise, count, ops,
    )  # fmt: skip
    with ExitStack() as stack:
        # the first block tells how many rows the flattened tokens are of
        layers = stack.enter_context(intercept(model, pruner.decide))
        stack.callback(layers[0].block.register_forward_pre_hook(pruner.see_batch, with_kwargs=True).remove)
        pruner.attach(layers)
        yield pruner


class DestinationPruner:
    """What `prune_destinations` yields.

    Attributes:
        rule: the rule, with its strength.
        topology: devices and link costs.
        device_LE: [L, E], the device of each expert.
        renormalise: whether kept weights are rescaled.
    """

    def __init__(
        self, spec: MoESpec, device_LE: NDArray[np.int64], topology: Topology, rule: PruningRule, homes: Homes,
        renormalise: bool, count: bool | PruneCounter, ops: Any,
    ) -> None:  # fmt: skip
        self.rule, self.topology, self.device_LE, self.renormalise = rule, topology, device_LE, renormalise
        self._torch = importlib.import_module("torch")
        self._ops, self._top_k = ops, spec.top_k  # ops: the module of the kernel
        self._homes = homes
        self._home_T: Any = None
        self._tables: list[tuple[Any, Any, Any]] = []  # of each layer: its experts' devices, links, thetas
        if isinstance(count, bool):
            self._counter = PruneCounter(spec.num_layers, topology.num_devices) if count else None
        else:
            self._counter = count

    def stats(self) -> PruneStats:
        """What was pruned so far.

        Raises:
            ConfigError: when nothing was counted.
        """
        if self._counter is None:
            raise ConfigError("nothing was counted: prune_destinations was given count=False; leave it out")
        return self._counter.stats()

    def attach(self, layers: Sequence[MoELayer]) -> None:
        """Put the tables beside each layer's router."""
        torch = self._torch
        links_of = importlib.import_module("coterie.ops.prune_destinations").Links.of
        for layer, device_E in zip(layers, self.device_LE, strict=True):
            beside = next(layer.router.parameters())
            self._ops.require_supported(self._top_k, beside.dtype)
            exact = torch.float64 if beside.dtype == torch.float64 else torch.float32
            theta_LG = self.rule.theta_LG if isinstance(self.rule, Priced) else None
            theta_G = None if theta_LG is None else torch.tensor(theta_LG[layer.index], dtype=exact)
            self._tables.append((
                torch.tensor(device_E, device=beside.device),
                links_of(self.topology.cost_matrix(), beside.device, exact),
                None if theta_G is None else theta_G.to(beside.device),
            ))  # fmt: skip
        if self._counter is not None:
            self._counter.attach([table[0].device for table in self._tables])

    def see_batch(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the first MoE layer: the home of every token of this forward call."""
        if self._homes is None:
            return
        torch = self._torch
        hidden = next(value for value in (*args, *kwargs.values()) if torch.is_tensor(value))
        rows, width = hidden.shape[:2] if hidden.dim() == 3 else (hidden.shape[0], 1)
        if self._homes == "rows":
            home_B = torch.arange(rows, device=hidden.device) % self.topology.num_devices
        elif isinstance(self._homes, int):
            home_B = torch.full((rows,), self._homes, device=hidden.device)
        elif len(self._homes) == rows:
            home_B = torch.tensor(self._homes, dtype=torch.int64, device=hidden.device)
        else:
            raise ConfigError(f"{len(self._homes)} homes for a batch of {rows} rows; give one for each")
        self._home_T = home_B.repeat_interleave(width, output_size=rows * width)

    def decide(self, layer: int, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
        """The same experts, with weight zero where they are dropped."""
        device_E, links, theta_G = self._tables[layer]
        home_T = None if self._home_T is None else self._home_T.to(device_E.device)
        pruned = self._ops.prune(
            self.rule, ids_TK, weights_TK, device_E, home_T, links, theta_G, renormalise=self.renormalise
        )
        if self._counter is not None:
            self._counter.add(layer, pruned.device_TK, weights_TK, pruned.kept_TK, home_T)
        return ids_TK, pruned.weight_TK


def renormalises(model: Any) -> bool:
    """Whether a model divides its chosen experts' weights by their sum (before any scaling factor).

    Mixtral, ERNIE 4.5, Granite and gpt-oss always do, DeepSeek-V2 and Phi-MoE never; the others by `norm_topk_prob`.

    Raises:
        ConfigError: for another family whose config does not say.
    """
    config = model.config.get_text_config()
    known = _RENORMALISES.get(str(config.model_type))
    says = getattr(config, "norm_topk_prob", None) if known is None else known
    if says is None:
        raise ConfigError(
            f"the config of model_type {config.model_type!r} does not say whether its top-k weights are renormalised; "
            "say renormalise=True or False"
        )
    return bool(says)


def _homes(homes: Any, num_devices: int) -> Homes:
    """The homes, checked."""
    if homes is None:
        return None
    if isinstance(homes, str):
        if homes != "rows":
            raise ConfigError(f"homes = {homes!r}; it is 'rows', a device for each row of the batch, or None")
        return "rows"
    devices = [int(home) for home in ([homes] if isinstance(homes, int) else homes)]
    wrong = [home for home in devices if not 0 <= home < num_devices]
    if wrong:
        raise ConfigError(f"home {wrong[0]} is no device: they run from 0 to {num_devices - 1}")
    return devices[0] if isinstance(homes, int) else devices
