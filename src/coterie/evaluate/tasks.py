"""The standard tasks: accuracy, and how likely the model finds the right answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coterie.errors import CheckpointError, ConfigError
from coterie.evaluate import harness
from coterie.evaluate.change import Change, changed, describe
from coterie.evaluate.logits import evaluating
from coterie.evaluate.task_data import Questions


@dataclass(frozen=True)
class Estimate:
    """A mean over questions.

    Attributes:
        value: the mean.
        stderr: its standard error; NaN for a single question.
    """

    value: float
    stderr: float


@dataclass(frozen=True)
class TaskResult:
    """How a model does on one task.

    Attributes:
        name: the task.
        accuracies: by the harness's names: `acc`; `acc_norm`, by log-likelihood over the answer's length; and
            `exact_match_strict` and `exact_match_flexible` where the answer is generated.
        loglikelihood: of the right answer, nats a question, summed over its tokens.
        chance: accuracy of a guess; None where there is no choice.
        num_questions: questions asked.
        available: questions in the file.
        limit: the limit that was asked for, if any.
        truncated: questions whose beginning was cut off, as the model reads fewer tokens.
        source: where the questions come from.
    """

    name: str
    accuracies: dict[str, Estimate]
    loglikelihood: Estimate
    chance: float | None
    num_questions: int
    available: int
    limit: int | None
    truncated: int
    source: str

    @property
    def at_chance(self) -> bool:
        """Whether the accuracy is within two standard errors of a guess's."""
        acc = self.accuracies.get("acc")
        if acc is None or self.chance is None:
            return False
        return not acc.value > self.chance + 2 * acc.stderr

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary, ready for JSON."""
        result: dict[str, Any] = {}
        for name, estimate in {**self.accuracies, "loglikelihood": self.loglikelihood}.items():
            result[name] = estimate.value
            result[f"{name}_stderr"] = None if math.isnan(estimate.stderr) else estimate.stderr
        return {
            **result, "chance": self.chance, "at_chance": self.at_chance,
            "n": self.num_questions, "available": self.available, "limit": self.limit,
            "truncated": self.truncated, "source": self.source,
        }  # fmt: skip


def run_tasks(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[Questions],
    *,
    changes: Sequence[Change] = (),
    batch: int = 8,
    seed: int = 0,
    show_bars: bool = False,
) -> dict[str, TaskResult]:
    """Ask a model, with changes applied, the questions of standard tasks through lm-eval, without the network.

    Args:
        model: a causal language model of Transformers.
        tokenizer: its tokenizer.
        tasks: from `task_data.load_tasks`.
        changes: context managers to apply to the model.
        batch: questions to ask at once.
        seed: chooses the worked examples of tasks that show some.
        show_bars: show the harness's progress bars on stderr.

    Raises:
        BackendUnavailable: when lm-eval is not installed.
        ConfigError: when an answer is longer than the model can read.
        CheckpointError: when the model gives NaN.
    """
    if batch < 1:
        raise ConfigError(f"a batch of {batch} questions is empty; choose at least 1")
    harness.import_lm_eval()
    with evaluating(model), harness.offline(), harness.hushed(show_bars):
        lm = harness.wrap_model(model, tokenizer, batch)
        return {asked.definition.name: _run_task(model, lm, asked, changes, seed) for asked in tasks}


def _run_task(model: Any, lm: Any, asked: Questions, changes: Sequence[Change], seed: int) -> TaskResult:
    definition = asked.definition
    name = definition.name
    built = {name: harness.build_task(asked, definition.config, name, seed)}
    scored = name  # the form of the task that has log-likelihoods
    if definition.likelihood is not None:
        scored = f"{name} {harness.LIKELIHOOD}"
        built[scored] = harness.build_task(asked, {**definition.config, **definition.likelihood}, scored, seed)
    truncated = max(harness.count_truncated(lm, each, seed) for each in built.values())
    with changed(model, changes):
        samples = harness.run(lm, built)
    right = [_right_answer(built[scored], sample) for sample in samples[scored]]
    if not all(math.isfinite(value) for value in right):
        raise CheckpointError(
            f"the model with {describe(changes)} gives NaN or infinite logits in task {name}; check the weights, "
            "or load it in another dtype"
        )
    return TaskResult(
        name, _accuracies(samples[name]), _estimate(right), _chance(samples[name]),
        len(asked.rows), asked.available, asked.limit, truncated, asked.source,
    )  # fmt: skip


def _right_answer(built: Any, sample: dict[str, Any]) -> float:
    """Log-likelihood of the right answer of one logged question."""
    answers = sample["filtered_resps"]
    if built.OUTPUT_TYPE == "loglikelihood":
        return float(answers[0][0])
    doc = sample["doc"]
    right = built.doc_to_text(doc) if built.multiple_input else built.doc_to_target(doc)
    return float(answers[right][0])


def _accuracies(samples: list[dict[str, Any]]) -> dict[str, Estimate]:
    """The mean of each metric, by name, and by filter where the harness reads answers in several ways."""
    values: dict[str, list[float]] = {}
    for sample in samples:
        for metric in sample["metrics"]:
            name = metric if sample["filter"] == "none" else f"{metric}_{sample['filter']}"
            values.setdefault(name, []).append(float(sample[metric]))
    return {name: _estimate(each) for name, each in values.items()}


def _chance(samples: list[dict[str, Any]]) -> float | None:
    """The accuracy of a guess; None for tasks without choices."""
    numbers = [len(sample["filtered_resps"]) for sample in samples]
    return sum(1 / number for number in numbers) / len(numbers) if min(numbers) > 1 else None


def _estimate(values: Sequence[float]) -> Estimate:
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return Estimate(mean, math.nan)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return Estimate(mean, math.sqrt(variance / len(values)))
