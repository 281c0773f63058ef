"""`coterie bench`: how fast it is on this machine, against other ways and against bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.cli.common import JsonOption, SeedOption, emit_json, note, progress, warnings_as_notes
from coterie.errors import ConfigError


def bench_offload(
    store: Annotated[
        Path | None, typer.Argument(metavar="[STORE]", help="Your own expert store, read with real text.")
    ] = None,
    budgets: Annotated[str, typer.Option(help="Shares of all experts' bytes, with commas.")] = "10%,20%,30%,40%,50%",
    replay: Annotated[
        Path | None, typer.Option(metavar="TRACE", help="Replay this trace's routing; lossless systems only.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Replay this model's routing and measure its loss; tiny-mixtral if not given.")
    ] = None,
    widths: Annotated[Path | None, typer.Option(help="With STORE: a width plan for it.")] = None,
    bandwidth: Annotated[
        str, typer.Option(help="Emulate a link of this rate; real: as fast as the disk is.")
    ] = "1GB/s",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to time for each system and budget.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Stretches they are in; systems take turns in each.")] = 2,
    systems: Annotated[str, typer.Option(help="Only these systems, with commas.")] = "",
    studies: Annotated[
        str, typer.Option(help="Further tables: schedules, lengths, batches, scheduling, with commas, or all.")
    ] = "",
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the model that is timed in DIR, or use the one there.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for offload.json.")] = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Time ways to run a model that does not fit, side by side at every budget, with bounds beside them.

    Without STORE a model of random weights is made on the spot (4.2 GB, removed afterwards), and decides as a small
    trained model did on held-out text; the loss is that model's. With STORE, your own model reads held-out text.
    """
    from coterie.bench.offload.run import STUDIES, write_bench
    from coterie.bench.offload.table import Setting
    from coterie.cli.bench_show import show_bench
    from coterie.study.output import prepared_folder
    from coterie.units import parse_bandwidth

    shares = _budgets(budgets)
    rate = None if bandwidth == "real" else parse_bandwidth(bandwidth)
    setting = Setting(shares, rate, tokens, rounds, seed)
    tables = list(STUDIES) if studies == "all" else _listed(studies)
    with prepared_folder(out), warnings_as_notes(), progress() as listen:
        if store is not None:
            result = _own(store, widths, setting, _listed(systems), (replay, model, keep, tables), listen)
        else:
            if widths is not None:
                raise ConfigError("--widths is for your own STORE; without one, widths are chosen by their loss")
            result = _replayed(replay, model, setting, _listed(systems), tables, keep, listen)
        if out is not None:
            note(f"wrote {write_bench(result, out)}")
    if as_json:
        emit_json(result)
    else:
        show_bench(result)


def _replayed(
    replay: Path | None, model: str | None, setting: Any, systems: list[str], tables: list[str], keep: Path | None,
    listen: Any,
) -> dict[str, Any]:  # fmt: skip
    from coterie import data
    from coterie.bench.offload.run import require_budgets, run_bench, source_of_model, source_of_trace
    from coterie.trace.open import open_trace

    if replay is not None and model is not None:
        raise ConfigError("--replay and --model both say whose routing to replay; give one")
    if replay is not None:
        trace = open_trace(replay, progress=listen)
        require_budgets(setting.budgets, trace.spec)
        source = source_of_trace(trace, str(replay))
    else:
        texts = {name: data.text(name) for name in data.text_names()}
        source = source_of_model(model or "tiny-mixtral", texts, setting.seed, progress=listen, keep=keep)
    return run_bench(source, setting, systems=systems, studies=tables, keep=keep, progress=listen)


def _own(
    store: Path, widths: Path | None, setting: Any, systems: list[str], unused: tuple[Any, ...], listen: Any
) -> dict[str, Any]:
    from coterie.bench.offload.own_store import run_own_store
    from coterie.pruning.width_plan_file import load_plan

    if any(unused):
        raise ConfigError("with your own STORE, real text is read: leave --replay, --model, --keep and --studies out")
    plan = None if widths is None else load_plan(widths)
    found: dict[str, Any] = run_own_store(store, setting, plan=plan, systems=systems, progress=listen)
    return found


def _listed(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _budgets(text: str) -> dict[str, float]:
    from coterie.units import parse_fraction

    if not (parts := _listed(text)):
        raise ConfigError(f"--budgets {text!r} names none; write it like --budgets 10%,20%")
    return {part: parse_fraction(part) for part in parts}
