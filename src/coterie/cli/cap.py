"""`coterie cap`: CAP's four steps in order, from a model and a text to the fastest placement, resumable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli.common import Interrupted, JsonOption, SeedOption, emit_json, note, progress, table, warnings_as_notes
from coterie.cli.place import DispatchOption, RedundantOption
from coterie.cli.tune import HELDOUT

if TYPE_CHECKING:
    from coterie.parallel.steps import Done

_TITLES = {
    "1-record": "1. record, pruning on", "2-place": "2. place (Algorithm 1)", "3-spectrum": "3. spectrum",
    "4-calibrate": "   calibrate", "4-tune": "4. time the spectrum",
}  # fmt: skip


def cap(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, a shipped model's name, or a hub id.")],
    topology: Annotated[str, typer.Option("--topology", help="Devices, like 8, or a calibrated YAML file.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for everything; run again to go on there.")],
    text: Annotated[Path | None, typer.Option("--text", help="A text file, UTF-8.")] = None,
    domain: Annotated[str | None, typer.Option("--domain", help="A held-out text that ships, e.g. prose.")] = None,
    prune: Annotated[str, typer.Option("-p", "--prune", help="Share of a token's weight to drop; 0: none.")] = "0",
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens to record.")] = 8000,
    spectrum: Annotated[int, typer.Option("--spectrum", min=1, help="Points of the spectrum.")] = 7,
    method: Annotated[str, typer.Option("--method", help="Whose spectrum: coterie or cap-spectrum.")] = "coterie",
    batch: Annotated[int, typer.Option("--batch", min=1, help="Tokens of each rank in a timed step.")] = 64,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds of timing.")] = 5,
    best: Annotated[int, typer.Option("--best", min=1, help="How many besides linear and EPLB to time.")] = 3,
    emulate_compute: Annotated[
        bool, typer.Option("--emulate-compute", help="Sleep the topology's time of experts; where ranks share cores.")
    ] = False,
    redundant: RedundantOption = 0,
    dispatch: DispatchOption = "fewest-devices",
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Record with pruning on, place, make the spectrum, time it on this machine, take the fastest.

    The timed step starts one process for each device on this machine. Where devices are spread over several, run
    calibrate and tune on them with torchrun instead.
    """
    from coterie.cli.record import _source
    from coterie.models.backend import import_transformers
    from coterie.models.run_text import TextRun
    from coterie.parallel.pipeline import REPORT, RESULT, CapSetting, run_cap
    from coterie.pruning.destinations import Cap
    from coterie.topology import Topology
    from coterie.units import parse_fraction

    import_transformers()
    share = Cap(parse_fraction(prune)).p
    devices = Topology.parse(topology)
    if devices.num_nodes > 1:
        note(
            f"{devices}: all {devices.num_devices} processes run on this machine; its links are not those of a cluster"
        )
    source, contents = _source(text, domain)
    setting = CapSetting(
        model, topology, share, TextRun(tokens=tokens, seed=seed), method, spectrum, batch, rounds, best, HELDOUT,
        emulate_compute, seed, redundant, dispatch,
    )  # fmt: skip
    try:
        with warnings_as_notes(), progress() as listen:
            done = run_cap(out, setting, contents, source, (lambda step: None) if as_json else _tell, listen)
    except KeyboardInterrupt:
        raise Interrupted(f"what is done stays in {out}: run it again to go on") from None
    report: dict[str, Any] = json.loads((out / REPORT).read_text(encoding="utf-8"))
    result = {"out": str(out / RESULT), "p": share, "steps": [step.to_json() for step in done], "tuned": report}
    if as_json:
        emit_json(result)
        return
    from coterie.cli.tune import show_tuned

    show_tuned({**report, "out": str(out / RESULT)})
    table(["step", "seconds", ""], [
        [_TITLES[step.name], f"{step.seconds:.1f}", "done before" if step.reused else ""] for step in done
    ])  # fmt: skip


def _tell(step: Done) -> None:
    note(f"{_TITLES[step.name].strip()}: {'done before' if step.reused else f'{step.seconds:.1f} s'}")
