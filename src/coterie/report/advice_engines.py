"""What an engine needs to use an advised placement: commands, flags and what else must hold."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from coterie.engines.registry import get_exporter
from coterie.engines.sglang import BACKEND, sglang_flags
from coterie.errors import InfeasiblePlacement, unknown_name
from coterie.placement.candidates import Setting
from coterie.placement.copies import own_slots
from coterie.placement.placement import Placement
from coterie.vllm_plugin import backends

_ENGINE_FILE = {"sglang": Path("experts.json"), "tensorrt-llm": Path("experts.yaml")}
_DEFAULT_BACKEND = {"sglang": BACKEND, "vllm": backends.DROPS[0], "tensorrt-llm": "alltoall"}
BACKENDS = {
    "sglang": ("none", "deepep", "mooncake", "flashinfer", "ascend_fuseep", "nixl", "mori"),
    "vllm": backends.BACKENDS,
    "tensorrt-llm": ("none", "alltoall"),
}
"""Backends by the names of each engine's own option; TensorRT-LLM has none, and chooses by itself."""
EVERYWHERE = ("none", *backends.GATHERS)
"""Those that bring every token to every rank, wherever its experts are."""
_TITLES = {"sglang": "SGLang", "vllm": "vLLM", "tensorrt-llm": "TensorRT-LLM"}
ENGINES = tuple(_DEFAULT_BACKEND)
DISPATCH = {"sglang": "nearest", "tensorrt-llm": "random"}
"""The rule of ours that is nearest to how an engine chooses copies, given the flags that `how_to_use` prints."""


@dataclass(frozen=True)
class Use:
    """How to use a placement.

    Attributes:
        commands: to run, one after another; the last starts the server.
        notes: what else must hold, one line each.
    """

    commands: tuple[str, ...]
    notes: tuple[str, ...]

    def to_json(self) -> Mapping[str, list[str]]:
        """A plain dictionary, ready for JSON."""
        return {"commands": list(self.commands), "notes": list(self.notes)}


def backend_of(engine: str, backend: str | None) -> str:
    """The given all-to-all backend, or one of the engine's that sends tokens only where they are needed.

    Raises:
        ConfigError: for an unknown engine.
    """
    if engine not in ENGINES:
        raise unknown_name("engine", engine, ENGINES)
    return backend or _DEFAULT_BACKEND[engine]


def refusals(engine: str, setting: Setting) -> dict[int, str]:
    """Why the engine loads no placement without copies (0), or with the setting's slots for them; empty if it does.

    All three give every rank the same number of slots; vLLM's path, a baked checkpoint, has no copies.
    """
    topology, experts, redundant = setting.topology, setting.trace.spec.num_experts, setting.redundant
    slots_G = topology.slots(experts + redundant)
    least_devices = 1 if engine == "vllm" else get_exporter(engine).min_devices
    if topology.num_devices < least_devices:
        why = f"{_TITLES[engine]} takes no placement for {topology.num_devices} device; use at least {least_devices}"
        return {0: why, redundant: why}
    found = {}
    for copies, counts_G in {0: own_slots(slots_G, experts), redundant: slots_G}.items():
        least, most = int(counts_G.min()), int(counts_G.max())
        if least < most:
            even = -experts % topology.num_devices
            remedy = "" if engine == "vllm" else f"; --redundant {even} would make them even"
            if not even:
                remedy = "; without slots_per_device they would be even"
            if redundant and not copies and int(slots_G.min()) == int(slots_G.max()):
                remedy = ""  # they are asked for
            what = f"{experts} experts" + (f" and {copies} copies" if copies else "")
            found[copies] = (
                f"{_TITLES[engine]} gives every rank the same number of slots, and {what} on {topology.num_devices} "
                f"devices are {least} to {most} a device{remedy}"
            )
    if engine == "vllm" and redundant:
        found[redundant] = "vLLM takes a placement only as a baked checkpoint, which has no copies"
    return found


def require_one_to_write(refused: Mapping[int, str], redundant: int) -> None:
    """Raise where nothing that could be recommended is loaded by the engine, so that no file of it is written.

    Args:
        refused: what `refusals` says.
        redundant: the setting's slots for copies.

    Raises:
        InfeasiblePlacement: with the engine's reason.
    """
    if 0 in refused and redundant in refused:
        raise InfeasiblePlacement(f"no placement for --out: {refused[0]}")


def how_to_use(engine: str, placement: Placement, file: str, model: str, backend: str) -> Use:
    """Commands from a placement's file to a running server.

    vLLM takes no placement file, so the checkpoint is renumbered (`coterie bake`); the others get a file.

    Args:
        engine: one of `ENGINES`.
        placement: what is recommended.
        file: where it is, or will be.
        model: the model's folder or config, as the user named it.
        backend: the engine's way to exchange tokens.
    """
    devices = str(placement.topology.num_devices)
    served = "MODEL" if Path(model).suffix == ".json" else model  # a config alone cannot be served
    if engine == "vllm":
        serve = ["vllm", "serve", "DIR", "--data-parallel-size", devices, "--enable-expert-parallel"]
        return Use(
            (
                shlex.join(["coterie", "bake", served, "--placement", file, "--out", "DIR", "--verify"]),
                shlex.join([*serve, "--all2all-backend", backend]),
            ),
            ("leave out --enable-eplb, which would move the experts again",),
        )
    exporter, target = get_exporter(engine), _ENGINE_FILE[engine]
    export = ["coterie", "export", file, "--to", engine, "--out", str(target), "--model", model]
    if engine == "sglang":
        start = ["python", "-m", "sglang.launch_server", "--model-path", served]
        start += sglang_flags(placement, target, backend)
    else:
        start = ["trtllm-serve", served, *exporter.launch_flags(placement, placement.spec, target)]
    return Use((shlex.join(export), shlex.join(start)), tuple(exporter.launch_notes(placement, placement.spec, target)))
