"""`coterie tune`: the fastest placement on the devices that will serve, under torchrun."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli.common import JsonOption, SeedOption, emit_json, note, progress, say, table
from coterie.cli.place import DispatchOption, RedundantOption
from coterie.cli.ranks import TimeoutOption, ranks, try_writing

if TYPE_CHECKING:
    from coterie.models.expert_shape import ExpertSizes
    from coterie.parallel.replay import Replay
    from coterie.placement.candidates import Setting
    from coterie.progress import Progress

HELDOUT = 0.2


def tune(
    trace: Annotated[str, typer.Option("--trace", help="A trace, an importable file or a shipped name.")],
    model: Annotated[str, typer.Option("--model", help="The model's config.json, folder or name.")],
    topology: Annotated[str, typer.Option("--topology", help="A calibrated topology (coterie calibrate).")],
    out: Annotated[Path, typer.Option("--out", help="The placement to write, .json.")],
    spectrum: Annotated[int, typer.Option("--spectrum", min=1, help="Points of the spectrum to choose from.")] = 8,
    candidates: Annotated[
        Path | None, typer.Option("--candidates", help="A spectrum made before (coterie place --spectrum).")
    ] = None,
    method: Annotated[str, typer.Option("--method", help="Whose spectrum: coterie or cap-spectrum.")] = "coterie",
    best: Annotated[int, typer.Option("--best", min=1, help="How many besides linear and EPLB to time.")] = 3,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Tokens of each rank in a step.")] = 64,
    layers: Annotated[int, typer.Option("--layers", min=1, help="MoE layers to replay, evenly spaced.")] = 8,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="In which all that are timed take turns.")] = 5,
    emulate_compute: Annotated[
        bool, typer.Option("--emulate-compute", help="Sleep the topology's time of experts; where ranks share cores.")
    ] = False,
    redundant: RedundantOption = 0,
    dispatch: DispatchOption = "fewest-devices",
    report: Annotated[Path | None, typer.Option("--report", help="Write what was found there, .json.")] = None,
    timeout: TimeoutOption = 600.0,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Predict every placement of a spectrum, linear and EPLB; time the best on replayed routing; write the fastest.

    Placements are fitted on the earlier 80% of the trace and timed on the rest. Experts have random weights of the
    model's shape. Start it with torchrun, one process for each device.
    """
    copies: dict[str, Any] = {"redundant": redundant, "dispatch": dispatch} if redundant else {}
    with ranks(timeout) as (comms, _):
        from coterie.models.load import parse_dtype
        from coterie.parallel.candidates import make_candidates
        from coterie.parallel.processes import agreed
        from coterie.parallel.timing import ExpertShape, require_ranks
        from coterie.parallel.tune import TuneSetting
        from coterie.parallel.tune import tune as run

        with progress() as listen:

            def check() -> tuple[Setting, Replay, ExpertSizes]:
                own = method if candidates is None else None
                found = _prepare(
                    trace, model, topology, (batch, layers), listen, own, seed=seed, redundant=redundant,
                    dispatch=dispatch,
                )  # fmt: skip
                require_ranks(comms, found[0].topology.num_devices, "a topology")
                if comms.rank == 0:
                    try_writing(out, report)
                return found

            setting, replay, sizes = agreed(comms, check)
            shape = ExpertShape(sizes.spec.hidden_size, sizes.width, parse_dtype(sizes.dtype))
            found = run(
                comms, lambda: make_candidates(setting, spectrum, method, HELDOUT, candidates), replay,
                setting.topology, shape, setting.trace.spec, TuneSetting(rounds, best, emulate_compute), listen,
            )  # fmt: skip
    if comms.rank:
        return
    found.placement.save(out)
    result = {"out": str(out), "trace": trace, "model": model, "seed": seed, **copies, **found.to_json()}
    if report is not None:
        _write(report, result)
    if as_json:
        emit_json(result)
    else:
        show_tuned(result)


def _write(file: Path, result: dict[str, Any]) -> None:
    from coterie.files import write_text

    write_text(file, json.dumps(result, indent=1, allow_nan=False) + "\n")


def _prepare(
    trace: str, model: str, topology: str, step: tuple[int, int], listen: Progress, method: str | None, *, seed: int,
    redundant: int, dispatch: str,
) -> tuple[Setting, Replay, ExpertSizes]:  # fmt: skip
    """What is placed and replayed; raises for whatever cannot be, before anything runs.

    `step`: tokens of a rank and layers; `method`: whose spectrum is to be made, if any.
    """
    from coterie.errors import TraceError
    from coterie.models.expert_shape import expert_sizes
    from coterie.parallel.replay import Replay, spaced_layers
    from coterie.placement.driver import prepare, require_possible
    from coterie.placement.step_time import StepModel
    from coterie.topology import Topology
    from coterie.trace.open import open_trace
    from coterie.trace.splits import split

    devices, sizes = Topology.parse(topology), expert_sizes(model)
    require_possible(sizes.spec, devices, redundant, dispatch, method)
    StepModel.of(devices, sizes.spec.hidden_size, sizes.spec.top_k)  # calibrated
    routing = open_trace(trace, progress=listen)
    mine, theirs = routing.spec, sizes.spec
    if (mine.num_layers, mine.num_experts, mine.top_k) != (theirs.num_layers, theirs.num_experts, theirs.top_k):
        raise TraceError(
            f"the trace is of {mine.model} ({mine.num_layers} layers, {mine.num_experts} experts, top-{mine.top_k}), "
            f"--model is {theirs.model} ({theirs.num_layers}, {theirs.num_experts}, top-{theirs.top_k}); record one"
        )
    batch, layers = step
    setting = prepare(routing, devices, seed=seed, progress=listen, redundant=redundant, dispatch=dispatch)
    later = split(routing, HELDOUT).second
    chosen = spaced_layers(routing.num_layers, layers)
    return setting, Replay.of(routing, devices.num_devices, batch, later, chosen), sizes


def show_tuned(result: dict[str, Any]) -> None:
    """Print predicted and measured side by side, and the pick."""
    rows = []
    for row in result["candidates"]:
        measured, ratio = row["measured_s"], row["ratio_to_linear"]
        rows.append([
            row["name"] + (" <- pick" if row["name"] == result["pick"] else ""), f"{row['predicted_s'] * 1e3:.2f} ms",
            "-" if measured is None else f"{measured * 1e3:.2f} ms", "-" if ratio is None else f"{1 / ratio:.2f}x",
        ])  # fmt: skip
    table(["step", "predicted", "measured", "speed, of linear's"], rows)
    if not result["beats_linear"]:
        say("nothing beats linear here beyond chance: linear stays")
    step = f"{result['batch']} tokens a rank through {len(result['layers'])} MoE layers"
    say(f"experts: {result['experts']}; a step: {step}")
    if result["experts"].startswith("emulated"):
        note("experts' time is emulated")
    say(f"wrote {result['out']}")
