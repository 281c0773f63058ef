"""How `coterie eval` shows its result to people."""

from __future__ import annotations

from typing import Any

from coterie.cli.common import say, table

_TASK_COLUMNS = ("task", "questions", "acc", "stderr", "acc_norm", "chance", "log-likelihood", "stderr")


def show(result: dict[str, Any]) -> None:
    """Print the result of `coterie eval`."""
    for change in result["changes"]:
        _show_change(change)
    if "domains" in result:
        _show_texts(result)
    if "tasks" in result:
        _show_tasks(result["tasks"])
        _say_what_small_models_can_do(result["model"])


def _show_change(change: dict[str, Any]) -> None:
    if change["name"] == "widths":
        _show_widths(change)
    elif change["name"] == "rounding":
        say(f"rounding: the experts' weights in {change['bits']} bits")
    else:
        _show_pruning(change)


def _show_pruning(change: dict[str, Any]) -> None:
    words = [f"{name} {change[name]:g}" for name in ("p", "floor") if name in change]
    words += [f"{name} {value:g} asked" for name, value in change.get("asked", {}).items() if name not in change]
    say(f"{change['name']}, rule {change['rule']} ({', '.join(words)})")
    measured = change["measured"]
    if measured["num_tokens"]:
        say(
            f"  on the texts: kept weight {measured['kept_weight']:.3f}, remote devices a token "
            f"{measured['remote_dpt']:.3f}, remote peak traffic {measured['remote_peak_traffic']:.3f} (layers' means)"
        )


def _show_widths(change: dict[str, Any]) -> None:
    measured = change["measured"]
    say(f"widths, policy {change['policy']} (expected {change['expected_bytes']:.3f} of full expert bytes a token)")
    if measured["num_tokens"]:
        say(
            f"  on the texts: {measured['share']:.3f} of full expert bytes a token, {measured['skipped']:.1%} of the "
            "chosen experts skipped (layers' means)"
        )


def _show_texts(result: dict[str, Any]) -> None:
    compared = "kl" in result
    columns = ["text", "tokens", "perplexity", "bits/byte"]
    if compared:
        columns += ["reference", "KL mean", "KL 99%", "top-1 agreement"]
    rows = []
    for name, part in [*result["domains"].items(), ("all", result)]:
        row = [name, f"{part['tokens']:,}", _number(part["perplexity"], 3), part["bits_per_byte"]]
        if compared:
            kls = (_number(value, 5) for value in (part["kl"], part["kl_percentiles"]["99"]))
            row += [_number(part["reference_perplexity"], 3), *kls, f"{part['top1_agreement']:.2%}"]
        rows.append(row)
    table(columns, rows[:-1] if len(rows) == 2 else rows, f"window {result['window']}, stride {result['stride']}")
    if compared:
        against = result["reference"] or "the unchanged model"
        say(f"reference: {against}; KL(reference || model) a token, nats; agreement: the same most likely next token")


def _number(value: float | None, digits: int) -> str:
    """A figure of a table; JSON has no infinity, so None stands for it."""
    return "infinite" if value is None else f"{value:.{digits}f}"


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


def _say_what_small_models_can_do(model: str) -> None:
    from coterie.models.load import SHIPPED_MODELS

    if model in SHIPPED_MODELS:
        say(f"{model} is far too small for these tasks and answers most of them by chance: it shows how they are run")


def _task_row(label: str, part: dict[str, Any]) -> list[object]:
    first = next(name for name in ("acc", "exact_match_strict") if name in part)
    values = [part.get(name) for name in (first, f"{first}_stderr", "acc_norm", "chance")]
    likelihood = [part["loglikelihood"], part["loglikelihood_stderr"]]
    return [label, f"{part['n']:,}", *("-" if value is None else value for value in values + likelihood)]
