"""The tasks through lm-eval against plain loops over the same questions."""

from __future__ import annotations

import json
import math
import os
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.errors import BackendUnavailable, CheckpointError, ConfigError
from coterie.evaluate import harness
from coterie.evaluate.change import Change
from coterie.evaluate.task_data import load_tasks
from coterie.evaluate.tasks import run_tasks

pytestmark = [
    pytest.mark.needs("transformers"),
    pytest.mark.needs("lm_eval"),
    # lm-eval and the packages it brings
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
COLOURS = ["red", "green", "blue", "a dull grey"]


def log_likelihood(model: Any, tokenizer: Any, context: str, answer: str) -> float:
    """Of an answer after a context, summed over its tokens."""
    import torch

    before, ids = (tokenizer(text)["input_ids"] for text in (context, context + answer))
    assert ids[: len(before)] == before
    with torch.no_grad():
        logp = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return sum(float(logp[token - 1, ids[token]]) for token in range(len(before), len(ids)))


def write(folder: Path, name: str, rows: Sequence[dict[str, Any]]) -> None:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def arc(tmp_path: Path) -> list[dict[str, Any]]:
    rows = [
        {"query": f"Question: what has the number {n}?\nAnswer:", "choices": COLOURS[: 2 + n % 3], "gold": n % 2}
        for n in range(9)
    ]
    write(tmp_path, "arc_easy", rows)
    return rows


def test_multiple_choice_equals_a_plain_loop(
    model: Any, tokenizer: Any, tmp_path: Path, arc: list[dict[str, Any]]
) -> None:
    right, best, best_by_length = [], [], []
    for row in arc:
        scores = [log_likelihood(model, tokenizer, row["query"], f" {choice}") for choice in row["choices"]]
        by_length = [score / len(choice) for score, choice in zip(scores, row["choices"], strict=True)]
        right.append(scores[row["gold"]])
        best.append(float(np.argmax(scores) == row["gold"]))
        best_by_length.append(float(np.argmax(by_length) == row["gold"]))
    result = run_tasks(model, tokenizer, load_tasks(["arc_easy"], tmp_path), batch=4)["arc_easy"].to_json()
    assert 0 < sum(best) < 9  # else any answer would do
    for name, values in (("acc", best), ("acc_norm", best_by_length), ("loglikelihood", right)):
        assert result[name] == pytest.approx(np.mean(values), rel=1e-5)
        assert result[f"{name}_stderr"] == pytest.approx(np.std(values, ddof=1) / 3, rel=1e-4)
    assert result["chance"] == pytest.approx(np.mean([1 / len(row["choices"]) for row in arc]))
    assert (result["n"], result["available"], result["limit"], result["truncated"]) == (9, 9, None, 0)


def test_last_words_equal_a_plain_loop(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"query": f"In my palm is stone number {n}, and I see", "choices": ["signs"]} for n in range(4)]
    write(tmp_path, "lambada_openai", rows)
    result = run_tasks(model, tokenizer, load_tasks(["lambada_openai"], tmp_path))["lambada_openai"].to_json()
    scores = [log_likelihood(model, tokenizer, row["query"], " signs") for row in rows]
    assert result["loglikelihood"] == pytest.approx(np.mean(scores), rel=1e-5)
    assert (result["acc"], result["chance"], result["at_chance"]) == (0, None, False)


