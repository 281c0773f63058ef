"""What the plugin needs to know of the engine it is in; an adapter says it, and nothing else here knows vLLM."""

from __future__ import annotations

from dataclasses import dataclass

from coterie.errors import ConfigError
from coterie.spec import MoESpec
from coterie.topology import Topology
from coterie.vllm_plugin.backends import DROPS, GATHERS
from coterie.vllm_plugin.config import PluginConfig


@dataclass(frozen=True)
class Engine:
    """One rank of the engine.

    Attributes:
        version: vLLM's.
        spec: the model's shape.
        expert_order: the numbering of the model's experts (`placement.numbering`).
        rank: which of all ranks, for the names of files.
        expert_ranks: ranks that the experts are spread over; 1: each holds all (or a slice of all).
        expert_rank: which of those this is.
        shards: ranks that share one step's tokens among them before they route; 1: none do.
        shard: which of those this is.
        attention_ranks: ranks that share one token's attention (tensor parallel).
        all_to_all: whether tokens are sent between ranks, rather than outputs summed.
        backend: name of what sends them.
        gathers_first: whether tokens of all ranks are routed on every rank.
        renormalises: whether the router divides its top-k weights by their sum; None: unknown.
        max_tokens: the most rows that one step routes here.
    """

    version: str
    spec: MoESpec
    expert_order: str | None = None
    rank: int = 0
    expert_ranks: int = 1
    expert_rank: int = 0
    shards: int = 1
    shard: int = 0
    attention_ranks: int = 1
    all_to_all: bool = False
    backend: str = ""
    gathers_first: bool = False
    renormalises: bool | None = None
    max_tokens: int = 8192

    @property
    def home(self) -> int | None:
        """The expert rank where every token that is routed here has its attention; None: there is none."""
        shared = self.attention_ranks > 1 and self.shards == 1
        return self.expert_rank if self.all_to_all and not self.gathers_first and not shared else None

    @property
    def drops(self) -> bool:
        """Whether id -1 keeps a token from being sent; elsewhere ids must be valid."""
        return self.all_to_all and not self.gathers_first and self.backend in DROPS

    def topology(self, config: PluginConfig) -> Topology | None:
        """The devices that experts lie on in order; None where a placement says where they lie.

        Raises:
            ConfigError: when the configuration says otherwise than the engine does, or nothing says it.
        """
        ranks = self.expert_ranks
        if ranks == 1:
            if config.devices is None and config.placement is None:
                raise ConfigError(
                    f"{config.source} gives no devices, and this engine has no expert parallelism that would; add "
                    "devices: 8, the ones to prune for, or serve with --enable-expert-parallel on several ranks"
                )
            return config.devices
        if config.placement is not None:
            raise ConfigError(
                f"{config.source} gives a placement, but {ranks} ranks hold this checkpoint's experts in order; bake "
                "the placement into it (coterie bake), serve that and give no placement"
            )
        devices = config.devices or Topology.parse(str(ranks))
        experts = self.spec.num_experts
        if devices.num_devices != ranks or list(devices.slots(experts)) != list(
            Topology.parse(str(ranks)).slots(experts)
        ):
            raise ConfigError(
                f"{config.source} gives devices {devices}, the engine spreads {experts} experts evenly over {ranks} "
                "ranks; give as many devices, or none"
            )
        return devices

    def traffic(self) -> str:
        """What dropping a destination does to traffic here, for people."""
        if self.expert_ranks == 1:
            return "no traffic is saved: no rank holds fewer than all experts"
        if not self.all_to_all:
            return "no traffic is saved: every rank has every token already, and outputs are summed as before"
        if self.drops:
            return f"{self.backend} sends nothing to a dropped device (id -1)"
        if self.gathers_first or self.backend in GATHERS:
            return f"no traffic is saved: {self.backend} gathers every token everywhere"
        return f"no traffic is known to be saved: {self.backend} is not known to skip weight 0"
