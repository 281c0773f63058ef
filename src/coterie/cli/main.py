"""The command line: names, and what happens when something goes wrong."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import coterie
from coterie.cli import demo, evaluate, export, place, profile, record, study, trace_prune, widths
from coterie.cli.advise import advise
from coterie.cli.bake import bake
from coterie.cli.bench import bench_offload
from coterie.cli.bench_parallel import bench_parallel
from coterie.cli.calibrate import calibrate
from coterie.cli.cap import cap
from coterie.cli.check_engine import check_engine
from coterie.cli.common import Interrupted
from coterie.cli.drift import drift
from coterie.cli.generate import generate
from coterie.cli.generate_ep import generate_ep
from coterie.cli.learn import learn
from coterie.cli.loads import loads
from coterie.cli.model_info import model_info
from coterie.cli.pack import pack
from coterie.cli.reorder import reorder
from coterie.cli.report import report
from coterie.cli.simulate_offload import simulate_offload
from coterie.cli.study_placement import study_pruning, study_stability, study_tokens, study_transfer
from coterie.cli.trace_import import trace_import
from coterie.cli.trace_info import trace_info
from coterie.cli.trace_synthesize import trace_synthesize
from coterie.cli.tune import tune
from coterie.errors import CoterieError

# click's own class; newer typer carries its copy of click under a private name
UsageError: type[typer.BadParameter] = typer.BadParameter.__mro__[1]

INTERRUPTED = 130  # the shell's 128 + SIGINT

app = typer.Typer(
    name="coterie",
    help="Where experts live and what a token may skip, decided from routing traces.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
trace = typer.Typer(help="Import, inspect, prune and synthesize routing traces.", no_args_is_help=True)
app.add_typer(trace, name="trace")
model = typer.Typer(help="Inspect models.", no_args_is_help=True)
app.add_typer(model, name="model")
studies = typer.Typer(help="Measure what papers' tables and figures show.", no_args_is_help=True)
app.add_typer(studies, name="study")
simulate = typer.Typer(help="What a machine you don't have would do, counted on a trace.", no_args_is_help=True)
app.add_typer(simulate, name="simulate")
benches = typer.Typer(help="Time it on this machine, against other ways and against bounds.", no_args_is_help=True)
app.add_typer(benches, name="bench")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(coterie.__version__)  # noqa: T201 - this is the CLI's output
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Where experts live and what a token may skip, decided from routing traces."""


app.command("demo")(demo.demo)
app.command("compare")(place.compare)
app.command("place")(place.place)
app.command("drift")(drift)
app.command("report")(report)
app.command("advise")(advise)
app.command("loads")(loads)
app.command("widths")(widths.widths)
app.command("record")(record.record)
app.command("profile")(profile.profile)
app.command("learn")(learn)
app.command("export")(export.export)
app.command("validate")(export.validate)
app.command("check-engine")(check_engine)
app.command("bake")(bake)
app.command("reorder")(reorder)
app.command("pack")(pack)
app.command("generate")(generate)
app.command("calibrate")(calibrate)
app.command("tune")(tune)
app.command("cap")(cap)
app.command("generate-ep")(generate_ep)
app.command("eval")(evaluate.evaluate_model)
trace.command("import")(trace_import)
trace.command("info")(trace_info)
trace.command("synthesize")(trace_synthesize)
trace.command("prune")(trace_prune.trace_prune)
model.command("info")(model_info)
studies.command("widths")(study.study_widths)
studies.command("stability")(study_stability)
studies.command("transfer")(study_transfer)
studies.command("pruning")(study_pruning)
studies.command("tokens")(study_tokens)
simulate.command("offload")(simulate_offload)
benches.command("offload")(bench_offload)
benches.command("parallel")(bench_parallel)


def main() -> None:
    """Run the command line; whatever a user can cause is one line on stderr and exit code 2."""
    try:
        code = app(standalone_mode=False)
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
            sys.exit(2)
        _fail(error.format_message(), 2)
    except (CoterieError, OSError) as error:
        _fail(str(error), 2)
    except Interrupted as stopped:
        _fail(f"interrupted; {stopped}", INTERRUPTED)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    if code == INTERRUPTED:  # what typer itself returns for Ctrl-C, without a word
        _fail("interrupted; nothing was written", INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> None:
    print("coterie: error: " + " ".join(message.split()), file=sys.stderr)  # noqa: T201 - stderr is the point
    sys.exit(code)


if __name__ == "__main__":
    main()