def test_blanks_equal_a_plain_loop(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    rows = [
        {"sentence": f"Sarah met Maria {n} times as _ had the harder cases.", "option1": "Sarah", "option2": "Maria",
         "answer": str(1 + n % 2)}
        for n in range(6)
    ]  # fmt: skip
    write(tmp_path, "winogrande", rows)
    result = run_tasks(model, tokenizer, load_tasks(["winogrande"], tmp_path))["winogrande"].to_json()
    right, best = [], []
    for row in rows:
        before, after = row["sentence"].split("_")
        scores = [log_likelihood(model, tokenizer, before + row[f"option{o}"], after) for o in (1, 2)]
        gold = int(row["answer"]) - 1
        right.append(scores[gold])
        best.append(float(scores[gold] > scores[1 - gold]))
    assert result["acc"] == pytest.approx(np.mean(best))
    assert result["loglikelihood"] == pytest.approx(np.mean(right), rel=1e-5)
    assert result["chance"] == 0.5


@pytest.mark.parametrize(
    ("name", "row", "prompt", "answers", "gold"),
    [
        ("piqa", {"goal": "to boil", "sol1": "heat it", "sol2": "cool it", "label": 1},
         "Question: to boil\nAnswer:", [" heat it", " cool it"], 1),
        ("mmlu", {"subject": "us_history", "question": "Who?", "choices": ["K", "L", "M", "N"], "answer": 2},
         "The following are multiple choice questions (with answers) about us history.\n\n"
         "Who?\nA. K\nB. L\nC. M\nD. N\nAnswer:", [" A", " B", " C", " D"], 2),
        ("hellaswag", {"query": "Roof: he", "choices": ["sits.", "runs."], "gold": 0},
         "Roof: he", [" sits.", " runs."], 0),
    ],
)  # fmt: skip
def test_prompts(
    model: Any, tokenizer: Any, tmp_path: Path, name: str, row: dict[str, Any], prompt: str, answers: list[str],
    gold: int,
) -> None:  # fmt: skip
    write(tmp_path, name, [row])
    result = run_tasks(model, tokenizer, load_tasks([name], tmp_path))[name].to_json()
    scores = [log_likelihood(model, tokenizer, prompt, answer) for answer in answers]
    assert result["loglikelihood"] == pytest.approx(scores[gold], rel=1e-5)
    assert result["acc"] == float(np.argmax(scores) == gold)
    assert result["acc_stderr"] is None


def test_generated_answers_and_worked_examples(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    write(tmp_path, "gsm8k", [{"question": "2 + 2?", "answer": "It is 4.\n#### 4"}])
    examples = [{"question": f"{n}?", "answer": f"#### {n}"} for n in range(5)]
    write(tmp_path, "gsm8k_train", examples)
    asked = load_tasks(["gsm8k"], tmp_path)
    result = run_tasks(model, tokenizer, asked, seed=3)["gsm8k"].to_json()
    assert {"exact_match_strict", "exact_match_flexible"} <= set(result)
    definition, prompts = asked[0].definition, []
    for config in (definition.config, {**definition.config, **(definition.likelihood or {})}):
        with harness.hushed(show_bars=False):
            task = harness.build_task(asked[0], config, "gsm8k", seed=3)
            task.build_all_requests(rank=0, world_size=1)
        prompts.append(task.instances[0].args[0])
    prompt = prompts[0]
    assert prompts[1] == prompt
    assert prompt.endswith("\n\nQuestion: 2 + 2?\nAnswer:")
    assert sorted(prompt.split("\n\n")[:-1]) == [f"Question: {n}?\nAnswer: #### {n}" for n in range(5)]
    expected = log_likelihood(model, tokenizer, prompt, " It is 4.\n#### 4")
    assert result["loglikelihood"] == pytest.approx(expected, rel=1e-5)


def test_a_change_is_applied_and_undone(model: Any, tokenizer: Any, tmp_path: Path, arc: Any) -> None:
    from coterie.models.intercept import intercept

    def first_only(model: Any, sequences: Any) -> Any:
        assert sequences is None
        return intercept(model, lambda layer, hidden, ids, weights: (ids, weights * weights.new_tensor([1.0, 0.0])))

    asked = load_tasks(["arc_easy"], tmp_path)
    before = run_tasks(model, tokenizer, asked)["arc_easy"]
    inside = run_tasks(model, tokenizer, asked, changes=[Change("first", first_only)])["arc_easy"]
    assert inside.loglikelihood != before.loglikelihood
    assert run_tasks(model, tokenizer, asked)["arc_easy"] == before


def test_nothing_is_left_behind_and_no_network_is_used(
    model: Any, tokenizer: Any, tmp_path: Path, arc: Any, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def refuse(*_: Any) -> None:
        raise AssertionError("a connection was attempted")

    harness.import_lm_eval()
    caches = tmp_path / "caches"
    caches.mkdir()
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.delenv("HF_DATASETS_OFFLINE", raising=False)
    monkeypatch.setenv("TMPDIR", str(caches))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    environment, vocabulary, pad = dict(os.environ), tokenizer.get_vocab(), tokenizer.pad_token
    run_tasks(model, tokenizer, load_tasks(["arc_easy"], tmp_path))
    assert dict(os.environ) == environment
    assert (tokenizer.get_vocab(), tokenizer.pad_token) == (vocabulary, pad)
    assert not list(caches.iterdir())
    asked = load_tasks(["arc_easy"], tmp_path)[0]
    assert not harness.build_task(asked, asked.definition.config, "arc_easy", 0).dataset["test"].cache_files
    assert capfd.readouterr() == ("", "")


def test_long_questions_are_counted_and_long_answers_refused(
    models: Any, tokenizer: Any, tmp_path: Path, arc: list[dict[str, Any]]
) -> None:
    small = models(positions=40)
    lengths = [len(tokenizer(f"{row['query']} {max(row['choices'], key=len)}")["input_ids"]) - 1 for row in arc]
    result = run_tasks(small, tokenizer, load_tasks(["arc_easy"], tmp_path))["arc_easy"]
    assert result.truncated == sum(length > 40 for length in lengths)
    write(tmp_path, "arc_easy", [{**arc[0], "choices": ["x", "zq" * 50]}])
    with pytest.raises(ConfigError, match=r"an answer of \d+ tokens does not fit the 40 that the model reads"):
        run_tasks(small, tokenizer, load_tasks(["arc_easy"], tmp_path))


def test_nan_is_named(models: Any, tokenizer: Any, tmp_path: Path, arc: Any) -> None:
    import torch

    broken = models()
    with torch.no_grad():
        broken.model.norm.weight.fill_(math.nan)
    with pytest.raises(CheckpointError, match="the model with no change gives NaN or infinite logits in task arc_easy"):
        run_tasks(broken, tokenizer, load_tasks(["arc_easy"], tmp_path))


def test_without_lm_eval_the_command_to_install_it_is_told(
    model: Any, tokenizer: Any, tmp_path: Path, arc: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lm_eval.evaluator", None)
    with pytest.raises(BackendUnavailable, match=r"pip install 'coterie\[eval\]'"):
        run_tasks(model, tokenizer, load_tasks(["arc_easy"], tmp_path))
