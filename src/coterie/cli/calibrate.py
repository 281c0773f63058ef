"""`coterie calibrate`: what this machine's links and devices take, under torchrun."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli.common import JsonOption, emit_json, note, progress, say, table
from coterie.cli.ranks import TimeoutOption, ranks, try_writing
from coterie.errors import ConfigError

if TYPE_CHECKING:
    from coterie.parallel.timing import ExpertShape
    from coterie.topology import Topology

_DEFAULT_SHAPE = (2048, 1408, 64)  # DeepSeek-V2-Lite: hidden size, experts' width, experts


def calibrate(
    out: Annotated[Path, typer.Option("--out", help="The topology to write, .yaml.")],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="Time this model's experts: config.json, folder or name; DeepSeek-V2-Lite's sizes if not given.",
        ),
    ] = None,
    topology: Annotated[
        str | None, typer.Option("--topology", help="Nodes and devices, like 2x8; as torchrun started them.")
    ] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="Element type; the model's own, or bfloat16.")] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Of each size; the best counts.")] = 5,
    timeout: TimeoutOption = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Fit the time of experts and of links within and across nodes, and write them as a topology.

    Start it with torchrun, one process for each device: torchrun --nproc-per-node 8 -m coterie calibrate --out t.yaml
    """
    with ranks(timeout) as (comms, launch):
        from coterie.parallel.calibrate import calibrate as run
        from coterie.parallel.processes import agreed
        from coterie.parallel.timing import require_ranks

        def check() -> tuple[Topology, ExpertShape, int]:
            found = _topology(topology, launch.size)
            require_ranks(comms, found.num_devices, "a topology")
            if out.suffix not in (".yaml", ".yml"):
                raise ConfigError(f"--out {out}: a topology is a YAML file; name it like topology.yaml")
            if comms.rank == 0:
                try_writing(out)
            shape, experts = _shape(model, dtype)
            return found, shape, max(1, experts // found.num_devices)

        known, shape, count = agreed(comms, check)
        with progress() as listen:
            found = run(comms, known, shape, count, repeats=repeats, progress=listen)
        if comms.rank == 0:
            found.save(out)
    if comms.rank == 0:
        if as_json:
            emit_json({"out": str(out), **found.to_json()})
        else:
            show_calibration(found, out)


def _topology(text: str | None, size: int) -> Topology:
    """As asked for, or one node for every machine that torchrun started processes on."""
    from coterie.topology import Topology

    if text is not None:
        return Topology.parse(text)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if local < 1 or size % local:
        raise ConfigError(f"{size} ranks, {local} on this machine: nodes differ; say --topology, like 2x8")
    return Topology(size // local, local)


def _shape(model: str | None, dtype: str | None) -> tuple[ExpertShape, int]:
    from coterie.models.expert_shape import expert_sizes
    from coterie.models.load import parse_dtype
    from coterie.parallel.timing import ExpertShape

    if model is None:
        hidden, width, experts = _DEFAULT_SHAPE
        return ExpertShape(hidden, width, parse_dtype(dtype or "bfloat16")), experts
    sizes = expert_sizes(model)
    return ExpertShape(sizes.spec.hidden_size, sizes.width, parse_dtype(dtype or sizes.dtype)), sizes.spec.num_experts


def show_calibration(found: Topology, out: Path) -> None:
    """Print what was fitted."""
    measured: Any = found.measured or {}
    rows = [
        ["experts of a device, fixed", f"{(found.compute_base_s or 0) * 1e3:.3f} ms"],
        ["each token-expert pair", f"{(found.compute_pair_s or 0) * 1e6:.2f} us"],
    ]
    for name, what in (("intra", "within a node"), ("inter", "between nodes, a node's uplink")):
        rate, fixed = getattr(found, f"{name}_bandwidth_bytes_per_s"), getattr(found, f"{name}_latency_s")
        if rate is not None and fixed is not None:
            rows.append([f"exchange {what}, fixed", f"{fixed * 1e3:.3f} ms"])
            rows.append([f"bandwidth {what}", f"{rate / 1e6:.1f} MB/s"])
    table([f"{found} devices", ""], rows)
    worst = {name: fit["worst_residual"] for name, fit in measured.get("fits", {}).items()}
    say("worst difference of a measured time from its line: " + ", ".join(f"{k} {v:.0%}" for k, v in worst.items()))
    if measured.get("device") == "cpu":
        note("processes on CPUs, over gloo, which share their cores: what this machine takes, not what GPUs would")
    say(f"wrote {out}")
