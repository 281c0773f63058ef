"""`coterie eval`: what a model, or a change of it, loses in quality."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli.common import JsonOption, SeedOption, emit_json, progress, say, table
from coterie.errors import ConfigError

if TYPE_CHECKING:
    from coterie.evaluate.change import Change
    from coterie.evaluate.task_data import Questions

_QUESTIONS = 8  # asked at once
_TASK_COLUMNS = ("task", "questions", "acc", "stderr", "acc_norm", "chance", "log-likelihood", "stderr")


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
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; the checkpoint's own.")] = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Measure perplexity, distance from a reference and the standard tasks.

    Without --text, --domain and --tasks: on every shipped text. A changed model is compared with itself unchanged,
    unless there is a --reference.
    """
    from coterie.evaluate.quality import evaluate
    from coterie.models.load import load_model, load_tokenizer

    asked = _questions(tasks, task_data, limit)
    texts = _texts(text or [], domain or [], needed=not asked)
    tokenizer, loaded = load_tokenizer(model), load_model(model, dtype)
    other_tokenizer, other = None, None
    if reference is not None:
        other_tokenizer, other = load_tokenizer(reference), load_model(reference, dtype)
    changes: list[Change] = []
    result: dict[str, Any] = {"model": model, "reference": reference, "changes": [each.to_json() for each in changes]}
    if texts or not asked:
        with progress() as listen:
            quality = evaluate(
                loaded, tokenizer, texts, changes=changes, reference=other, reference_tokenizer=other_tokenizer,
                window=window, stride=stride, max_tokens=tokens, batch=batch, progress=listen,
            )  # fmt: skip
        result |= quality.to_json()
    if asked:
        result["tasks"] = _ask(asked, loaded, tokenizer, changes, other, batch, seed)
    configuration = {"dtype": str(loaded.dtype).removeprefix("torch."), "tokens": tokens, "batch": batch}
    result |= {"configuration": configuration, "seed": seed, "versions": _versions(bool(asked))}
    if as_json:
        emit_json(result)
    else:
        _show(result)


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


def _show(result: dict[str, Any]) -> None:
    for change in result["changes"]:
        settings = ", ".join(f"{name} {value}" for name, value in change.items() if name != "name")
        say(f"{change['name']}: {settings}")
    if "domains" in result:
        _show_texts(result)
    if "tasks" in result:
        _show_tasks(result["tasks"])


def _show_texts(result: dict[str, Any]) -> None:
    compared = "kl" in result
    columns = ["text", "tokens", "perplexity", "bits/byte"]
    if compared:
        columns += ["reference", "KL mean", "KL 99%", "top-1 agreement"]
    rows = []
    for name, part in [*result["domains"].items(), ("all", result)]:
        row = [name, f"{part['tokens']:,}", part["perplexity"], part["bits_per_byte"]]
        if compared:
            kls = (f"{value:.5f}" for value in (part["kl"], part["kl_percentiles"]["99"]))
            row += [part["reference_perplexity"], *kls, f"{part['top1_agreement']:.2%}"]
        rows.append(row)
    table(columns, rows[:-1] if len(rows) == 2 else rows, f"window {result['window']}, stride {result['stride']}")
    if compared:
        against = result["reference"] or "the unchanged model"
        say(f"reference: {against}; KL(reference || model) a token, nats; agreement: the same most likely next token")


def _show_tasks(tasks: dict[str, Any]) -> None:
    rows = []
    for name, task in tasks.items():
        for label, part in ((name, task), (f"{name}, reference", task.get("reference"))):
            if part is not None:
                rows.append(_task_row(label, part))
    table(_TASK_COLUMNS, rows)
    say("acc_norm: by log-likelihood over the answer's length; log-likelihood: of the right answer, nats a question")
    for name, task in tasks.items():
        if task["at_chance"]:
            say(f"{name}: no better than chance (accuracy within two standard errors of {task['chance']:.3g})")
        if task["truncated"]:
            say(
                f"{name}: {task['truncated']} of {task['n']} questions are longer than the model reads; cut at the left"
            )


def _task_row(label: str, part: dict[str, Any]) -> list[object]:
    first = next(name for name in ("acc", "exact_match_strict") if name in part)
    values = [part.get(name) for name in (first, f"{first}_stderr", "acc_norm", "chance")]
    likelihood = [part["loglikelihood"], part["loglikelihood_stderr"]]
    return [label, f"{part['n']:,}", *("-" if value is None else value for value in values + likelihood)]
