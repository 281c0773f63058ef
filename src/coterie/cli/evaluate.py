"""`coterie eval`: what a model, or a change of it, loses in quality."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli.common import JsonOption, SeedOption, emit_json, progress
from coterie.cli.evaluate_show import show
from coterie.cli.pruning_options import AUTO, FLOOR_HELP, PruningOptions
from coterie.errors import ConfigError

if TYPE_CHECKING:
    from coterie.evaluate.change import Change
    from coterie.evaluate.task_data import Questions
    from coterie.pruning.width_plan import WidthPlan

_QUESTIONS = 8  # asked at once


def evaluate_model(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, a shipped model or a hub id.")],
    text: Annotated[list[Path] | None, typer.Option("--text", help="A text file; may be repeated.")] = None,
    domain: Annotated[list[str] | None, typer.Option("--domain", help="A shipped text; may be repeated.")] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", min=1, help="Use the first N tokens of each text.")] = None,
    window: Annotated[int | None, typer.Option(help="Tokens of a window; what the model reads, up to 1,024.")] = None,
    stride: Annotated[int | None, typer.Option(help="Tokens from one window to the next; half a window.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Windows, or questions, to run at once.")] = None,
    tasks: Annotated[str | None, typer.Option(help="Standard tasks, e.g. arc_easy,hellaswag.")] = None,
    task_data: Annotated[Path | None, typer.Option(help="Folder of the tasks' files.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Questions of each task, evenly spread.")] = None,
    reference: Annotated[str | None, typer.Option(help="A model to compare with.")] = None,
    prune: Annotated[str | None, typer.Option(help="Prune destinations: share of routing weight to drop.")] = None,
    peak: Annotated[
        str | None, typer.Option(help="Prune to so many remote visits a token to the busiest device.")
    ] = None,
    rule: Annotated[str, typer.Option(help="Pruning rule: cap, naive or priced.")] = "cap",
    topology: Annotated[str | None, typer.Option(help='Devices to prune over, like "8" or "2x8,inter=5".')] = None,
    placement: Annotated[Path | None, typer.Option(help="Where experts live; without it: in order.")] = None,
    fit: Annotated[
        Path | None, typer.Option(help="A trace of the model on other text, to fit --peak or priced.")
    ] = None,
    floor: Annotated[str, typer.Option(help=FLOOR_HELP)] = AUTO,
    renormalise: Annotated[
        bool | None, typer.Option("--renormalise/--no-renormalise", help="Rescale kept weights; as the model does.")
    ] = None,
    widths: Annotated[
        Path | None, typer.Option("--widths", help="Run experts as wide as this plan says (coterie widths).")
    ] = None,
    bits: Annotated[
        int | None, typer.Option(help="8: round experts' weights as a store of coterie pack --bits 8 does.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; the checkpoint's own.")] = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Measure perplexity, distance from a reference and the standard tasks.

    Without --text, --domain and --tasks: on every shipped text. A changed model is compared with itself unchanged,
    unless there is a --reference.
    """
    from coterie.checkpoint.eight_bits import require_bits
    from coterie.evaluate.quality import evaluate
    from coterie.models.load import load_model, load_tokenizer

    pruning = PruningOptions(prune, peak, rule, floor, topology, placement, fit, renormalise)
    pruning.check()
    plan = _plan(widths)
    require_bits(bits)
    asked = _questions(tasks, task_data, limit)
    texts = _texts(text or [], domain or [], needed=not asked)
    tokenizer, loaded = load_tokenizer(model), load_model(model, dtype)
    other_tokenizer, other = None, None
    if reference is not None:
        other_tokenizer, other = load_tokenizer(reference), load_model(reference, dtype)
    with progress() as listen:
        changes = [*pruning.changes(loaded, listen), *_expert_changes(loaded, plan, bits)]
    result: dict[str, Any] = {"model": model, "reference": reference}
    if texts or not asked:
        with progress() as listen:
            quality = evaluate(
                loaded, tokenizer, texts, changes=changes, reference=other, reference_tokenizer=other_tokenizer,
                window=window, stride=stride, max_tokens=tokens, batch=batch, progress=listen,
            )  # fmt: skip
        result |= quality.to_json()
    result["changes"] = [change.to_json() for change in changes]  # with what they counted on the texts
    if asked:
        result["tasks"] = _ask(asked, loaded, tokenizer, changes, other, batch, seed)
    configuration = {"dtype": str(loaded.dtype).removeprefix("torch."), "tokens": tokens, "batch": batch}
    result |= {"configuration": configuration, "seed": seed, "versions": _versions(bool(asked))}
    if as_json:
        emit_json(result)
    else:
        show(result)


def _plan(file: Path | None) -> WidthPlan | None:
    """The width plan, read before the model is, so that a bad one is told at once."""
    from coterie.pruning.width_plan_file import load_plan

    return None if file is None else load_plan(file)


def _expert_changes(model: Any, plan: WidthPlan | None, bits: int | None) -> list[Change]:
    from coterie.evaluate.changes import rounding, widths

    return [*([] if bits is None else [rounding()]), *([] if plan is None else [widths(model, plan)])]


def _questions(tasks: str | None, folder: Path | None, limit: int | None) -> list[Questions]:
    """The tasks' questions, read before the model is, so that a missing file is told at once."""
    if tasks is None:
        for value, option in ((folder, "--task-data"), (limit, "--limit")):
            if value is not None:
                raise ConfigError(f"{option} belongs to --tasks; name some, e.g. --tasks arc_easy")
        return []
    from coterie.evaluate.harness import import_lm_eval
    from coterie.evaluate.task_data import load_tasks

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"--tasks {tasks!r} names none; give some, e.g. --tasks arc_easy,hellaswag")
    asked = load_tasks(names, folder, limit)
    import_lm_eval()
    return asked


def _texts(files: list[Path], domains: list[str], needed: bool) -> dict[str, str]:
    """The texts to evaluate on, by name: those asked for, or every shipped one where nothing was."""
    from coterie import data
    from coterie.evaluate.text import read_text_file

    if not files and not domains and needed:
        domains = list(data.text_names())
    texts = {name: data.text(name) for name in domains}
    for file in files:
        texts[str(file)] = read_text_file(file)
    return texts


def _ask(
    asked: list[Questions], model: Any, tokenizer: Any, changes: list[Change], reference: Any, batch: int | None,
    seed: int,
) -> dict[str, Any]:  # fmt: skip
    """The tasks' results and, with a change or a reference, the reference's beside them."""
    from coterie.evaluate.tasks import run_tasks

    options: dict[str, Any] = {"batch": batch or _QUESTIONS, "seed": seed, "show_bars": sys.stderr.isatty()}
    results = run_tasks(model, tokenizer, asked, changes=changes, **options)
    shown = {name: result.to_json() for name, result in results.items()}
    if changes or reference is not None:
        before = run_tasks(model if reference is None else reference, tokenizer, asked, **options)
        for name, result in before.items():
            shown[name]["reference"] = result.to_json()
    return shown


def _versions(tasks: bool) -> dict[str, str]:
    from importlib.metadata import version

    import coterie

    packages = ("torch", "transformers", *(("lm_eval",) if tasks else ()))
    return {"coterie": coterie.__version__, **{name: version(name) for name in packages}}
