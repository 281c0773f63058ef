"""What the engines' modules import and a test does not have: the least that lets them run, on a CPU, in one process."""

from __future__ import annotations

import ast
import enum
import json
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Bag = types.SimpleNamespace


def start() -> tuple[Path, dict[str, Any]]:
    """The folder of the engine's modules, now importable, and the request on the standard input."""
    folder = Path(sys.argv[1])
    sys.path.insert(0, str(folder))
    return folder, json.load(sys.stdin)


def module(name: str, **members: Any) -> types.ModuleType:
    """Put a module with these members where imports look first, and packages above it where there are none."""
    parent = name.rpartition(".")[0]
    if parent and parent not in sys.modules and not (Path(sys.argv[1]) / parent.replace(".", "/")).is_dir():
        module(parent, __path__=[])
    made = types.ModuleType(name)
    vars(made).update(members)
    sys.modules[name] = made
    return made


class SGLang:
    """SGLang's process-wide settings, as its modules ask for them."""

    def __init__(self, folder: Path, ep_size: int, **settings: Any) -> None:
        self.parallel = Bag(ep_size=ep_size, nnodes=1, elastic_ep_initial_size=None)
        self.moe = Bag(
            ep_num_redundant_experts=0, ep_dispatch_algorithm="static", moe_a2a_backend="deepep", deepep_mode="auto",
            ep_join_mode=None, init_expert_location="trivial", eplb_algorithm="auto", elastic_ep_backend=None,
            expert_distribution_recorder_mode=None, expert_distribution_recorder_buffer_size=1000,
            eplb_min_rebalancing_utilization_threshold=1.0, expert_balancedness_report_mode="off",
        )  # fmt: skip
        vars(self.moe).update(settings)
        executing, resources = Bag(moe=self.moe, overlap=Bag(enable_two_batch_overlap=False)), Bag()
        resources.expert_location_metadata = resources.expert_distribution_recorder = None
        module(
            "sglang.srt.runtime_context", get_device=lambda: Bag(device="cpu"), get_exec=lambda: executing,
            get_parallel=lambda: self.parallel, get_resources=lambda: resources,
            get_schedule=lambda: Bag(chunked_prefill_size=64), get_platform=lambda: Bag(is_hip=False),
            reports_expert_balancedness=lambda: False, logs_expert_balancedness_to_server_log=lambda: False,
        )  # fmt: skip
        module("sglang.srt.elastic_ep.elastic_ep", elastic_expanded_world_enabled=lambda: False)
        module("sglang.srt.model_loader", get_model_architecture=lambda config: (_Model, "model"))

    def recorder(self, folder: Path, out: str) -> Any:
        """The recorder's module; its dumps go to `out`."""
        import torch

        torch.cpu.empty_cache = lambda: None  # a GPU's module has one; the CPU's holds nothing back
        module("einops", reduce=None)  # for figures of balance, which are off
        module("sglang.srt.environ", envs=Bag(SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR=Bag(get=lambda: out)))
        module("sglang.srt.model_executor.forward_batch_info", ForwardBatch=Bag, ForwardMode=forward_modes(folder))
        module(
            "sglang.srt.observability.metrics_collector", STAT_LOGGER_ROLE_EXPERT_DISPATCH="",
            ExpertDispatchCollector=None, resolve_collector_class=None,
        )  # fmt: skip
        module("sglang.srt.layers.moe", get_moe_a2a_backend=lambda: None)  # asked for on AMD alone
        module("sglang.srt.utils", Withable=_Withable, get_device=lambda: "cpu", get_int_env_var=lambda *_: 0)
        from sglang.srt.eplb import expert_distribution

        return expert_distribution


class _Model:
    """A model class that supports expert locations, as SGLang's own do: one row for each hidden layer."""

    @staticmethod
    def get_model_config_for_expert_location(config: Any) -> Any:
        from sglang.srt.eplb.expert_location import ModelConfigForExpertLocation

        return ModelConfigForExpertLocation(config.num_hidden_layers, config.num_experts, None)


class _Withable:
    def __init__(self) -> None:
        self.value: Any = None

    @contextmanager
    def with_value(self, value: Any) -> Iterator[None]:
        self.value = value
        try:
            yield
        finally:
            self.value = None


def forward_modes(folder: Path) -> Any:
    """SGLang's ForwardMode, its names in the order in which its own file gives them."""
    tree = ast.parse((folder / "sglang/srt/model_executor/forward_batch_info.py").read_text())
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "ForwardMode")
    names = [node.targets[0].id for node in body if isinstance(node, ast.Assign)]
    return enum.IntEnum("ForwardMode", names)
