"""What an engine needs to use an advised placement: commands, flags and what else must hold."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from coterie.engines.registry import get_exporter
from coterie.engines.sglang import BACKEND, sglang_flags
from coterie.errors import unknown_name
from coterie.placement.placement import Placement

_ENGINE_FILE = {"sglang": Path("experts.json"), "tensorrt-llm": Path("experts.yaml")}
_DEFAULT_BACKEND = {"sglang": BACKEND, "vllm": "deepep_high_throughput", "tensorrt-llm": "alltoall"}
ENGINES = tuple(_DEFAULT_BACKEND)


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
    if engine == "vllm":
        serve = ["vllm", "serve", "DIR", "--data-parallel-size", devices, "--enable-expert-parallel"]
        return Use(
            (
                shlex.join(["coterie", "bake", model, "--placement", file, "--out", "DIR", "--verify"]),
                shlex.join([*serve, "--all2all-backend", backend]),
            ),
            ("leave out --enable-eplb, which would move the experts again",),
        )
    exporter, target = get_exporter(engine), _ENGINE_FILE[engine]
    export = ["coterie", "export", file, "--to", engine, "--out", str(target), "--model", model]
    if engine == "sglang":
        start = ["python", "-m", "sglang.launch_server", "--model-path", model]
        start += sglang_flags(placement, target, backend)
    else:
        start = ["trtllm-serve", model, *exporter.launch_flags(placement, placement.spec, target)]
    return Use((shlex.join(export), shlex.join(start)), tuple(exporter.launch_notes(placement, placement.spec, target)))
