"""EleutherAI's lm-evaluation-harness on questions in memory: quiet, offline, and leaving nothing behind."""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from coterie.errors import BackendUnavailable, ConfigError
from coterie.evaluate.task_data import Questions
from coterie.models.backend import import_transformers, quiet

_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_EVALUATE_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
LIKELIHOOD = "likelihood"  # what the second form of a generating task is called, after its name


def import_lm_eval() -> Any:
    """The package `lm_eval` with its evaluator.

    Raises:
        BackendUnavailable: when it is not installed.
    """
    import_transformers()
    try:
        importlib.import_module("datasets")
        importlib.import_module("lm_eval.evaluator")
        importlib.import_module("lm_eval.models.huggingface")
        return importlib.import_module("lm_eval")
    except ImportError as error:
        raise BackendUnavailable(
            f"the tasks need lm-eval, which is not installed ({error}); run: pip install 'coterie[eval]'"
        ) from error


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Hugging Face's libraries told not to use the network, inside the block."""
    before = {name: os.environ.get(name) for name in _OFFLINE}
    os.environ.update(_OFFLINE)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def hushed(show_bars: bool) -> Iterator[None]:
    """The harness without its log and its prints; with `show_bars` its progress bars stay on stderr."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    stderr = sys.stderr if show_bars else io.StringIO()
    try:
        with quiet(), contextlib.redirect_stdout(stderr), contextlib.redirect_stderr(stderr):
            yield
    finally:
        logger.setLevel(level)


def build_task(asked: Questions, config: Mapping[str, Any], name: str, seed: int) -> Any:
    """One of the harness's tasks over rows in memory.

    Args:
        asked: the questions.
        config: the harness's configuration of the task.
        name: what the harness is to call it.
        seed: which worked examples are shown.
    """
    datasets = importlib.import_module("datasets")
    api = importlib.import_module("lm_eval.api.task")
    splits = {"test": datasets.Dataset.from_list(asked.rows)}
    if asked.examples:
        splits["examples"] = datasets.Dataset.from_list(asked.examples)
    settings = {
        "num_fewshot": 0,
        **copy.deepcopy(dict(config)),
        "task": name,
        "test_split": "test",
        "fewshot_split": "examples" if asked.examples else None,
        "custom_dataset": lambda **_: splits,  # the harness would look for a path on the hub
    }
    built = api.ConfigurableTask(config={key: value for key, value in settings.items() if value is not None})
    built.set_fewshot_seed(seed)
    return built


def wrap_model(model: Any, tokenizer: Any, batch: int) -> Any:
    """The model as the harness sees it, with a copy of the tokenizer, as the harness may give it a padding token."""
    huggingface = importlib.import_module("lm_eval.models.huggingface")
    return huggingface.HFLM(
        pretrained=model,
        tokenizer=copy.deepcopy(tokenizer),
        backend="causal",
        batch_size=batch,
        softmax_dtype="float32",
    )


def run(lm: Any, tasks: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Ask every question and return what the harness logged of each, by task; the answers are in their metrics."""
    evaluator = importlib.import_module("lm_eval.evaluator")
    results = evaluator.evaluate(lm=lm, task_dict={"tasks": dict(tasks)}, log_samples=True, bootstrap_iters=0)
    samples: dict[str, list[dict[str, Any]]] = results["samples"]
    return samples


def count_truncated(lm: Any, task: Any, seed: int) -> int:
    """How many questions are longer than the model can read, so that the harness cuts off their beginning.

    Raises:
        ConfigError: when an answer alone does not fit.
    """
    task.build_all_requests(rank=0, world_size=1)
    truncated = set()
    for request in task.instances:
        if request.request_type == "generate_until":
            question, settings = request.args
            answer, limit = settings["max_gen_toks"], lm.max_length - 1
            length = answer + len(lm.tok_encode(question))
        else:
            question, continuation = request.args
            answer, limit = len(lm.tok_encode(continuation, add_special_tokens=False)), lm.max_length
            length = len(lm.tok_encode(question + continuation)) - 1  # the last token is only predicted
        if answer > limit:
            raise ConfigError(
                f"task {task.config.task}: an answer of {answer} tokens does not fit the {lm.max_length} that the "
                "model reads; leave the task out, or use a model with a longer context"
            )
        if length > lm.max_length:
            truncated.add(request.doc_id)
    task.set_fewshot_seed(seed)  # building the requests has drawn examples; the run draws the same
    return len(truncated)
